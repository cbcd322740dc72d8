"""Keys that NeMo RL has and posttrain does not read: refused where a value would change results, mentioned where not.

Names and usual values are in `foreign.yaml`; a usual value is never mentioned. `RULES` decides what happens to other values:
the first pattern, from the top, that fits a key. A key without a rule is accepted in silence. A few rules are
about keys of the schema, of whose values not all are implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path as FilePath
from typing import Any

from posttrain.config.runs import Kind
from posttrain.config.schema import Node, schema_of
from posttrain.config.tree import Path, Tree, Values, dotted, overlay
from posttrain.config.yaml_files import parse_document
from posttrain.files.redaction import shown_setting

FILE = FilePath(__file__).parent / "foreign.yaml"
OPEN_MARK = "_open_"  # other keys than those in the file are accepted as well
DATASETS = ("train", "validation", "default")  # maps of `data` that have the keys of a dataset

PROCESSORS = (
    "default",
    "math_hf_data_processor",
    "math_data_processor",
    "sft_processor",
    "preference_preprocessor",
    "helpsteer3_data_processor",
)
FOREIGN_ENVIRONMENTS = (
    "code",
    "code_jaccard",
    "math_multi_reward",
    "nemo_gym",
    "reward_model",
    "sliding_puzzle_game",
    "vlm",
)

Accepts = Callable[[object], bool]


def _anything(value: object) -> bool:
    return True


def _implemented(value: object) -> bool:
    return True


def _nothing(value: object) -> bool:
    return False


def _off(value: object) -> bool:
    return not value


def _at_most_one(value: object) -> bool:
    return value is None or value == 1


@dataclass(frozen=True)
class KeyRule:
    pattern: str  # of dotted keys; * stands for anything
    accepts: Accepts  # values that do what they say, or that change nothing
    note: str  # what is missing, or what happens instead; ignored keys with the same note share one warning

    @property
    def ignores(self) -> bool:
        """Nothing reads the key, whatever its value."""
        return self.accepts is _anything


_OWN_ENGINE = "settings of another sampling engine; the native engine does not use them"
_NOT_NEEDED = "not needed by posttrain and left alone"
_MEMORY = "not used: it moves memory around and changes no result"
_MEGATRON = "posttrain trains with PyTorch; Megatron's settings are not used"
_OWN_PLAN = "plans of one's own; a model is split by the plan that transformers has for its family"
_OPENAI_FORMAT = "keys of the openai_format dataset; name the columns with input_key and output_key"
_DRAFT = "no draft model is trained, so its settings are not used"

RULES: tuple[KeyRule, ...] = (
    # grpo
    KeyRule(
        "grpo.async_grpo.in_flight_weight_updates",
        _off,
        "new weights during a round, which no resumed run could repeat; weights change between rounds: set it to false",
    ),
    KeyRule("grpo.async_grpo.recompute_kv_cache_after_weight_updates", _anything, "the KV cache is always recomputed"),
    KeyRule(
        "grpo.async_grpo.max_generation_failures",
        _off,
        "a limit of failed answers; answers that cannot be scored are left out and counted, and an engine that fails is replaced "
        "or ends the run: set it to 0",
    ),
    KeyRule("grpo.invalid_tool_call_advantage", lambda value: value is None, "advantages of tool calls"),
    KeyRule("grpo.malformed_thinking_advantage", lambda value: value is None, "advantages of thinking tags"),
    KeyRule("grpo.adv_estimator.name", lambda value: value != "opd", "distillation"),
    KeyRule("grpo.val_batch_size", _anything, _NOT_NEEDED),
    KeyRule("policy.sequence_packing.microbatch_order", _anything, "the order of micro-batches changes no result"),
    KeyRule("*.val_micro_batch_size", _anything, "validation uses policy.logprob_batch_size"),
    KeyRule("grpo.calculate_advantages_on_gpu", _anything, _NOT_NEEDED),
    KeyRule("grpo.deduplicate_multimodal_data", _anything, _NOT_NEEDED),
    KeyRule("grpo.debug_payload_metrics", _anything, _NOT_NEEDED),
    # env
    KeyRule(
        "env.*.stop_strings", _off, "texts that end answers of one environment; use policy.generation.stop_strings"
    ),
    # checkpointing
    KeyRule(
        "checkpointing.ft_*", lambda value: value is None, "extra saves against crashes; use checkpointing.save_period"
    ),
    KeyRule("checkpointing.pretrained_checkpoint", _off, "starting from a Megatron checkpoint"),
    KeyRule("checkpointing.pretrained_checkpoint.*", _nothing, "starting from a Megatron checkpoint"),
    KeyRule(
        "checkpointing.model_save_format",
        lambda value: value in (None, "safetensors"),
        "other formats than safetensors",
    ),
    KeyRule("checkpointing.model_cache_dir", _anything, _NOT_NEEDED),
    KeyRule("checkpointing.model_repo_id", _anything, _NOT_NEEDED),
    KeyRule("checkpointing.is_*", _anything, _NOT_NEEDED),
    KeyRule("checkpointing.peft_config*", _anything, _NOT_NEEDED),
    # policy
    KeyRule("policy.precision", lambda value: value != "float16", "training in float16; use bfloat16 or float32"),
    KeyRule("policy.offload_optimizer_for_logprob", _anything, _MEMORY),
    KeyRule("policy.quant_cfg", _off, "quantisation-aware training"),
    KeyRule("policy.quant_cfg.*", _nothing, "quantisation-aware training"),
    KeyRule("policy.dtensor_cfg.enabled", _anything, "posttrain always trains with PyTorch"),
    KeyRule("policy.dtensor_cfg.expert_parallel_size", _at_most_one, "experts on ranks of their own"),
    KeyRule("policy.dtensor_cfg.sequence_parallel", _off, "norms on parts of a row; see context_parallel_size"),
    KeyRule(
        "policy.dtensor_cfg.cpu_offload",
        _off,
        "keeping weights in CPU memory; policy.optimizer.offload_states=true keeps the optimizer's state there, which is larger",
    ),
    KeyRule("policy.dtensor_cfg.custom_parallel_plan", lambda value: value is None, _OWN_PLAN),
    KeyRule("policy.dtensor_cfg.moe_parallelizer", _off, _OWN_PLAN),
    KeyRule("policy.dtensor_cfg.moe_parallelizer.*", _nothing, _OWN_PLAN),
    KeyRule("policy.dtensor_cfg.automodel_kwargs", _anything, _NOT_NEEDED),
    KeyRule("policy.dtensor_cfg.automodel_kwargs.force_hf", _anything, _NOT_NEEDED),
    KeyRule("policy.dtensor_cfg.automodel_kwargs.use_liger_kernel", _anything, _NOT_NEEDED),
    KeyRule("policy.dtensor_cfg.automodel_kwargs.backend*", _anything, _NOT_NEEDED),
    KeyRule("policy.dtensor_cfg.automodel_kwargs.*", _nothing, "arguments of NeMo's model loader"),
    KeyRule("policy.dtensor_cfg.env_vars*", _anything, "set environment variables before the command instead"),
    KeyRule("policy.dtensor_cfg.defer_fsdp_grad_sync", _anything, _MEMORY),
    KeyRule("policy.dtensor_cfg.clear_cache_every_n_steps", _anything, _MEMORY),
    KeyRule("policy.megatron_cfg.enabled", _off, "training with Megatron"),
    KeyRule("policy.megatron_cfg.fp8_cfg.*", _anything, "FP8 of Megatron is not used; policy.fp8=true trains in FP8"),
    KeyRule("policy.megatron_cfg.*", _anything, _MEGATRON),
    KeyRule("policy.draft.enabled", _off, "training a draft model"),
    KeyRule("policy.draft.*", _anything, _DRAFT),
    KeyRule("policy.router_replay.enabled", _off, "replay of expert choices"),
    KeyRule(
        "policy.reward_model_cfg.reward_model_type",
        lambda value: value in (None, "bradley_terry"),
        "other reward models than bradley_terry",
    ),
    # policy.generation
    KeyRule(
        "policy.generation.backend", lambda value: value in ("native", "vllm"), "other engines than native and vllm"
    ),
    KeyRule("policy.generation.bad_words", _off, "forbidden words"),
    KeyRule("policy.generation.quant_cfg", _off, "quantised sampling"),
    KeyRule("policy.generation.quant_cfg.*", _nothing, "quantised sampling"),
    KeyRule("policy.generation.real_quant", _off, "quantised sampling"),
    KeyRule("policy.generation.vllm_*", _anything, _OWN_ENGINE),
    KeyRule("policy.generation.mcore_generation_config*", _anything, _OWN_ENGINE),
    KeyRule("policy.generation.refit_*", _anything, _OWN_ENGINE),
    KeyRule("policy.generation.use_async_rollouts", _anything, _OWN_ENGINE),
    # generation of an evaluation
    KeyRule("generation.colocated.*", _anything, _NOT_NEEDED),
    KeyRule("generation.val_*", _anything, "read by nothing in an evaluation"),
    KeyRule("data.repeat", _anything, "read by nothing in an evaluation"),
    # data, env
    KeyRule("data.use_multiple_dataloader", _off, "drawing from each dataset separately"),
    KeyRule("data.num_prompts_per_dataloader", lambda value: value is None, "drawing from each dataset separately"),
    KeyRule("data.custom_dataloader", lambda value: value is None, "data loaders of your own"),
    KeyRule("data.processor", _anything, "the dataset decides how its rows become prompts"),
    KeyRule("data.*.processor", lambda value: value is None or value in PROCESSORS, "this processor"),
    KeyRule("data.add_bos", bool, "leaving out the start token that the chat template writes"),
    KeyRule("data.add_eos", bool, "answers without their end"),
    KeyRule(
        "data.add_generation_prompt", _anything, "the header of an answer is part of the prompt and is never trained"
    ),
    KeyRule("data.*.tool_key", lambda value: value is None, _OPENAI_FORMAT),
    KeyRule("data.*.use_preserving_dataset", _off, _OPENAI_FORMAT),
    # the rest
    KeyRule("cluster.segment_size", _anything, _NOT_NEEDED),
    KeyRule("cluster.master_port_range_*", _anything, "a free port is found by itself"),
    KeyRule("data_plane*", _anything, "batches travel in the process or through Ray; NeMo's data plane is not used"),
    KeyRule("reward_penalties.penalize_*", _off, "reward penalties"),
    KeyRule("on_policy_distillation", _off, "distillation"),
    KeyRule("on_policy_distillation.*", _nothing, "distillation"),
    KeyRule("async_rl", _off, "the single-controller mode"),
    KeyRule("async_rl.*", _nothing, "the single-controller mode"),
)

_VLLM = "policy.generation.vllm_cfg"
_ENGINE_SIZE = f"{_VLLM}.tensor_parallel_size"  # of native engines too, where they have GPUs of their own
# Where vLLM samples, these are asked before `RULES`.
VLLM_RULES: tuple[KeyRule, ...] = (
    KeyRule(f"{_VLLM}.async_engine", _anything, "requests are always batched continuously, and a round ends by itself"),
    KeyRule(f"{_VLLM}.use_tqdm", _anything, "posttrain shows the progress"),
    KeyRule(f"{_VLLM}.*vllm_metrics_logger*", _anything, "vLLM's own metrics are not recorded"),
    KeyRule(f"{_VLLM}.precision", lambda value: value in (None, "bfloat16", "float32", "auto"), "FP8 in vLLM; use native"),
    KeyRule(f"{_VLLM}.logprobs_mode", lambda value: value == "processed_logprobs", "log-probabilities without temperature"),
    KeyRule(f"{_VLLM}.pipeline_parallel_size", _at_most_one, "layers of vLLM on different GPUs"),
    KeyRule(f"{_VLLM}.expert_parallel_size", _at_most_one, "experts of vLLM on different GPUs"),
    *(
        KeyRule(f"{_VLLM}.{key}", _off, "vLLM's process does what this run asks for, and nothing else")
        for key in ("expose_http_server", "http_refit_*", "zmq_refit_*", "is_mx", "video", "limit_mm_per_prompt",
                    "use_deep_gemm", "skip_tokenizer_init", "reset_encoder_cache_*")
    ),
    KeyRule("policy.generation.native_cfg.precision", lambda value: value == "auto", "FP8 in vLLM; use backend native"),
    KeyRule("policy.generation.native_cfg.*", _anything, "settings of the native engine; vLLM samples and does not use them"),
    *(KeyRule(pattern, _implemented, "") for pattern in (f"{_VLLM}.*", "policy.generation.vllm_kwargs*")),
)  # fmt: skip


@cache
def _file() -> Values:
    return parse_document(FILE.read_text(encoding="utf-8"), FILE.name).values


def usual_values(kind: Kind) -> Values:
    """The values that NeMo RL's own files give to keys that posttrain does not read."""
    return _without_marks(_of_kind(kind))


