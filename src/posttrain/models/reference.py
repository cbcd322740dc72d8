"""What a user may name as a model, and the engine that samples from it. Shared by eval, gate, serve, chat and pipeline.

    models/smollm2-135m-instruct      a Hugging Face folder
    results/adapter                   a peft adapter; its own config names the base model
    results/grpo/step_60              a checkpoint, full or LoRA (a folder below it, such as policy/weights, means the same)
    results/grpo                      a run: its newest checkpoint that is whole
    Qwen/Qwen3-0.6B                   a name on the model hub

`resolve_model` reads names and small files only; nothing is fetched and torch is not imported. `resolve_registered_model`
also knows `registry:NAME@production`, for which it asks the registry. URLs are their callers' business.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.checkpointing import CheckpointStore
from posttrain.checkpointing.integrity import CHECKSUMS, find_damage
from posttrain.errors import InputError, reason_of
from posttrain.models.hub import looks_like_hub_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from posttrain.engines.native.engine import NativeEngine

WEIGHTS = Path("policy/weights/model")
TOKENIZER = Path("policy/tokenizer")
ACCEPTED = (
    "a Hugging Face folder, a peft adapter folder, a checkpoint (step_N), the folder of a run, or a hub name such as "
    "Qwen/Qwen3-0.6B"
)
_STEP = re.compile(r"step_(\d+)")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")

Kind = Literal["folder", "adapter", "checkpoint", "hub"]


class ModelReferenceError(InputError):
    """The name of a model that leads to none."""


@dataclass(frozen=True)
class ModelReference:
    """A model that can be loaded: `model` with plain transformers, then `adapter` on top of it with peft."""

    text: str  # as the user wrote it
    kind: Kind
    model: str  # folder or hub name of the weights; with an adapter, of the base model
    tokenizer: str  # folder or hub name
    adapter: Path | None = None
    step: int | None = None  # of a checkpoint
    checkpoint: Path | None = None  # the folder step_N
    run_folder: Path | None = None  # the folder that holds step_N

    @property
    def files(self) -> Path | None:
        """The folder that makes this model different from others: adapter or weights; None for one on the hub."""
        if self.adapter is not None:
            return self.adapter
        return None if self.kind == "hub" else Path(self.model)


def resolve_model(
    reference: str | Path, *, base: str | None = None, say: Callable[[str], None] | None = None
) -> ModelReference:
    """The model that `reference` names. `base` overrides the base model that an adapter names, e.g. if it has moved."""
    text = str(reference)
    if not text.strip():
        raise ModelReferenceError(f"the name of the model is empty; accepted: {ACCEPTED}")
    if re.match(r"[a-z]+://|registry:", text):
        raise ModelReferenceError(f"{text!r} is no model that can be loaded here; accepted: {ACCEPTED}")
    path = Path(text).expanduser()
    if path.is_dir():
        return _resolve_folder(text, path, base, say or _to_stderr)
    if path.is_file():
        hint = "; `posttrain models` and `transformers` import GGUF files" if path.suffix == ".gguf" else ""
        raise ModelReferenceError(f"{text!r} is a file; accepted: {ACCEPTED}{hint}")
    if looks_like_hub_name(text):
        return ModelReference(text=text, kind="hub", model=text, tokenizer=text)
    raise ModelReferenceError(f"no folder {text!r}; accepted: {ACCEPTED}")


def resolve_registered_model(text: str) -> ModelReference:
    """As `resolve_model`; of a `registry:` name, the version that it means now, its files compared with their checksums."""
    if not text.startswith("registry:"):
        return resolve_model(text)
    from posttrain.registry import resolve_version

    return resolve_model(resolve_version(text).path)


def find_checkpoint(path: Path, say: Callable[[str], None]) -> Path | None:
    """The folder step_N that `path` is, lies in (`step_N/policy/weights`), or, as a run's folder, holds as its newest."""
    if (path / "policy" / "weights").is_dir():
        return path
    absolute = path.absolute()
    for inner in ("policy", "policy/weights", "policy/weights/model"):
        depth = len(Path(inner).parts)
        if absolute.parts[-depth:] == Path(inner).parts and _STEP.fullmatch(absolute.parents[depth - 1].name):
            return path.parents[depth - 1] if len(path.parts) > depth else absolute.parents[depth - 1]
    return _newest_checkpoint(path, say)


