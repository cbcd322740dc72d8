"""The input of a conversion: finds weights, config, tokenizer and the run's config from one path.

Accepted are posttrain's checkpoints and NeMo RL's (`step_N/policy/weights`: safetensors whole or in shards, torch DCP),
folders of torch DCP on their own, Hugging Face folders and peft adapters. Nothing is written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.apps.export.merge_lora import Adapter, adapter_in, open_adapter
from posttrain.apps.export.weight_names import WeightShapes, config_file_of, is_lora, match_names, plain_name, prefix_of
from posttrain.apps.export.weight_sources import RenamedSource, WeightSource, open_weights
from posttrain.checkpointing import describe_model
from posttrain.checkpointing.integrity import CHECKSUMS, find_damage
from posttrain.config.yaml_files import read_document
from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import JsonMapping, JsonObject, read_json
from posttrain.models.accepted_names import TOKENIZER, adapter_base, check_model_folder, find_checkpoint
from posttrain.models.folder_checks import problem_in, refuse_links_outside, refuse_pipes
from posttrain.models.hub import looks_like_hub_name, why_unavailable
from posttrain.models.loading import explain_config_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Say = Callable[[str], None]
_FILES_OF_A_MODEL = ("*.safetensors", ".metadata", "config.json", "adapter_config.json")
_BASES = "a Hugging Face folder, or a hub name such as Qwen/Qwen3-0.6B"


class ConversionError(InputError):
    """Something that cannot be converted, and what to do about it."""


@dataclass(frozen=True)
class ConversionInput:
    text: str  # as the user wrote it
    folder: Path  # of the weights, or of the adapter
    base: str  # folder or hub name of the model that was trained; the folder itself if nothing names it
    base_origin: str  # `base` and where it is named, for messages
    base_is_given: bool  # by --config or --base, so that it is compared with the weights
    source: WeightSource | None  # the files of `folder`; None for a peft adapter
    run_config: JsonMapping  # config.yaml of the run; empty if there is none
    config_file: Path | None
    checkpoint: Path | None  # step_N

    @property
    def step(self) -> int | None:
        match = re.search(r"step_(\d+)(\.\d+)?$", self.checkpoint.name) if self.checkpoint else None
        return int(match[1]) if match else None

    @property
    def has_adapter(self) -> bool:
        return self.source is None or any(is_lora(name) for name in self.source.facts)

    @cached_property
    def base_folder(self) -> Path:
        """The base model's folder, fetched from the hub if needed."""
        return _local_folder(self.base)

    @cached_property
    def shape(self) -> WeightShapes:
        """The model's weights as its config describes them."""
        own = self.folder / "config.json"
        if not own.is_file() or self.has_adapter:
            return WeightShapes.of(self._base_config(), self.base_origin)
        config = read_model_config(str(self.folder), {}, str(own))
        if self.base_is_given:
            self._compare_with_base(config, own)
        return WeightShapes.of(config, str(own))

    def _base_config(self) -> PretrainedConfig:
        overrides = dict((self.run_config.get("policy") or {}).get("hf_config_overrides") or {})
        return read_model_config(self.base, overrides, self.base_origin)

    def _compare_with_base(self, config: PretrainedConfig, own: Path) -> None:
        """The config saved with the weights takes precedence; one that the user gives must not contradict it."""
        try:
            given = self._base_config()
        except ConversionError:
            if Path(self.base).is_dir():
                raise
            return  # the base model has moved, and nothing else is needed of it
        described = [describe_model(each.to_dict(), None) for each in (config, given)]
        kinds = [each["architecture"].get("model_type") for each in described]
        pairs = {"model_type": kinds} | {
            key: [each["sizes"].get(key) for each in described] for key in described[0]["sizes"]
        }
        for key, (saved, given) in pairs.items():
            if given is not None and saved != given:
                raise ConversionError(
                    f"the config does not match the checkpoint: {key} is {saved} by {own}, but {given} by "
                    f"{self.base_origin}"
                )

    @cached_property
    def adapter(self) -> Adapter | None:
        if self.source is None:
            return open_adapter(self.folder)
        if not self.has_adapter:
            return None
        # A sharded checkpoint of a LoRA run: its names have a prefix, and the run's config has the settings.
        plain = {plain_name(name): name for name in self.source.facts if is_lora(name)}
        modules = [f"{name.rpartition('.lora_')[0]}.weight" for name in plain]
        prefix = prefix_of(modules, self.shape.shapes)
        names = {name.removeprefix(prefix): old for name, old in plain.items()}
        return adapter_in(RenamedSource(self.source, names), self._lora_settings(), self.folder)

    def _lora_settings(self) -> JsonObject:
        lora = ((self.run_config.get("policy") or {}).get("dtensor_cfg") or {}).get("lora_cfg") or {}
        if not lora.get("dim") or not lora.get("alpha"):
            raise ConversionError(
                f"{self.folder} holds LoRA weights, but {self.config_file or 'no config.yaml'} does not set "
                "policy.dtensor_cfg.lora_cfg.dim and .alpha; give the run's config with --config"
            )
        assert self.source is not None
        names = [plain_name(name) for name in self.source.facts if is_lora(name)]
        targets = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in names})
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": lora["dim"],
            "lora_alpha": lora["alpha"],
            "lora_dropout": lora.get("dropout", 0.0),
            "use_dora": bool(lora.get("use_dora")),
            "bias": "none",
            "target_modules": targets,
        }

    @cached_property
    def holds_whole_model(self) -> bool:
        """Whether the weights under an adapter, or the whole model, are in the folder itself."""
        if self.source is None:
            return False
        if not self.has_adapter:
            return True
        plain = [plain_name(name) for name in self.source.facts if not is_lora(name)]
        prefix = prefix_of(plain, self.shape.shapes)
        return {name.removeprefix(prefix) for name in plain} >= set(self.shape.shapes)

    @cached_property
    def weights(self) -> WeightSource:
        """Under the model's own names. With an adapter they are the base model's."""
        source = self.source if self.source is not None and self.holds_whole_model else open_weights(self.base_folder)
        return RenamedSource(source, match_names(self.shape, source, keeps_drafts=True))

    @property
    def loadable_folder(self) -> Path | None:
        """A folder with the same weights that transformers loads as it is; None if there is none."""
        folder = self.folder if self.holds_whole_model else self.base_folder
        return folder if (folder / "config.json").is_file() else None

    @property
    def tokenizer(self) -> str:
        if self.checkpoint is not None and (self.checkpoint / TOKENIZER).is_dir():
            return str(self.checkpoint / TOKENIZER)
        if (self.folder / "tokenizer_config.json").is_file():
            return str(self.folder)
        named = ((self.run_config.get("policy") or {}).get("tokenizer") or {}).get("name")
        return named if isinstance(named, str) and "${" not in named else self.base


