"""From a run to a model that plain transformers loads, through the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gate_folders import write_evaluation
from safetensors.torch import load_file, save_file
from tiny_models import PROMPT, logits_of
from tiny_runs import grpo, results_of, rm, run, save_model, weights_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.apps.export.model_card import wilson_interval
from posttrain.checkpointing.integrity import seal
from posttrain.cli.main import main

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples" / "converters" / "convert_dcp_to_hf.py"
LORA = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4"]


@pytest.fixture(scope="module")
def full(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    assert run(grpo(model, data, folder, steps=4)) == 0
    return folder


@pytest.fixture(scope="module")
def lora(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    extra = ["checkpointing.save_consolidated=true", "policy.optimizer.kwargs.lr=5e-2"]
    assert run([*grpo(model, data, folder, steps=2), *LORA, *extra]) == 0
    return folder


def weights(checkpoint: Path) -> Path:
    return checkpoint / "policy/weights/model"


@pytest.mark.invariant
def test_a_run_becomes_a_model_with_its_story(
    full: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(full), "--to", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().out
    assert f"Wrote {tmp_path / 'hf'}: model, 1 weight file" in said
    assert "Verified: loaded again" in said
    assert torch.equal(logits_of(tmp_path / "hf"), logits_of(weights(full / "step_4")))
    assert not torch.equal(logits_of(tmp_path / "hf"), logits_of(model)), "the run has changed the model"
    template = AutoTokenizer.from_pretrained(full / "step_4/policy/tokenizer").chat_template
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == template

    reward = next(row["train/reward"] for row in results_of(full) if row["step"] == 4)
    card = (tmp_path / "hf/README.md").read_text()
    assert all(
        words in card for words in (f"| `train/reward` | {reward:.6g} |", str(model), "questions.jsonl", "lr: 0.01")
    )
    assert 'AutoModelForCausalLM.from_pretrained("hf")' in card
    assert "## Evaluation" in card
    lineage = json.loads((tmp_path / "hf/conversion.json").read_text())
    assert (lineage["step"], lineage["algorithm"], lineage["base_model"]) == (4, "grpo", str(model))
    assert lineage["metrics"]["train/reward"] == reward


def test_the_card_has_intervals_evaluations_and_the_verdict(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_evaluation(tmp_path / "evaluated", [[1.0], [0.0], [1.0], [1.0]], model="another")
    summary = json.loads((tmp_path / "evaluated/summary.json").read_text())
    interval = {"low": 0.25, "high": 1.0, "confidence": 0.95}
    summary |= {"metrics": {"pass@1": 0.75}, "intervals": {"pass@1": interval}}
    (tmp_path / "evaluated/summary.json").write_text(json.dumps(summary))
    judged = {"main": {"model": "another", "model_fingerprint": "0"}}
    gate = {"verdict": "needs_more_samples", "reasons": ["right: too few problems"], "candidate": judged}
    (tmp_path / "gate.json").write_text(json.dumps(gate))
    words = ["convert", str(full), "--to", str(tmp_path / "hf"), "--no-verify"]
    assert main([*words, "--eval", f"main={tmp_path / 'evaluated'}", "--gate", str(tmp_path / "gate.json")]) == 0
    assert "warning: --eval main is of another" in capsys.readouterr().err

    card = (tmp_path / "hf/README.md").read_text()
    row = [row for row in results_of(full) if "validation/reward" in row][-1]
    count, half = row["validation/num_samples"], 1.959964 * row["validation/reward_std"]
    low, high = (row["validation/reward"] + sign * half / (count - 1) ** 0.5 for sign in (-1, 1))
    assert f"| {row['validation/reward']:.4g} | {low:.4g} to {high:.4g} | {count:.0f} | 4 |" in card
    assert "| main | `set` | pass@1 | 0.75 | 0.25 to 1 | 4 | `another`, which is not known to be this model |" in card
    assert "verdict: **needs more samples**, on `another`, which is not known to be this model" in card
    assert "- right: too few problems" in card
    assert json.loads((tmp_path / "hf/conversion.json").read_text())["gate"]["verdict"] == "needs_more_samples"


def test_wilsons_interval() -> None:
    """Of 8 in 10, and of none in 10: figures of R's prop.test without continuity correction."""
    assert wilson_interval(0.8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)