def _newest_checkpoint(run_folder: Path, say: Callable[[str], None]) -> Path | None:
    store = CheckpointStore(
        run_folder, keep_top_k=None, metric_name=None, higher_is_better=True, save_period=1, say=say
    )
    steps = store.steps()
    if not steps:
        return None
    newest = run_folder / f"step_{steps[-1]}"
    if newest.is_dir() and not (newest / CHECKSUMS).exists() and not (newest / "policy" / "model.json").exists():
        return newest  # another system's: it has no checksums to compare with
    found = store.latest()
    if found is None:
        raise ModelReferenceError(
            f"{run_folder}: none of its checkpoints ({', '.join(f'step_{step}' for step in steps)}) is whole"
        )
    return found


def _resolve_folder(text: str, path: Path, base: str | None, say: Callable[[str], None]) -> ModelReference:
    checkpoint = find_checkpoint(path, say)
    if checkpoint is not None:
        return _resolve_checkpoint(text, checkpoint, base)
    if (path / "adapter_config.json").is_file():
        model = base or adapter_base(path)
        tokenizer = str(path) if (path / "tokenizer_config.json").is_file() else model
        return ModelReference(text=text, kind="adapter", model=model, tokenizer=tokenizer, adapter=path)
    check_model_folder(path)
    return ModelReference(text=text, kind="folder", model=str(path), tokenizer=str(path))


def _resolve_checkpoint(text: str, checkpoint: Path, base: str | None) -> ModelReference:
    if (checkpoint / CHECKSUMS).exists() and (
        problems := find_damage(checkpoint, contents=False, below="policy/weights")
    ):
        raise ModelReferenceError(f"{checkpoint} is damaged: {'; '.join(problems[:3])}")
    weights = checkpoint / WEIGHTS
    tokenizer = checkpoint / TOKENIZER
    adapter = weights if (weights / "adapter_config.json").is_file() else None
    if adapter is not None:
        model = base or adapter_base(adapter)
    else:
        if not (weights / "config.json").is_file():
            raise ModelReferenceError(
                f"{checkpoint}: its weights are not in the Hugging Face format. Convert them first: "
                f"posttrain convert {checkpoint} --to FOLDER"
            )
        check_model_folder(weights)
        model = str(weights)
    match = _STEP.search(checkpoint.name)
    return ModelReference(
        text=text,
        kind="checkpoint",
        model=model,
        tokenizer=str(tokenizer) if tokenizer.is_dir() else model,
        adapter=adapter,
        step=int(match[1]) if match else None,
        checkpoint=checkpoint,
        run_folder=checkpoint.parent,
    )


def check_model_folder(path: Path) -> None:
    """Raise unless the folder has a config and every weight file that its index names."""
    if not (path / "config.json").is_file():
        raise ModelReferenceError(
            f"{path} is a folder without config.json, adapter_config.json or step_N; accepted: {ACCEPTED}"
        )
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHT_FILES):
        raise ModelReferenceError(f"{path} has a config.json but no weights (*.safetensors or pytorch_model.bin)")
    for index in sorted(path.glob("*.index.json")):
        named = files_of_index(index)
        if lacking := [name for name in named if not (path / name).is_file()]:
            raise ModelReferenceError(f"{path}: {index.name} names {len(named)} files, and {lacking[0]} is missing")


def files_of_index(index: Path) -> list[str]:
    """The weight files that the index of a model in several files names."""
    content = read_json(index).get("weight_map")
    names = content.values() if isinstance(content, dict) else ()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelReferenceError(
            f"{index}: weight_map is {content!r:.80}; an object with the file of every weight is needed, each "
            "in the same folder"
        )
    return sorted(set(names))


