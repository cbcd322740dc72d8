"""What the fused layers are tested against, slow and obvious; and small models to run them in, on any device.

Used by `unit/policy/interpreted_fused.py` (Triton's interpreter, on a CPU), by `gpu/test_fused_layers.py`, and by tests
that are about everything but the kernels, `unit/policy/test_fusing.py` and `test_fused_adapters.py`: these have the
kernels replaced by torch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_references import torch_rotation
from tiny_models import SLIDING_WINDOW, VOCAB_SIZE, byte_tokenizer, randomise, tiny_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.models.attention_interface import ATTENTION, attention_context
from posttrain.policy.checkpoint.files import load
from posttrain.policy.checkpoint.writer import CheckpointWriter
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.optimizer.mixed_precision import MixedPrecisionOptimizer
from posttrain.policy.packed import PackedRow
from posttrain.types import TokenBatch

EPS = 1e-5


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * sum(shape)))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is filled with NaN, so that unwritten elements are detected."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def assert_near(name: str, ours: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative to the largest number of the tensor."""
    assert ours.shape == expected.shape, name
    if not ours.numel():
        return
    assert ours.isfinite().all(), f"{name}: everything was written"
    wide, ours = expected.double().cpu(), ours.double().cpu()
    error = (ours - wide).abs().max() / wide.abs().max().clamp_min(1e-3)
    assert error <= tolerance, f"{name}: relative error {error:.2e}"


# -- operations --------------------------------------------------------------------------------------------------------

Outputs = Tensor | tuple[Tensor, ...]


def assert_like_float64(
    ours: Callable[..., Outputs],
    reference: Callable[..., Outputs],
    inputs: Mapping[str, Tensor],
    tolerance: float,
    *,
    frozen: Sequence[str] = (),
    unused: Sequence[int] = (),
) -> dict[str, Tensor | None]:
    """Outputs and gradients of `ours` against `reference` under autograd in float64. Returns our gradients.

    `frozen` inputs need no gradient; outputs in `unused` take no part in the loss.
    """
    given = {name: tensor.clone().requires_grad_(name not in frozen) for name, tensor in inputs.items()}
    wide = {name: tensor.detach().double().requires_grad_(name not in frozen) for name, tensor in inputs.items()}
    with poisoned_memory():
        outs = _as_tuple(ours(**given))
        expected = _as_tuple(reference(**wide))
        weights = [noise(*out.shape, seed=place).to(out.device) for place, out in enumerate(expected)]
        kept = [place for place in range(len(outs)) if place not in unused]
        torch.autograd.backward(
            [outs[place] for place in kept], [weights[place].to(outs[place].dtype) for place in kept]
        )
        torch.autograd.backward([expected[place] for place in kept], [weights[place].double() for place in kept])
    for place, (out, want) in enumerate(zip(outs, expected, strict=True)):
        assert_near(f"output {place}", out, want, tolerance)
    for name, tensor in given.items():
        if name in frozen:
            assert tensor.grad is None, name
            continue
        grad = tensor.grad
        if grad is None:
            assert wide[name].grad is None or not wide[name].grad.any(), f"{name} has no gradient"
            continue
        assert grad.dtype == tensor.dtype
        want = wide[name].grad
        assert_near(f"gradient of {name}", grad, torch.zeros_like(wide[name]) if want is None else want, tolerance)
    return {name: tensor.grad for name, tensor in given.items()}


def _as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


