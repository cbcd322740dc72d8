"""Every causal language model of the installed transformers, and every one with towers for images around it, tiny: a
config from the names of its fields, and what posttrain does with the model.

python tests/every_family.py      writes every_family.json, from which docs/models.md is generated; takes minutes
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import LOGPROB_ROUNDING, byte_tokenizer, randomise
from tiny_runs import grpo
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, logging
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from posttrain.config import load_config
from posttrain.errors import InputError
from posttrain.models.loading import check_model_exists
from posttrain.orchestration.rank import Rank, build_rank
from posttrain.policy.objectives import NegativeLogLikelihood
from posttrain.policy.trainer import RankSetup
from posttrain.types import NoiseKey, Sampling, Task, TokenBatch

VOCAB_SIZE = 260  # that of the tokenizer of bytes in tiny_models.py

LENGTH = 256
MAX_PARAMETERS = 10**7
# The first pattern that is found in the name of a field of whole numbers gives its value; other fields stay.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(token_id|token_index|_index|_idx|lang_id)$", 3),
    (r"vocab_size", VOCAB_SIZE),
    (r"max_.*position|n_positions|n_ctx|max_seq_len|context_length|max_.*_length$", LENGTH),
    (r"_rank$|d_head$", 16),
    (r"d_ssm$", 64),
    (r"kv_n?_?heads$|key_value_heads$", 2),
    (r"^(n|num)_.*heads?$|(^|_)(attention_|n_)heads?$", 4),
    (r"^rotary_dim$", 4),
    (r"head_(dim|size)$|^dim_head$|kv_channels", 8),
    (r"per_layer_input$", 8),
    (r"(moe|expert).*(intermediate|ffn_hidden)_size", 16),
    (r"intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size|dim_ff|^dff$|d_inner$", 48),
    (r"(^|_)hidden_size$|d_model|n_embd|dim_model$|embedding_size|emb_dim|embed_dim|proj_size|mid_dim", 32),
    (r"experts_per_tok|moe_topk|moe_k$|moe_top_k", 2),
    (r"shared_experts", 1),
    (r"experts$|zero_expert_num", 4),
    (r"n_groups?$|topk_group|ngroups$", 1),
    (r"first_k_dense|num_dense_layers|mtp|nextn|kv_shared", 0),
    (r"layers$|^n_layer$", 4),
    (r"period$|interval$|every_n|sparse_step|layer_step$|pattern$|layer_group_size$|per_attn_res_block", 2),
    (r"offset$", 1),
    (r"sliding_window|attention_window|local_attention|window_size|chunk_size$|chunk_length|block_size", 8),
    (r"state_size$|d_state$", 8),
)
# Fields that are None by default stay so, but for these.
_DERIVED = re.compile(r"^(head_dim|num_key_value_heads|eos_token_id|.*experts(_per_tok)?)$")
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What the names do not tell.
_EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 16]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
# Three axes of positions, for images.
_EXTRA |= {
    family: {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}}
    for family in ("glm4v_moe_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text")
    + ("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text")
}


# In the order of the tests: one of each kind of outcome first.
FAMILIES = (
    "gpt2",
    "diffllama",
    "afmoe",
    *sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {"gpt2", "diffllama", "afmoe"}),
)
# Those whose published form is not the causal language model.
WITH_IMAGES = " with images"
FAMILIES_WITH_IMAGES = tuple(
    f"{family}{WITH_IMAGES}"
    for family, name in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items())
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family) != name
)
RECORD = Path(__file__).with_suffix(".json")


def tiny_config(model_type: str) -> PretrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    return kind(**tiny_settings(kind))


def tiny_settings(kind: type[PretrainedConfig]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in [name for name in fields if name not in PretrainedConfig.__dataclass_fields__]:
        types, default = str(fields[name].type), fields[name].default
        is_count = "int" in types and (not re.search("list|dict|float", types) or name == "eos_token_id")
        if not (is_count or type(default) is int) or (default is None and not _DERIVED.search(name)):
            continue
        if (value := next((value for pattern, value in _SIZES if re.search(pattern, name)), None)) is not None:
            settings[name] = value
    if "kv_lora_rank" in settings:  # latent attention: each head has keys of its own
        settings["num_key_value_heads"] = 4
    if "sliding_window" in settings and fields["sliding_window"].default >= _default_length(fields):
        settings["sliding_window"] = LENGTH  # published without one
    for name, inner in kind.sub_configs_defaults.items():
        model_type = getattr(inner, "model_type", "")
        is_registered = model_type in CONFIG_MAPPING  # which loads it; its get() does not
        of_inner = CONFIG_MAPPING[model_type] if is_registered else inner
        if dataclasses.is_dataclass(of_inner) and hasattr(of_inner, "sub_configs_defaults"):
            settings[name] = {**({"model_type": model_type} if model_type else {}), **tiny_settings(of_inner)}
    for name, value in _EXTRA.get(kind.model_type, {}).items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return settings


def _default_length(fields: Mapping[str, Any]) -> int:
    return fields["max_position_embeddings"].default if "max_position_embeddings" in fields else 2**40


@dataclass(frozen=True)
class Outcome:
    """`agrees`; `refused` with exit code 64; `mismatch`; or `not made`: transformers has no such tiny model."""

    kind: str
    reason: str = ""


def save_tiny(family: str, folder: Path) -> Path:
    config = tiny_config(family.removesuffix(WITH_IMAGES))
    auto_class = AutoModelForImageTextToText if family.endswith(WITH_IMAGES) else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(copy.deepcopy(config))
    if (size := sum(parameter.numel() for parameter in model.parameters())) > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters are not tiny: the names of some sizes are not known here")
    model = auto_class.from_config(copy.deepcopy(config), attn_implementation="eager")
    config.architectures = [type(model).__name__]
    randomise(model, 0)
    model.save_pretrained(folder)
    config.save_pretrained(folder)  # as it would be published: some models change theirs
    byte_tokenizer().save_pretrained(folder)
    return folder


def rank_of(model: Path, *settings: str) -> Rank:
    policy = load_config("grpo", None, [*grpo(model, model, model)[1:], *settings]).config.policy
    return build_rank(RankSetup(policy, seed=0, needs_reference=False))


def try_family(family: str, folder: Path) -> Outcome:
    """Load, prove, sample and train a tiny model as a run does, without starting one."""
    try:
        save_tiny(family, folder)
    except Exception as error:
        return Outcome("not made", f"{type(error).__name__}: {str(error).strip().splitlines()[-1].strip()}")
    try:
        check_model_exists(str(folder))
        rank = rank_of(folder)
    except InputError as error:
        return Outcome("refused", str(error).replace(str(folder), "…"))
    tasks = [Task(draw, f"t:{draw}", "", tuple(range(5 + draw, 25 - 3 * draw))) for draw in range(4)]
    groups = rank.generate(tasks, 3, Sampling(9, ignore_eos=True), NoiseKey(1, 0))
    completions = [completion for group in groups for completion in group]
    sampled = torch.tensor([completion.logprobs for completion in completions])
    batch = TokenBatch.build(
        [task.prompt_ids for task in tasks], [completion.token_ids for completion in completions],
        [place for place in range(len(tasks)) for _ in range(3)], {"mask": torch.ones(sampled.numel())},
    )  # fmt: skip
    (scored,) = rank.logprobs([batch])
    assert scored is not None
    gap = float((scored - sampled.flatten()).abs().max())
    metrics = rank.update([batch], NegativeLogLikelihood(), 0, None)
    gap = max(gap, abs(metrics["loss"] + float(sampled.mean())))
    if not gap <= LOGPROB_ROUNDING:
        return Outcome("mismatch", f"by {gap:.3g}")
    if not (metrics["grad_norm"] > 0 and metrics["update_skipped"] == 0):
        return Outcome("mismatch", f"grad_norm {metrics['grad_norm']}")
    return Outcome("agrees")


def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


if __name__ == "__main__":
    logging.set_verbosity_error()
    outcomes = {}
    for family in (*FAMILIES, *FAMILIES_WITH_IMAGES):
        with tempfile.TemporaryDirectory() as folder:
            outcomes[family] = dataclasses.asdict(try_family(family, Path(folder)))
        print(family, *outcomes[family].values(), file=sys.stderr)
    record = {"transformers": transformers_version, "families": outcomes}
    RECORD.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")