def adapter_base(adapter: Path) -> str:
    """The base model that an adapter's config names, as something that can be loaded."""
    path = adapter / "adapter_config.json"
    name = read_json(path).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ModelReferenceError(
            f"{path} names no base_model_name_or_path, so the model under the adapter is not known"
        )
    if Path(name).is_dir():
        check_model_folder(Path(name))
        return name
    if looks_like_hub_name(name):
        return name
    raise ModelReferenceError(
        f"{path}: base_model_name_or_path {name!r} is not here; put the base model there, or write its new place into the file"
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelReferenceError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelReferenceError(f"{path} holds a {type(content).__name__} instead of an object")
    return content


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


# -- loading -----------------------------------------------------------------------------------------------------------


def load_for_sampling(
    reference: ModelReference | str,
    *,
    precision: str = "auto",
    device: str = "auto",
    max_total_tokens: int | None = None,
    native_settings: Mapping[str, Any] | None = None,
    adapt: Callable[[nn.Module], nn.Module] | None = None,
) -> tuple[NativeEngine, Any]:
    """The native engine over the model, and its tokenizer. There is no optimizer and nothing needs gradients.

    `precision`: float32, bfloat16, or auto (bfloat16 on a GPU, float32 on a CPU). `max_total_tokens` None is the length
    that the model was made for. `native_settings` are the keys of `policy.generation.native_cfg`. `adapt` may change the
    model's modules, for instance put more adapters on it: later is too late, the engine looks modules up once.
    """
    from posttrain.engines.native.engine import NativeEngine, NativeSettings
    from posttrain.models.loading import load_tokenizer, resolve_device

    reference = reference if isinstance(reference, ModelReference) else resolve_model(reference)
    where = resolve_device(device)
    model = load_with_adapter(reference, sampling_dtype(precision, where), where)
    model = model if adapt is None else adapt(model)
    tokenizer = load_tokenizer(reference.tokenizer, f"model {reference.text!r}")
    length = max_total_tokens or int(getattr(_text_config(model), "max_position_embeddings", 0) or 4096)
    settings = NativeSettings(**dict(native_settings or {}), max_total_tokens=length)
    if where.type == "cuda":
        import torch

        # As in training: adding the parts of a small matrix product up in bf16 would change the numbers.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return NativeEngine(model, tokenizer, settings), tokenizer


def load_with_adapter(reference: ModelReference, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model, with its adapter if it has one, in evaluation mode and without gradients."""
    from posttrain.models.loading import load_model

    try:
        model: nn.Module = load_model(reference.model, dtype, device)
    except ValueError as error:
        said = reason_of(error).removeprefix("policy.model_name").lstrip(": ")
        raise ModelReferenceError(f"model {reference.text!r}: {said}") from error
    if reference.adapter is not None:
        model = add_adapter(model, reference.adapter)
    return model.eval().requires_grad_(False)


def add_adapter(model: nn.Module, adapter: Path, name: str = "default") -> nn.Module:
    """A peft adapter on a loaded base model; ModelReferenceError if the two do not belong together."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import SafetensorError, safe_open

    device = next(model.parameters()).device
    if not any((adapter / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise ModelReferenceError(f"{adapter} has an adapter_config.json but no weights (adapter_model.safetensors)")
    try:
        adapted = PeftModel.from_pretrained(
            model, str(adapter), adapter_name=name, autocast_adapter_dtype=False, torch_device=str(device)
        )
    except SafetensorError as error:
        raise ModelReferenceError(f"{adapter / 'adapter_model.safetensors'} is damaged: {error}") from error
    except (RuntimeError, ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
        said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # torch's first line is a heading
        raise ModelReferenceError(f"the adapter {adapter} does not fit its base model: {said}") from error
    file = adapter / "adapter_model.safetensors"
    if file.is_file():
        with safe_open(file, framework="pt") as saved:
            found = set(saved.keys())
        expected = set(get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False))
        # peft may save whole embeddings beside an adapter, and loads them; it passes over other strangers silently.
        strangers = {key for key in found - expected if "embed" not in key and "lm_head" not in key}
        if unmatched := sorted((expected - found) | strangers):
            raise ModelReferenceError(
                f"the adapter {adapter} does not fit its base model: {len(unmatched)} weights have no partner, "
                f"among them {unmatched[0]}"
            )
    return adapted


def sampling_dtype(precision: str, device: torch.device) -> torch.dtype:
    from posttrain.models.loading import DTYPES

    if precision == "auto":
        return DTYPES["bfloat16" if device.type == "cuda" else "float32"]
    if precision not in DTYPES:
        raise ModelReferenceError(f"precision {precision!r} is not known; accepted: auto, {', '.join(DTYPES)}")
    return DTYPES[precision]


def _text_config(model: nn.Module) -> Any:
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    return base.config.get_text_config()