def angles(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    half = noise(rows, dim // 2, seed=3) * 3
    both = torch.cat([half, half], dim=1)
    return both.cos(), both.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
    """The first `num_heads` heads of each row turned, the rest as it was."""
    dim = cos.shape[1]
    heads = x[:, : num_heads * dim].unflatten(1, (num_heads, dim))
    return torch.cat([torch_rotation(heads, cos.to(x), sin.to(x)).flatten(1), x[:, num_heads * dim :]], dim=1)


def use_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' functions in torch, on any device: float64 stays what it is, everything else is computed in fp32."""
    from posttrain.policy.fused import kernels, layers

    def wide(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else x.float()

    def norm_forward(
        x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, *, adds_one: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = x if delta is None else x + delta
        scale = (wide(total).square().mean(-1) + eps).rsqrt()
        return total, norm_again(total, weight, scale, dtype, adds_one=adds_one), scale

    def norm_again(x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, *, adds_one: bool = False) -> Tensor:
        return (wide(x) * scale[:, None] * (wide(weight) + adds_one)).to(dtype)

    def norm_backward(
        grad_y: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor,
        delta_dtype: torch.dtype | None, *, needs_weight: bool, adds_one: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        grad_y = wide(grad_y)
        normed, weighted = wide(x) * scale[:, None], grad_y * (wide(weight) + adds_one)
        grad = scale[:, None] * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        grad = grad if grad_sum is None else grad + grad_sum
        grad_weight = (grad_y * normed).sum(0).to(weight.dtype) if needs_weight else None
        return grad.to(x.dtype), None if delta_dtype is None else grad.to(delta_dtype), grad_weight

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, num_heads: int, *, out: Tensor, backward: bool = False) -> Tensor:
        return out.copy_(rotated(wide(x), cos, -sin if backward else sin, num_heads))

    def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(wide(gate), wide(up)).to(gate.dtype)

    def swiglu_backward(
        grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, *, again: bool
    ) -> Tensor | None:
        product = swiglu_forward(gate, up) if again else None
        grad, gate, up = wide(grad), wide(gate), wide(up)
        gated = gate.sigmoid()
        grad_gate.copy_(grad * up * (gated + gate * gated * (1 - gated)))
        grad_up.copy_(grad * gate * gated)
        return product

    replaced: dict[str, Any] = {
        "runs_on": lambda device: True, "norm_forward": norm_forward, "norm_again": norm_again, "rotate": rotate,
        "norm_backward": norm_backward, "swiglu_forward": swiglu_forward, "swiglu_backward": swiglu_backward,
        "add": lambda x, delta: (x + delta).to(x.dtype),
    }  # fmt: skip
    for name, function in replaced.items():
        monkeypatch.setattr(kernels, name, function)
    monkeypatch.setattr(layers, "_fuse_gated_norm", lambda norm: None)


# -- models ------------------------------------------------------------------------------------------------------------

# Of every family: how many of its layers are fused.
FUSED_LAYERS = {
    "llama": 2,
    "llama with biases": 2,
    "qwen2": 2,
    "qwen3": 2,
    "mistral": 2,
    "smollm3": 2,  # of three: one does not rotate
    "gemma2": 0,
    "granite": 0,
    "phi3": 0,
}
FUSED_BEFORE_EXPERTS = ["qwen3-moe", "gpt-oss"]
# Their mixers are called as modules: how many of the layers are fused around them.
FUSED_AROUND_MIXERS = {"qwen3.5": 3, "qwen3.5-vision": 3, "qwen3-next": 3, "deepseek-v3": 2, "gemma": 2}
FUSED = [family for family, count in FUSED_LAYERS.items() if count]


def family_model(family: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **overrides: Any) -> Any:
    """In training mode. Head dimension and widths are no powers of two where the family lets us choose."""
    shape: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "head_dim": 12, **overrides}
    if family == "deepseek-v3":  # of what is rotated
        shape["head_dim"] = 4
    if family == "llama with biases":
        model: Any = tiny_model("llama", attention_bias=True, mlp_bias=True, **shape)
    elif family in ("smollm3", "phi3"):
        model = _other_model(family, shape)
    else:
        model = tiny_model(family, dtype=dtype, **shape)
    if dtype == torch.float64:
        _use_exact_norms(model)
    return model.to(device, dtype).train()


def _use_exact_norms(model: nn.Module) -> None:
    """Those of `transformers` go through fp32."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight, eps = (
            (self.weight, self.variance_epsilon) if hasattr(self, "variance_epsilon") else (1 + self.weight, self.eps)
        )
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and (hasattr(module, "variance_epsilon") or "Qwen3" in name or "GemmaRMS" in name):
            module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


def _other_model(family: str, shape: Mapping[str, Any]) -> nn.Module:
    extra = {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": False}
    if family == "phi3":
        extra = {"num_hidden_layers": 2, "sliding_window": SLIDING_WINDOW}
        shape = {"hidden_size": 32, "intermediate_size": 40}
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB_SIZE, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        attention_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, **{**shape, **extra},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    model.config.use_cache = False
    randomise(model, 0)
    return model


def random_batch(
    prompts: Sequence[int], responses: Sequence[int], prompt_of: Sequence[int], seed: int = 0
) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()

    return TokenBatch.build(
        [ids(n) for n in prompts], [ids(n) for n in responses], prompt_of, {"mask": torch.ones(sum(responses))}
    )


# Longer than the sliding window; a prompt that two responses share, and one of one token.
SHARED = random_batch([5, 1], [4, 1, 2], [0, 1, 0])


def states_and_gradients(
    model: nn.Module, batch: TokenBatch = SHARED, *, backward: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the model says, and the gradient of every parameter that has one; gradients on the model are taken away.

    Hidden states, and log-probabilities unless the model is in float64: those are made in fp32.
    """
    root = TokenLogprobs(model)
    weight = root.head.weight
    row = PackedRow.build(batch, weight.device)
    values: dict[str, Tensor] = {}
    hook = root.head.decoder.register_forward_hook(
        lambda _module, _args, out: values.update(hidden=out.last_hidden_state)
    )
    with attention_context(row.attention):
        if weight.dtype == torch.float64:
            root.head.hidden(row.input_ids, row.position_ids)
        else:
            values["logprobs"] = root(row, 0.7)
        hook.remove()
        if backward:
            weighted = [(value * noise(*value.shape).to(value)).sum() for value in values.values()]
            sum(weighted).backward()  # type: ignore[union-attr]
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads[name] = parameter.grad.detach().clone()
            parameter.grad = None
    return {name: value.detach() for name, value in values.items()}, grads


def assert_same_model(ours: nn.Module, expected: nn.Module, tolerance: float, batch: TokenBatch = SHARED) -> None:
    """Hidden states, log-probabilities and the gradients of all parameters."""
    with poisoned_memory():
        values, grads = states_and_gradients(ours, batch)
    want_values, want_grads = states_and_gradients(expected, batch)
    assert grads.keys() == want_grads.keys()
    assert grads
    for name, value in {**values, **grads}.items():
        assert_near(name, value, {**want_values, **want_grads}[name], tolerance)


def mean_error(model: nn.Module, exact: nn.Module) -> float:
    """Of hidden states, log-probabilities and gradients, relative to their norms, over many rows."""
    total, count = 0.0, 0
    for seed in range(6):
        batch = random_batch([9], [6, 5], [0, 0], seed)
        (values, grads), (want_values, want_grads) = (states_and_gradients(each, batch) for each in (model, exact))
        ours = {**values, **grads}
        for name, want in {**want_values, **want_grads}.items():
            total += float((ours[name].double() - want.double()).norm() / want.double().norm())
            count += 1
    return total / count


@torch.no_grad()
def trainer_logprobs(
    model: nn.Module, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], prompt_of: Sequence[int]
) -> Tensor:
    """What training would say of sampled tokens, at temperature 1; the model is in evaluation mode afterwards."""
    batch = TokenBatch.build(prompts, responses, prompt_of, {"mask": torch.ones(sum(map(len, responses)))})
    row = PackedRow.build(batch, next(model.parameters()).device)
    with attention_context(row.attention):
        logprobs: Tensor = TokenLogprobs(model.eval())(row, 1.0)
    return logprobs.cpu()


def decoder_of(model: Any) -> nn.Module:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    decoder: nn.Module = base.get_decoder()
    return decoder


def num_fused(model: nn.Module) -> int:
    from posttrain.policy.fused.layers import FusedLayer

    return sum(isinstance(module.forward, FusedLayer) for module in model.modules())


# -- trained models ----------------------------------------------------------------------------------------------------


def stepped(model: nn.Module) -> nn.Module:
    """After two updates of every parameter that is trained, in place."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    for _ in range(2):
        _, grads = states_and_gradients(model)
        for name, parameter in parameters.items():
            parameter.grad = grads.get(name)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def assert_resumes(make_model: Callable[[], Any], folder: Path) -> None:
    """A step, a checkpoint and another step give the bits of two steps."""
    tokenizer = byte_tokenizer()

    def make() -> tuple[Any, MixedPrecisionOptimizer]:
        model = make_model()
        return model, MixedPrecisionOptimizer(model, "torch.optim.AdamW", {"lr": 1e-2}, None)

    def step(model: Any, optimizer: MixedPrecisionOptimizer) -> None:
        states_and_gradients(model)
        assert optimizer.step(1.0)[1], "the step was taken"

    model, optimizer = make()
    step(model, optimizer)
    CheckpointWriter(model, tokenizer, optimizer, torch.device("cpu")).save(folder, optimizer=True)
    step(model, optimizer)
    resumed, again = make()
    load(folder, resumed, tokenizer, again)
    step(resumed, again)
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    hidden = [states_and_gradients(each, backward=False)[0]["hidden"] for each in (model, resumed)]
    assert torch.equal(*hidden)