@cache
def vocabulary_of(kind: Kind) -> Node:
    """Every key that a file may have: those of the schema, and those of NeMo RL."""
    node = _with_foreign(schema_of(kind), _of_kind(kind))
    data = node.children["data"]
    names = dict.fromkeys(_file()["dataset"])
    datasets = {key: _with_foreign(data.children[key], names) for key in DATASETS if key in data.children}
    return replace(node, children={**node.children, "data": replace(data, children={**data.children, **datasets})})


def _of_kind(kind: Kind) -> Values:
    shared = {} if kind == "eval" else _file()["training"]
    return overlay(Tree(shared), Tree(_file().get(kind, {})), lambda path: True).values


def _with_foreign(node: Node, foreign: Values) -> Node:
    children = dict(node.children)
    for key, value in foreign.items():
        if key in children and isinstance(value, dict):
            children[key] = _with_foreign(children[key], value)
        elif key != OPEN_MARK:
            children[key] = _foreign_node(value)
    return replace(node, children=children, open=node.open or OPEN_MARK in foreign)


def _foreign_node(value: object) -> Node:
    if isinstance(value, dict):
        return _with_foreign(Node("section", nullable=False), value)
    return Node("free" if value is None or isinstance(value, list) else "value", nullable=True)


def _without_marks(values: object) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: _without_marks(value) for key, value in values.items() if key != OPEN_MARK}


