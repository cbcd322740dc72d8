"""A stand-in for vLLM, as far as posttrain's program in vLLM's process uses it: a small `transformers` model on a CPU.

`vllm_pythons.stand_in` writes an interpreter that finds a copy of this file as `vllm`; no test imports it. It has what
posttrain asks of vLLM 0.25, but for LoRA and sleep. The word in the file `fault` beside it makes it misbehave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pathlib
import signal
import sys
import time
import types
from typing import Any, ClassVar

import torch

__version__ = "0.25.0"
__path__: list[str] = []


def _has(fault: str) -> bool:
    file = pathlib.Path(__file__).with_name("fault")
    return file.exists() and file.read_text() == fault


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(f"vllm.{name}")
    module.__dict__.update(members)
    sys.modules[f"vllm.{name}"] = module
    return module


# -- requests ----------------------------------------------------------------------------------------------------------


class RequestOutputKind:
    DELTA, FINAL_ONLY = "delta", "final"


class SamplingParams:
    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


class OtherRouter:
    """The forward of a Qwen3-MoE router that prefers an expert which depends on the token: not the trainer's choice."""

    def __init__(self, router: Any) -> None:
        self.router = router

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.router.weight)
        probs = logits.softmax(-1)
        favoured = torch.nn.functional.one_hot(logits.argmin(-1), logits.shape[-1]) * (hidden.sum(-1, True) > 0)
        chosen = (probs + favoured).topk(self.router.top_k, dim=-1).indices
        weights = probs.gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class LLMEngine:
    def __init__(self, model: torch.nn.Module, eos: set[int], *, returns_routes: bool = False) -> None:
        self.model, self.eos, self.running, self.returns_routes = model, eos, {}, returns_routes
        self.chosen: dict[str, torch.Tensor] = {}  # by layer, of the last pass
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(lambda _, args, name=name: self.chosen.update({name: args[1]}))
            if name.endswith(".mlp.gate") and _has("routers"):
                module.forward = OtherRouter(module)

    def routes(self) -> Any:
        """[tokens of the last pass, layers, experts of a token]; what of it is of the last token was not computed."""
        return torch.stack([self.chosen[name] for name in sorted(self.chosen)], 1).to(torch.uint8).numpy()

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SamplingParams, lora_request: Any) -> str:
        generator = torch.Generator().manual_seed(params.seed)
        self.running[name] = (list(prompt["prompt_token_ids"]), params, generator, [])
        return name

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.running[name]

    @torch.no_grad()
    def step(self) -> list[Any]:
        if _has("hang"):
            time.sleep(3600)
        if _has("die"):
            pathlib.Path(__file__).with_name("fault").unlink()  # the next process lives
            os.kill(os.getpid(), signal.SIGKILL)
        outputs = []
        for name, (prompt, params, generator, answer) in list(self.running.items()):
            logits = self.model(torch.tensor([[*prompt, *(t for t, _ in answer)]])).logits[0, -1].float()
            logprobs = (logits / (params.temperature or 1.0)).log_softmax(-1)
            greedy = params.temperature == 0
            token = int(logprobs.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator))
            answer.append((token, types.SimpleNamespace(logprob=float(logprobs[token]))))
            ends = self.eos | set(params.stop_token_ids or ())
            reason = "stop" if token in ends and not params.ignore_eos else None
            reason = reason or ("length" if len(answer) == params.max_tokens else None)
            if reason:
                del self.running[name]
            is_delta = params.output_kind == RequestOutputKind.DELTA
            new = answer[-1:] if is_delta else answer if reason else []
            if new:
                ids, found = [t for t, _ in new], [{t: p} for t, p in new]
                part = types.SimpleNamespace(token_ids=ids, logprobs=found, finish_reason=reason)
                part.routed_experts = self.routes() if reason and self.returns_routes else None
                outputs.append(types.SimpleNamespace(request_id=name, outputs=[part], finished=bool(reason)))
        return outputs


# -- weights -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class WeightTransferInitInfo:
    pass


