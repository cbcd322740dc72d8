"""The configs and command lines of the documents that posttrain implements run as printed: only the model, the data and
the sizes are other ones here, because theirs need two nodes with eight GPUs each.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import questions, rows_of, run, save_data, save_model, write_rows

REPOSITORY = Path(__file__).parents[2]

LORA_COMMAND = shlex.split("""
cluster.num_nodes=2
cluster.gpus_per_node=8
grpo.max_num_steps=100
grpo.num_prompts_per_step=32
grpo.num_generations_per_prompt=16
policy.model_name=TechPulse/techpulse-7b-v1
policy.tokenizer.name=TechPulse/techpulse-7b-v1
policy.dtensor_cfg.enabled=true
policy.dtensor_cfg.lora_cfg.enabled=true
policy.dtensor_cfg.lora_cfg.dim=8
policy.train_global_batch_size=512
policy.generation.vllm_cfg.gpu_memory_utilization=0.6
policy.generation.temperature=1.0
loss_fn.reference_policy_kl_penalty=0.01
checkpointing.checkpoint_dir=/shared/grpo-checkpoints
checkpointing.save_period=10
logger.wandb_enabled=false
logger.log_dir=/tmp/grpo-logs
""")

LLAMA_COMMAND = shlex.split("""
--config examples/configs/grpo_math_8B.yaml
logger.wandb_enabled=True
cluster.num_nodes=2
cluster.gpus_per_node=8
logger.wandb.name='llama3.1-8b-deepscaler-grpo-2nodes'
grpo.max_num_steps=100
checkpointing.checkpoint_dir=/data/nemo_rl_llama3_8b_ds_cp
data.dataset_name='DeepScaler'
""")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with the columns of OpenMathInstruct-2 and of DeepScaler."""
    folder = save_data(tmp_path_factory.mktemp("data"))
    rows = questions(16)
    open_math = [{"problem": row["input"], "expected_answer": row["output"]} for row in rows]
    write_rows(folder / "open_math.jsonl", open_math)
    write_rows(folder / "deep_scaler.jsonl", [{"problem": row["input"], "answer": row["output"]} for row in rows])
    return folder


@pytest.fixture
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are printed as they are typed in the root of the repository."""
    monkeypatch.chdir(REPOSITORY)


def of_our_size(model: Path, data_path: Path, folder: Path) -> list[str]:
    """Model, data and sizes; nothing else."""
    return [
        f"policy.model_name={model}",
        f"policy.tokenizer.name={model}",
        f"data.train.data_path={data_path}",
        "cluster.num_nodes=1",
        "cluster.gpus_per_node=1",
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=16",
        "policy.max_total_sequence_length=48",
        "policy.generation.max_new_tokens=16",
        f"checkpointing.checkpoint_dir={folder}",
    ]


def assert_two_steps(folder: Path, checkpoints: Path | None = None) -> None:
    rows = rows_of(folder)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    for row in rows:
        assert math.isfinite(row["train/loss"])
        assert row["train/unscored"] == 0
        assert row["train/num_samples"] == 16
        assert row["train/kl_penalty"] >= 0, "KL has a price in these configs"
    assert ((checkpoints or folder) / "step_2" / "policy" / "weights" / "model").is_dir()
    assert (folder / "report.html").is_file()


@pytest.mark.usefixtures("at_the_root")
def test_the_lora_config_runs(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    config = ["grpo", "--config", "configs/grpo_lora_7b_2nodes.yaml"]
    assert run([*config, *of_our_size(model, data / "open_math.jsonl", folder)]) == 0
    assert_two_steps(folder)
    assert (folder / "step_2" / "policy" / "weights" / "model" / "adapter_model.safetensors").is_file()
    engine = [line for line in capsys.readouterr().err.splitlines() if "backend" in line]
    assert len(engine) == 1, "one line says that the native engine runs"
    assert "native" in engine[0]


@pytest.mark.usefixtures("at_the_root")
def test_the_llama_config_runs(model: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = ["grpo", "--config", "configs/grpo_llama8b_2nodes.yaml"]
    assert run([*config, *of_our_size(model, data / "open_math.jsonl", folder)]) == 0
    assert_two_steps(folder)
    assert (folder / "step_2" / "policy" / "weights" / "model" / "model.safetensors").is_file()


def run_script(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """`python examples/SCRIPT …` without the seconds that another interpreter takes to start."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPOSITORY / "examples" / script), run_name="__main__")
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("at_the_root")
def test_run_grpo_takes_the_printed_command_line(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, checkpoints = tmp_path / "logs", tmp_path / "checkpoints"
    sizes = of_our_size(model, data / "open_math.jsonl", checkpoints)
    assert run_script("run_grpo.py", [*LORA_COMMAND, *sizes, f"logger.log_dir={logs}", "--quiet"], monkeypatch) == 0
    assert_two_steps(logs, checkpoints)
    adapters = json.loads((checkpoints / "step_2/policy/weights/model/adapter_config.json").read_text())
    assert adapters["r"] == 8


@pytest.mark.usefixtures("at_the_root")
def test_run_dpo_takes_a_command_line(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    arguments = [
        "--config",
        "configs/dpo.yaml",
        f"policy.model_name={model}",
        f"data.train.data_path={data / 'pairs.jsonl'}",
        "dpo.max_num_steps=2",
        "policy.train_global_batch_size=4",
        "policy.max_total_sequence_length=64",
        f"checkpointing.checkpoint_dir={folder}",
        "--quiet",
    ]
    assert run_script("run_dpo.py", arguments, monkeypatch) == 0
    assert [row["step"] for row in rows_of(folder) if "train/loss" in row] == [1, 2]


def test_run_grpo_math_takes_the_printed_command_line_as_a_process(model: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sizes = of_our_size(model, data / "deep_scaler.jsonl", folder)
    ended = subprocess.run(
        [sys.executable, "examples/run_grpo_math.py", *LLAMA_COMMAND, *sizes],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert_two_steps(folder)
    assert "metrics stay in the run folder" in ended.stderr, "W&B is accepted, and said to do nothing"
    for text in (
        "Step 1/2",
        "step 2/2",
        "Training Results:",
        "Avg Reward",
        "Timing:",
        "Total step time",
        "Performance Metrics:",
    ):
        assert text in ended.stdout
    assert "Training FLOPS" in ended.stdout
