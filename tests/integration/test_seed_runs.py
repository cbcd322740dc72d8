"""The configs of the guides that posttrain follows run as printed: only the model, the data and the sizes are other
ones here, because theirs need two nodes with eight GPUs each. Their commands are in `test_seed_scripts.py`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny_runs import questions, rows_of, run, save_data, write_rows

REPOSITORY = Path(__file__).parents[2]


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


def assert_two_steps(folder: Path) -> None:
    rows = rows_of(folder)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    for row in rows:
        assert math.isfinite(row["train/loss"])
        assert row["train/unscored"] == 0
        assert row["train/num_samples"] == 16
        assert row["train/kl_penalty"] >= 0, "KL has a price in these configs"
    assert (folder / "report.html").is_file()


@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize(
    ("config", "weights"),
    [("grpo_lora_7b_2nodes", "adapter_model.safetensors"), ("grpo_llama8b_2nodes", "model.safetensors")],
)
def test_the_config_runs(
    config: str, weights: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["grpo", "--config", f"configs/{config}.yaml"]
    assert run([*command, *of_our_size(model, data / "open_math.jsonl", folder)]) == 0
    assert_two_steps(folder)
    assert (folder / "step_2" / "policy" / "weights" / "model" / weights).is_file()
    engine = [line for line in capsys.readouterr().err.splitlines() if "backend" in line]
    assert len(engine) == 1, "one line says that the native engine runs"
    assert "native" in engine[0]