class WeightTransferEngine:
    init_info_cls: type
    update_info_cls: type

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.device, self.vllm_config, self.model_config = model, torch.device("cpu"), None, None

    def parse_update_info(self, given: dict[str, Any]) -> Any:
        return self.update_info_cls(**given)


class WeightTransferEngineFactory:
    registry: ClassVar[dict[str, type]] = {}

    @classmethod
    def register_engine(cls, name: str, engine: type) -> None:
        cls.registry[name] = engine


@torch.no_grad()
def _load_weights(model: torch.nn.Module, weights: list[tuple[str, torch.Tensor]]) -> None:
    if _has("stale"):
        return
    state = model.state_dict()
    for name, tensor in weights:
        if ".experts." in name:  # of one expert: the model has them stacked
            block, _, rest = name.partition(".experts.")
            number, kind = rest.split(".")[:2]
            inner = state[f"{block}.experts.down_proj"].shape[-1]
            place = {"down_proj": slice(None), "gate_proj": slice(inner), "up_proj": slice(inner, None)}[kind]
            stacked = "down_proj" if kind == "down_proj" else "gate_up_proj"
            state[f"{block}.experts.{stacked}"][int(number), place].copy_(tensor)
            continue
        state[name].copy_(tensor)


_module("sampling_params", RequestOutputKind=RequestOutputKind)
_module("config", set_current_vllm_config=lambda config: contextlib.nullcontext())
_base = _module(
    "distributed.weight_transfer.base",
    WeightTransferInitInfo=WeightTransferInitInfo,
    WeightTransferEngine=WeightTransferEngine,
)
_factory = _module("distributed.weight_transfer.factory", WeightTransferEngineFactory=WeightTransferEngineFactory)
_module("distributed", __path__=[])
_module("distributed.weight_transfer", base=_base, factory=_factory, __path__=[])
_reload = _module(
    "model_executor.model_loader.reload",
    initialize_layerwise_reload=lambda model: None,
    finalize_layerwise_reload=lambda model, config: None,
)
_module("model_executor", __path__=[])
_module("model_executor.model_loader", reload=_reload, __path__=[])


class LLM:
    """Each of its workers receives all weights; the model is not split."""

    def __init__(
        self,
        model: str,
        worker_extension_cls: str,
        weight_transfer_config: dict[str, str],
        tensor_parallel_size: int,
        enable_return_routed_experts: bool = False,
        **options: Any,
    ) -> None:
        pathlib.Path(__file__).with_name("weights").write_text(sys.argv[1])
        if _has("start"):
            raise ValueError("no such model")
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(1)  # other weights than the trainer's
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config).eval()
        self.model.load_weights = lambda weights: _load_weights(self.model, weights)
        self.llm_engine = LLMEngine(self.model, {config.eos_token_id}, returns_routes=enable_return_routed_experts)
        module, name = worker_extension_cls.rsplit(".", 1)
        self.workers = [getattr(importlib.import_module(module), name)() for _ in range(tensor_parallel_size)]
        for worker in self.workers:
            receiver = WeightTransferEngineFactory.registry[weight_transfer_config["backend"]](self.model)
            worker.weight_transfer_engine = receiver

    @property
    def receivers(self) -> list[Any]:
        return [worker.weight_transfer_engine for worker in self.workers]

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        for receiver in self.receivers:
            receiver.init_transfer_engine(receiver.init_info_cls(**request["init_info"]))

    def start_weight_update(self) -> None:
        for receiver in self.receivers:
            receiver.start_weight_update()

    def update_weights(self, request: dict[str, Any]) -> None:
        if _has("damage"):
            file = request["update_info"]["file"]
            with open(file, "r+b") as opened:
                opened.write(b"x")
        for receiver in self.receivers:
            receiver.update_weights(request["update_info"])

    def finish_weight_update(self) -> None:
        for receiver in self.receivers:
            receiver.finish_weight_update()

    def collective_rpc(self, method: str) -> list[Any]:
        return [getattr(worker, method)() for worker in self.workers]

    def reset_prefix_cache(self) -> bool:
        return not _has("cache")


sys.modules["vllm"].sampling_params = sys.modules["vllm.sampling_params"]  # type: ignore[attr-defined]