def open_input(text: str, *, config: Path | None = None, base: str | None = None, say: Say = print) -> ConversionInput:
    """Find everything behind `text`. `config` is a run's config.yaml, `base` another place of the model it names."""
    path = Path(text).expanduser()
    if not path.is_dir():
        if not looks_like_hub_name(text):
            raise ConversionError(
                f"no folder {text!r}; accepted: a checkpoint (step_N, or its policy/weights), a run's folder, a folder "
                "with torch DCP weights, a Hugging Face folder, a peft adapter, or a hub name"
            )
        path = _local_folder(text)
    checkpoint = find_checkpoint(path, say)
    is_sealed = checkpoint is not None and (checkpoint / CHECKSUMS).is_file()
    if checkpoint is not None and is_sealed and (problems := find_damage(checkpoint, below="policy/weights")):
        raise ConversionError(f"{checkpoint} is damaged: {'; '.join(problems[:3])}")
    checkpoint_weights = checkpoint / "policy" / "weights" if checkpoint else None
    if checkpoint is None:  # its folder may not be called step_N; then `policy` or `policy/weights` is named
        parts = path.absolute().parts
        if parts[-2:] == ("policy", "weights"):
            checkpoint_weights = path
        elif parts[-1:] == ("policy",) and (path / "weights").is_dir():
            checkpoint_weights = path / "weights"
    # Any other folder has to be a model itself. A model in one of its subfolders is not taken.
    if checkpoint_weights is None and not _holds_any(path, (*_FILES_OF_A_MODEL, "*.distcp", "iter_*")):
        check_model_folder(path)
    folder = checkpoint_weights or path
    if checkpoint_weights and (folder / "model").is_dir() and not _holds_any(folder, _FILES_OF_A_MODEL):
        folder = folder / "model"
    for read in (folder, checkpoint or folder):
        refuse_pipes(read)
        refuse_links_outside(read)
    if base is not None:
        _check_base(base)
    config_file = config
    if config is None and checkpoint is not None and (checkpoint / "config.yaml").is_file():
        config_file = checkpoint / "config.yaml"
    run_config = read_run_config(config_file) if config_file else {}
    if config is not None:  # it provides the model's lineage; a file without it would lose the lineage silently
        if "policy" not in run_config:
            raise ConversionError(
                f"{config} is not a config of a training run: it has no section policy; accepted: step_N/config.yaml"
            )
        if base is None and not (run_config["policy"] or {}).get("model_name"):
            raise ConversionError(f"{config} has no policy.model_name, so the model that was trained is unknown")
    is_peft = (folder / "adapter_config.json").is_file()
    found_base = base or _base_model(folder, run_config, config_file, is_peft)
    by_config = config_file is not None and base is None and not is_peft
    return ConversionInput(
        text=text,
        folder=folder,
        base=found_base,
        base_origin=f"{found_base} (policy.model_name of {config_file})" if by_config else found_base,
        base_is_given=config is not None or base is not None,
        source=None if is_peft else open_weights(folder, of_checkpoint=checkpoint_weights is not None),
        run_config=run_config,
        config_file=config_file,
        checkpoint=checkpoint,
    )