def separate(kind: Kind, values: Values) -> tuple[Values, Values]:
    """The values that belong to the schema, and those that do not."""
    own, foreign = _separated(schema_of(kind), values)
    return own or {}, foreign or {}


def _separated(node: Node, values: object) -> tuple[Any, Any]:
    if isinstance(values, list) and node.listed:
        pairs = [_separated(node, item) for item in values]
        foreign = {str(index): other for index, (_, other) in enumerate(pairs) if other}
        return [own for own, _ in pairs], foreign or None
    if not isinstance(values, dict) or node.shape == "free":
        return values, None
    own: Values = {}
    others: Values = {}
    for key, value in values.items():
        child = node.child(str(key))
        if child is None:
            others[key] = value
            continue
        own[key], other = _separated(child, value)
        if other:
            others[key] = other
    return own, others or None


def every_value(values: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Like `leaves`, but also inside lists of maps."""
    inner: Values | None = None
    if isinstance(values, dict) and values:
        inner = values
    elif isinstance(values, list) and any(isinstance(item, dict) for item in values):
        inner = {str(index): item for index, item in enumerate(values)}
    if inner is None:
        yield path, values
        return
    for key, value in inner.items():
        yield from every_value(value, (*path, str(key)))


@lru_cache(maxsize=4096)
def rule_for(key: str, *, vllm_samples: bool = False) -> KeyRule | None:
    rules = (*VLLM_RULES, *RULES) if vllm_samples else RULES
    return next((rule for rule in rules if fnmatchcase(key, rule.pattern)), None)


def review(
    own: Values, foreign: Values, tree: Tree, is_default: Callable[[Path, object], bool]
) -> tuple[list[str], list[str]]:
    """(errors, warnings) for what is not implemented. Only values that the user set can be mentioned."""
    errors: list[str] = []
    ignored: dict[str, list[str]] = {}
    vllm_samples = _vllm_samples(own)
    for path, value in [*every_value(own), *every_value(foreign)]:
        rule = rule_for(dotted(path), vllm_samples=vllm_samples)
        if rule is None or (dotted(path) == _ENGINE_SIZE and _has_own_engines(own)):
            continue
        if not rule.accepts(value):
            shown = shown_setting(dotted(path), value)
            errors.append(f"{tree.origin(path)}: `{dotted(path)}` = {shown} is not implemented: {rule.note}")
        elif rule.ignores and value is not None and not is_default(path, value):
            ignored.setdefault(rule.note, []).append(dotted(path))
    return errors, [f"{_listed(keys)}: {note}" for note, keys in ignored.items()]


def _vllm_samples(own: Values) -> bool:
    generation = (own.get("policy") or {}).get("generation") or {}
    return generation.get("backend") == "vllm" and bool(generation.get("vllm_cfg", {}).get("python"))


def _has_own_engines(own: Values) -> bool:
    generation = (own.get("policy") or {}).get("generation") or {}
    return (generation.get("colocated") or {}).get("enabled") is False


def substitutions(own: Values, foreign: Values) -> Iterator[str]:
    """Settings that are accepted and mean something else here."""
    if "policy" not in own:
        return
    generation = own["policy"].get("generation") or {}
    if generation.get("backend") == "vllm" and not _vllm_samples(own):
        yield (
            "policy.generation.backend: vllm needs policy.generation.vllm_cfg.python, the Python of an environment that has vLLM "
            "(docs/vllm.md); the native engine samples instead"
        )
    lora = own["policy"]["dtensor_cfg"]["lora_cfg"]
    position = Tree(foreign).get(("policy", "dtensor_cfg", "lora_cfg", "dropout_position"))
    if lora["enabled"] and lora["dropout"] and position == "post":
        yield "policy.dtensor_cfg.lora_cfg.dropout_position: adapters drop their input (pre), not their output (post)"


def foreign_environments(tree: Tree) -> dict[Path, str]:
    """What to say about judges of NeMo RL that posttrain does not have; their settings are not in the schema either."""
    environments = tree.get(("env",))
    if not isinstance(environments, dict):
        return {}
    return {
        ("env", name): f"{tree.origin(('env', name))}: `env.{name}` is not implemented: use `env.math`, say "
        f"what it is with `env.{name}.type` (`posttrain rewards list`), or `env.{name}.function` with a Python reward function"
        for name, settings in environments.items()
        if name in FOREIGN_ENVIRONMENTS
        and not (isinstance(settings, dict) and any(settings.get(key) for key in ("function", "type", "rewards")))
    }


def _listed(keys: list[str]) -> str:
    shown = ", ".join(keys[:3])
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"
