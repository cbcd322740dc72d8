"""The config of an evaluation: NeMo RL's files and overrides, what contradicts itself, and what has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import ConfigError, guess_kind, load_config

EVALS = Path(__file__).parents[3] / "examples" / "configs" / "evals"

# As NeMo RL's own eval.yaml is written, with keys that older versions had.
NEMO_EVAL = """
eval:
  metric: "pass@k"
  num_tests_per_prompt: 1
  seed: 42
  pass_k_value: 1
generation:
  backend: "vllm"
  max_new_tokens: ${generation.vllm_cfg.max_model_len}
  temperature: 0.0
  top_p: 1.0
  top_k: -1
  num_prompts_per_step: -1
  model_name: "Qwen/Qwen2.5-Math-1.5B-Instruct"
  stop_token_ids: null
  stop_strings: null
  vllm_cfg: {async_engine: false, precision: "bfloat16", tensor_parallel_size: 1, pipeline_parallel_size: 1,
    gpu_memory_utilization: 0.9, max_model_len: 2048, enforce_eager: False}
  colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
tokenizer: {name: "${generation.model_name}", chat_template: "default"}
data:
  max_input_seq_length: ${generation.vllm_cfg.max_model_len}
  prompt_file: null
  system_prompt_file: null
  dataset_name: "AIME2024"
  processor: math_hf_data_processor
  repeat: 1
env: {math: {num_workers: 8}}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""


def test_the_command_of_the_walk_through_loads_as_printed() -> None:
    loaded = load_config(
        "eval",
        EVALS / "math_eval.yaml",
        [
            "generation.model_name=nemo_rl_llama3_8b_ds_cp/hf",
            "generation.temperature=0.6",
            "generation.vllm_cfg.max_model_len=32768",
            "generation.vllm_cfg.tensor_parallel_size=8",
            "data.dataset_name=math500",
            "eval.num_tests_per_prompt=16",
            "cluster.gpus_per_node=8",
        ],
    )
    config = loaded.config
    assert config.generation.max_new_tokens == 32768
    assert config.tokenizer.name == "nemo_rl_llama3_8b_ds_cp/hf"
    assert config.metric_name == "pass@1"
    assert config.data.prompt_file == "examples/prompts/cot.txt"
    assert any("tensor_parallel_size" in line and "native engine" in line for line in loaded.warnings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), None),
        (("generation.backend=vllm",), None),
        (("generation.backend=vllm", "generation.vllm_cfg.tensor_parallel_size=4"), None),
        (("generation.backend=vllm", "generation.vllm_cfg.tensor_parallel_size=3"), "8 GPUs are requested, 6 are used"),
        (("generation.model_name=http://host/v1",), None),
    ],
)
def test_unused_gpus_are_mentioned(settings: tuple[str, ...], said: str | None) -> None:
    warnings = load_config("eval", None, ["cluster.gpus_per_node=8", *settings]).warnings
    found = [line for line in warnings if line.startswith("cluster: ")]
    assert found == [] if said is None else said in found[0]


@pytest.mark.parametrize("file", sorted(EVALS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_files_of_nemo_rl_are_here_and_load(file: Path) -> None:
    assert guess_kind(file) == "eval"
    loaded = load_config("eval", file, [])
    assert loaded.warnings == []
    assert loaded.config.data.prompt_file is None or (EVALS.parents[2] / loaded.config.data.prompt_file).is_file()


def test_a_file_of_nemo_rl_loads_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text(NEMO_EVAL)
    loaded = load_config("eval", tmp_path / "eval.yaml")
    assert loaded.config.generation.backend == "vllm"
    assert any("`eval.pass_k_value` is now `eval.k_value`" in line for line in loaded.warnings)
    again = tmp_path / "again.yaml"
    again.write_text(loaded.to_yaml())
    assert load_config("eval", again).config == loaded.config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["eval.k_value=4"], "eval.k_value = 4 is more than eval.num_tests_per_prompt = 1"),
        (["eval.num_tests_per_prompt=4"], "all samples of a problem would be the same"),
        (["eval.num_tests_per_prompt=4", "generation.temperature=1", "generation.top_k=1"], "would be the same"),
        (["eval.metric=best@k"], "`eval.metric` = 'best@k'"),
        (["generation.backend=openai_url"], "needs generation.openai_cfg.url"),
        (["generation.num_prompts_per_step=0"], "a positive number, or -1"),
        (["data.env_name=mine"], "judged by env.mine, which is not there"),
        (["env.a.type=exact", "env.b.type=exact"], "say which of them judges"),
        (["data.dataset_nam=x"], "did you mean `data.dataset_name`?"),
        (["grpo.seed=1"], "belongs to `posttrain grpo`"),
    ],
)
def test_contradictions_are_named(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("eval", None, overrides)
    assert said in str(caught.value)


def test_a_judge_of_your_own_takes_the_place_of_the_built_in_one() -> None:
    assert load_config("eval", None, []).config.judge == "math"
    assert load_config("eval", None, ["env.mine.function=rewards.py:f"]).config.judge == "mine"
    both = ["env.mine.function=rewards.py:f", "data.env_name=math"]
    assert load_config("eval", None, both).config.judge == "math"


def test_only_vllm_spreads_over_devices() -> None:
    parallel = ["generation.vllm_cfg.tensor_parallel_size=4", "generation.vllm_cfg.pipeline_parallel_size=2"]
    assert load_config("eval", None, parallel).config.num_devices == 1
    assert load_config("eval", None, ["generation.backend=vllm", *parallel]).config.num_devices == 8
    on_server = ["generation.backend=vllm", "generation.model_name=http://host/v1", *parallel]
    assert load_config("eval", None, on_server).config.num_devices == 1


def test_a_url_is_a_server_whatever_the_backend() -> None:
    config = load_config("eval", None, ["generation.model_name=http://host:8000/v1"]).config
    assert config.server_url == "http://host:8000/v1"
    named = ["generation.backend=openai_url", "generation.openai_cfg.url=http://host/v1", "generation.model_name=mine"]
    assert load_config("eval", None, named).config.server_url == "http://host/v1"
    assert load_config("eval", None, []).config.server_url is None
