"""LoRA adapters served as models: one base model in memory, a switch for the active adapter, and their tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain.data.chat import ChatFormat
from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import read_json
from posttrain.models.accepted_names import ModelReferenceError, ResolvedModel, resolve_registered_model
from posttrain.models.loading import load_tokenizer
from posttrain.models.lora import add_adapter
from posttrain.models.vision import KeptEmbeddings, VisionTower, tower_of
from posttrain.policy.head import without_adapter_wrapper

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OWN = "default"  # peft's name of the main model's own adapter
_MOST_NAMED = 5  # of the tokens that the base model does not have


@dataclass(frozen=True)
class ServedAdapter:
    folder: Path
    tokenizer: str | None  # folder of its own tokenizer; None if it has none
    model: ResolvedModel

    @property
    def source(self) -> str:
        """Its version in the registry, or its folder."""
        return self.model.text if self.model.registered is not None else str(self.folder)


def find_adapter(
    name: str, text: str, main: ResolvedModel, say: Callable[[str], None], registry: str | None = None
) -> ServedAdapter:
    """The adapter of `--adapter NAME=ADAPTER`, over the main model. The base model that it names is not looked up."""
    found = resolve_registered_model(text, registry=registry, base=main.model)
    if found.adapter is None:
        raise InputError(f"--adapter {name}={text}: there is a whole model, and an adapter is needed")
    trained_on = read_json(found.adapter / "adapter_config.json").get("base_model_name_or_path")
    folders = Path(str(trained_on)), Path(main.model)
    is_same = trained_on == main.model or (all(map(Path.is_dir, folders)) and folders[0].samefile(folders[1]))
    if trained_on and not is_same:
        say(f"warning: adapter {name} was trained on {trained_on}, and is put on {main.model}")
    own = found.tokenizer if found.tokenizer != found.model else None
    return ServedAdapter(found.adapter, own, found)


class AdapterSwitch:
    """Adds adapters to a model and activates one of them. "" is the model as loaded, also with an adapter."""

    def __init__(self, adapters: Mapping[str, Path]) -> None:
        self._adapters = dict(adapters)
        self._peft_name: dict[str, str | None] = {}
        self._tower: VisionTower | None = None  # that adapters change
        self._kept: dict[str, KeptEmbeddings] = {}  # of images, by adapter
        self.model: Any = None

    def add_to(self, model: nn.Module) -> nn.Module:
        """Add all adapters to the model. Call it before an engine looks up the modules."""
        self._peft_name = {"": _OWN if hasattr(model, "peft_config") else None}
        self.model = model
        for index, (name, folder) in enumerate(self._adapters.items()):
            _check_bias(name, folder)
            peft_name = f"adapter{index}"  # peft does not accept dots in names
            if hasattr(self.model, "peft_config"):
                _load_further(self.model, name, folder, peft_name)
            else:
                self.model = add_adapter(self.model, folder, peft_name)
            self._peft_name[name] = peft_name
        adapted: nn.Module = self.model.eval().requires_grad_(False)
        tower = tower_of(without_adapter_wrapper(adapted))
        if tower is not None and any(".lora_" in name for part in tower.parts for name, _ in part.named_parameters()):
            self._tower = tower
        return adapted

    def activate(self, name: str) -> None:
        peft_name = self._peft_name[name]
        tuner = getattr(self.model, "base_model", None)
        if not hasattr(self.model, "peft_config") or tuner is None:
            return
        if self._tower is not None:
            self._tower.kept = self._kept.setdefault(name, KeptEmbeddings())
        if peft_name is None:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            tuner.set_adapter(peft_name, inference_mode=True)


def _load_further(model: Any, name: str, folder: Path, peft_name: str) -> None:
    device = next(model.parameters()).device
    try:
        result = model.load_adapter(
            str(folder), adapter_name=peft_name, autocast_adapter_dtype=False, torch_device=str(device)
        )
    except (RuntimeError, ValueError, OSError, KeyError, TypeError) as error:
        raise ModelReferenceError(
            f"adapter {name!r}: {folder} does not fit the base model: {reason_of(error)}"
        ) from error
    lacking = [key for key in result.missing_keys if f".{peft_name}." in key]
    if unmatched := [*lacking, *result.unexpected_keys]:
        raise ModelReferenceError(
            f"adapter {name!r}: {folder} does not fit the base model: {len(unmatched)} weights have no counterpart, "
            f"among them {unmatched[0]}"
        )


def _check_bias(name: str, folder: Path) -> None:
    """Refuse trained biases: they stay in the model without the adapter, and would change other adapters."""
    bias = read_json(folder / "adapter_config.json").get("bias", "none")
    if bias != "none":
        raise ModelReferenceError(
            f"adapter {name!r} was trained with bias={bias!r} and cannot be switched off exactly; merge it into its "
            "base model (posttrain convert --merge-lora) and serve that"
        )


def load_adapter_tokenizer(
    name: str, adapter: ServedAdapter, main: ResolvedModel, say: Callable[[str], None]
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of an adapter over the main model, or None if the adapter has none of its own.

    An adapter is often saved with a tokenizer that has a few more tokens, for padding for instance. The main model has
    no trained embedding for them, so its own tokenizer is used with the chat template of the adapter. InputError if
    the vocabularies do not match otherwise.
    """
    if adapter.tokenizer is None:
        return None
    own = load_tokenizer(adapter.tokenizer, f"adapter {name!r}")
    base = load_tokenizer(main.tokenizer, f"model {main.text!r}")
    own_ids, base_ids = own.get_vocab(), base.get_vocab()
    if own_ids == base_ids:
        return own
    extra = set(own_ids) - set(base_ids)
    # A token that is not an added one is the result of a merge: ordinary text would be tokenised differently.
    if not base_ids.items() <= own_ids.items() or not extra <= set(own.get_added_vocab()):
        raise InputError(
            f"--adapter {name}: the tokenizer in {adapter.tokenizer} has another vocabulary than that of {main.text}"
        )
    # Of the further tokens, those that a conversation needs: in the template, by their role, or as the end of a turn.
    template = ChatFormat(own).template or ""
    named = {token for role, token in own.special_tokens_map.items() if role in template or role == "eos_token"}
    if needed := min((token for token in extra if token in named or token in template), default=None):
        raise InputError(
            f"--adapter {name}: its conversations are written with {needed!r}, a token that {main.text} does not have; "
            "merge the adapter into the base model that it was trained on (posttrain convert --merge-lora) and serve "
            "that"
        )
    shown = sorted(extra, key=own_ids.__getitem__)
    more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    say(
        f"warning: the tokenizer of adapter {name} has tokens that {main.text} does not have, and is served without "
        f"them: {', '.join(map(repr, shown[:_MOST_NAMED]))}{more}"
    )
    base.chat_template = template
    base.eos_token = own.eos_token
    if own.bos_token in base_ids:
        base.bos_token = own.bos_token
    return base


def warn_of_unused_template(
    name: str, tokenizer: PreTrainedTokenizerBase, main: ResolvedModel, say: Callable[[str], None]
) -> None:
    """For a server that uses the main model's chat template for every adapter."""
    base = load_tokenizer(main.tokenizer, f"model {main.text!r}")
    if (tokenizer.chat_template, tokenizer.eos_token) != (base.chat_template, base.eos_token):
        say(
            f"warning: adapter {name} has its own chat template, and vLLM uses that of {main.text} for every adapter: "
            "its answers may be worse than they should be; --backend native uses the adapter's own"
        )