def _holds_any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def _check_base(base: str) -> None:
    """The result names its base model, so a mistyped path is refused. A hub name is fetched only if needed."""
    if Path(base).is_dir():
        if not (Path(base) / "config.json").is_file():
            raise ConversionError(f"--base {base} is a folder without config.json; accepted: {_BASES}")
    elif not looks_like_hub_name(base):
        raise ConversionError(f"--base: no folder {base!r}; accepted: {_BASES}")


def _base_model(folder: Path, run_config: JsonMapping, config_file: Path | None, is_peft: bool) -> str:
    named = (run_config.get("policy") or {}).get("model_name")
    if is_peft:
        try:
            return adapter_base(folder)
        except InputError:
            # The folder has moved. The run's config may name it by a path that is still valid.
            if isinstance(named, str) and (Path(named).is_dir() or looks_like_hub_name(named)):
                return named
            raise
    if isinstance(named, str) and named:
        return named
    if (folder / "config.json").is_file():
        return str(folder)
    if config_file is not None:
        raise ConversionError(f"{config_file} has no policy.model_name, so the model's architecture is unknown")
    raise ConversionError(
        f"{folder} does not describe the model's architecture: there is no config.json. Give the run's config.yaml "
        "with --config, or the model that was trained with --base"
    )


def read_run_config(path: Path) -> JsonObject:
    """A run's config.yaml, ours or NeMo RL's, as it is: only a few of its keys are needed, so no schema is applied."""
    content = read_document(path, str(path)).values
    if not isinstance(content.get("policy") or {}, dict):
        raise ConversionError(f"{path} is not a config of a run: its policy is not a section")
    return content


def read_model_config(place: str, overrides: JsonMapping, named: str) -> PretrainedConfig:
    """The config of the model in the folder `place`, or of that name on the hub. `named` is its name in messages."""
    from transformers import AutoConfig, PretrainedConfig

    if (reason := why_unavailable(place)) is not None:
        raise ConversionError(
            f"the config of {named} cannot be read: {reason}. A base model that has moved is named with --base"
        )
    try:
        content, _ = PretrainedConfig.get_config_dict(place)
        if (problem := problem_in({**content, **overrides})) is not None:
            raise ValueError(problem)
        # The overrides come from the config of a checkpoint, which may not decide that its own code runs.
        config = AutoConfig.from_pretrained(place, **{**overrides, "trust_remote_code": False})
    except Exception as error:  # a value of the wrong type may raise anything
        file = Path(place) / "config.json"
        if file.is_file():
            reason = explain_config_error(error, {**read_json(file), **overrides})
            changed = f" (with policy.hf_config_overrides {dict(overrides)})" if overrides else ""
            raise ConversionError(f"{config_file_of(named)}{changed}: {reason}") from error
        raise ConversionError(
            f"the config of {named} cannot be read: {reason_of(error)}. Give the folder of the trained model with "
            "--base."
        ) from error
    config.use_cache = True  # training turns it off; generation is slow without it
    return config


def _local_folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if (reason := why_unavailable(name)) is not None:
        raise ConversionError(f"{reason}. A base model that has moved is named with --base")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]))
    except Exception as error:  # network, rights, spelling: the hub's errors have no common class
        raise ConversionError(
            f"{name!r} is not a local folder and cannot be fetched from the hub: {reason_of(error)}. Give its folder "
            "with --base"
        ) from error
