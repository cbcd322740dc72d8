"""The configs printed in the documents that posttrain implements load as they stand."""

from pathlib import Path

import pytest
import yaml

from posttrain.config import load_config
from posttrain.config.foreign.nemo_rl import vocabulary_of
from posttrain.config.schema import find

REPOSITORY = Path(__file__).parents[3]
SEEDS = REPOSITORY.parent / "shared" / "seeds"


def read_seed(number: str) -> str:
    found = sorted(SEEDS.glob(f"{number}_*.txt"))
    if not found:
        pytest.skip(f"document {number} is not in {SEEDS}")
    return found[0].read_text(encoding="utf-8")


def lora_document_block() -> str:
    """Document 001: the fenced block under "GRPO Configuration"."""
    after = read_seed("001").split("## GRPO Configuration", 1)[1]
    return after.split("```yaml\n", 1)[1].split("```", 1)[0]


def llama_document_block() -> str:
    """Document 004: the lines from the name of the file to the next step, with the indentation that print has lost."""
    after = read_seed("004").split("grpo_llama8b.yaml - Key configuration sections\n", 1)[1]
    return with_indentation(after.split("Step 5:", 1)[0])


def with_indentation(flat: str) -> str:
    """Indent YAML whose indentation was lost, by meaning.

    A line `key:` without a value opens a section. A key belongs to the innermost open section that knows it, so a key
    that only an outer section knows closes the inner ones. A key that no open section knows (an older name) stays in
    the innermost one.
    """
    schema = vocabulary_of("grpo")
    open_sections: list[str] = []
    lines = []
    for line in flat.splitlines():
        key, _, value = line.partition(":")
        for depth in range(len(open_sections), -1, -1):
            if find(schema, (*open_sections[:depth], key)) is not None:
                del open_sections[depth:]
                break
        lines.append("  " * len(open_sections) + line)
        if not value.strip():
            open_sections.append(key)
    return "\n".join(lines) + "\n"


def test_the_lora_document_loads_as_printed(tmp_path: Path) -> None:
    file = tmp_path / "seed.yaml"
    file.write_text(lora_document_block())
    loaded = load_config("grpo", file, [])
    config = loaded.config
    assert config.grpo.num_prompts_per_step == 32
    assert config.grpo.num_generations_per_prompt == 16
    assert config.grpo.max_num_steps == 100
    assert config.grpo.adv_estimator.use_leave_one_out_baseline is True
    assert config.policy.model_name == config.policy.tokenizer.name == "TechPulse/techpulse-7b-v1"
    assert config.policy.dtensor_cfg.lora_cfg.enabled is True
    assert config.policy.dtensor_cfg.lora_cfg.dim == 8
    assert config.policy.optimizer.kwargs["lr"] == 5e-6
    assert config.policy.generation.max_new_tokens == 512
    assert config.data.train_sets()[0].dataset_name == "OpenMathInstruct-2"
    assert config.data.train_sets()[0].env_name == "math"
    assert config.env["math"].num_workers == 8
    assert config.checkpointing.keep_top_k == 5
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node) == (2, 8)
    assert "policy.generation.backend: vllm needs policy.generation.vllm_cfg.python" in loaded.warnings[0]


def test_the_llama_document_loads_once_its_indentation_is_restored(tmp_path: Path) -> None:
    file = tmp_path / "seed.yaml"
    file.write_text(llama_document_block())
    loaded = load_config("grpo", file, [])
    config = loaded.config
    assert config.policy.model_name == "meta-llama/Llama-3.1-8B-Instruct"
    assert config.policy.tokenizer.name == "meta-llama/Llama-3.1-8B-Instruct"
    assert config.policy.logprob_batch_size == 2
    assert config.policy.generation.max_new_tokens == config.policy.max_total_sequence_length == 4096
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (64, 32)
    assert config.policy.train_global_batch_size == 512
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.2, 0.2)
    assert config.loss_fn.reference_policy_kl_penalty == 0.01
    assert any("clip_epsilon" in warning for warning in loaded.warnings)
    assert any("kl_penalty_coeff" in warning for warning in loaded.warnings)
    assert len(loaded.warnings) == 3  # these two, and the engine


@pytest.mark.parametrize(
    ("block", "file"),
    [
        (lora_document_block, "grpo_lora_7b_2nodes.yaml"),
        (llama_document_block, "grpo_llama8b_2nodes.yaml"),
    ],
)
def test_the_shipped_copies_have_the_same_keys_and_values(block, file: str) -> None:
    shipped = (REPOSITORY / "configs" / file).read_text(encoding="utf-8")
    assert yaml.safe_load(shipped) == yaml.safe_load(block())


def test_the_command_lines_of_the_documents_are_accepted() -> None:
    lora = load_config(
        "grpo",
        None,
        [
            "cluster.num_nodes=2",
            "cluster.gpus_per_node=8",
            "grpo.max_num_steps=100",
            "grpo.num_prompts_per_step=32",
            "grpo.num_generations_per_prompt=16",
            "policy.model_name=TechPulse/techpulse-7b-v1",
            "policy.tokenizer.name=TechPulse/techpulse-7b-v1",
            "policy.dtensor_cfg.enabled=true",
            "policy.dtensor_cfg.lora_cfg.enabled=true",
            "policy.dtensor_cfg.lora_cfg.dim=8",
            "policy.train_global_batch_size=512",
            "policy.generation.vllm_cfg.gpu_memory_utilization=0.6",
            "policy.generation.temperature=1.0",
            "loss_fn.reference_policy_kl_penalty=0.01",
            "checkpointing.checkpoint_dir=/shared/grpo-checkpoints",
            "checkpointing.save_period=10",
            "logger.wandb_enabled=false",
            "logger.log_dir=/tmp/grpo-logs",
        ],
    )
    assert lora.warnings == []
    llama = load_config(
        "grpo",
        REPOSITORY / "configs" / "grpo_llama8b_2nodes.yaml",
        [
            "logger.wandb_enabled=True",
            "cluster.num_nodes=2",
            "cluster.gpus_per_node=8",
            "logger.wandb.name='llama3.1-8b-deepscaler-grpo-2nodes'",
            "grpo.max_num_steps=100",
            "checkpointing.checkpoint_dir=/data/nemo_rl_llama3_8b_ds_cp",
            "data.dataset_name='DeepScaler'",
        ],
    )
    assert llama.config.data.train_sets()[0].dataset_name == "DeepScaler"
    assert llama.config.logger.wandb_enabled
    assert llama.config.logger.wandb.name == "llama3.1-8b-deepscaler-grpo-2nodes"