def test_the_command_of_nemo_rl_as_printed(full: Path, tmp_path: Path) -> None:
    step = full / "step_2"
    command = [sys.executable, SCRIPT, "--config", step / "config.yaml"]
    command += ["--dcp-ckpt-path", f"{step}/policy/weights/", "--hf-ckpt-path", tmp_path / "hf"]
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert torch.equal(logits_of(tmp_path / "hf"), logits_of(weights(step)))
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 64
    assert "is not empty" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_lora_is_merged_or_stays_an_adapter(lora: Path, model: Path, tmp_path: Path) -> None:
    step = lora / "step_2"
    assert main(["convert", str(step), "--to", str(tmp_path / "adapter")]) == 0
    assert main(["convert", str(step), "--to", str(tmp_path / "merged"), "--merge-lora"]) == 0
    expected = logits_of(model, weights(step))
    assert not torch.allclose(expected, logits_of(model), atol=1e-2), "the adapter does something"
    assert torch.equal(logits_of(model, tmp_path / "adapter"), expected)
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=5e-4, atol=5e-4)


def test_save_consolidated_adds_a_verified_model_to_each_checkpoint(lora: Path, model: Path) -> None:
    step = lora / "step_2"
    torch.testing.assert_close(logits_of(step / "hf"), logits_of(model, weights(step)), rtol=5e-4, atol=5e-4)
    lineage = json.loads((step / "hf/conversion.json").read_text())
    assert lineage["source"] == f"{lora.name}/step_2"
    assert lineage["verification"]["how"] == "loaded"
    assert "hf/model.safetensors" in json.loads((step / "checksums.json").read_text())["files"]


def test_save_consolidated_changes_nothing_else(full: Path, model: Path, data: Path, tmp_path: Path) -> None:
    assert run([*grpo(model, data, tmp_path / "again", steps=4), "checkpointing.save_consolidated=true"]) == 0
    assert results_of(tmp_path / "again") == results_of(full)
    assert weights_of(tmp_path / "again/step_4") == weights_of(full / "step_4")
    assert not (full / "step_4/hf").exists()
    assert torch.equal(logits_of(tmp_path / "again/step_4/hf"), logits_of(weights(full / "step_4")))


def test_a_reward_model_is_converted_as_one(model: Path, data: Path, tmp_path: Path) -> None:
    assert run(rm(model, data, tmp_path / "rm", steps=2)) == 0
    assert main(["convert", str(tmp_path / "rm"), "--to", str(tmp_path / "hf")]) == 0
    found, expected = (
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()(PROMPT).logits
        for folder in (tmp_path / "hf", weights(tmp_path / "rm/step_2"))
    )
    assert found.shape == (1, 1)
    assert torch.equal(found, expected)


def bad(source: Path, target: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["convert", str(source), "--to", str(target), *options]) == 64
    assert not target.exists()
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".")]
    error = capsys.readouterr().err
    assert error.startswith("posttrain: error: ")
    return error


def test_bad_checkpoints_are_named_and_nothing_is_written(
    full: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "hf"
    step = tmp_path / "step_2"
    shutil.copytree(full / "step_2", step)
    (weights(step) / "model.safetensors").unlink()
    assert "policy/weights/model/model.safetensors is missing" in bad(step, target, capsys)

    tensors = load_file(weights(full / "step_2") / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, weights(step) / "model.safetensors", metadata={"format": "pt"})
    assert "model.safetensors is not what was saved" in bad(step, target, capsys)
    seal(step)  # saved like that
    error = bad(step, target, capsys)
    assert "model.norm.weight of" in error
    assert "not finite, the first at [3]" in error

    wide = save_model(tmp_path / "wide", hidden_size=64)
    assert "hidden_size is 32 by" in bad(full / "step_2", target, capsys, "--base", str(wide))
    assert "no folder" in bad(tmp_path / "nowhere", target, capsys)
    assert main(["convert", str(full)]) == 64
    assert "give a target" in capsys.readouterr().err
