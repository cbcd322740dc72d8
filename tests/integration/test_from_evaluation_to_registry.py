"""One model after another through eval, gate and registry, as a user types it; and the distance from the base model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.apps.evaluate.results import PROBLEMS_FILE, read_evaluation
from posttrain.cli.main import main
from posttrain.data.chat import ChatFormat

pytest.importorskip("mlflow", reason="the registry needs the extra `registry`")

NUM_PROBLEMS = 40
GATE = """\
checks:
  reward: {metric: reward, worse_by_at_most: 0.2}
  drift: {metric: kl_from_base, at_most: 100.0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and an evaluation of each on the same problems."""
    folder = tmp_path_factory.mktemp("shop")
    rows = [{"problem": row["input"], "answer": row["output"]} for row in tiny_runs.questions(NUM_PROBLEMS)]
    tiny_runs.write_rows(folder / "sums.jsonl", rows)
    (folder / "rewards.py").write_text(tiny_runs.ODD_CHARACTERS)
    (folder / "gate.yaml").write_text(GATE)
    for seed, name in enumerate(("old", "new")):
        tiny_runs.save_model(folder / name, seed=seed)
        assert main(evaluation(folder, name)) == 0
    return folder


def evaluation(folder: Path, name: str, model: str | None = None, to: str | None = None) -> list[str]:
    sampled = ["eval.num_tests_per_prompt=2", "generation.temperature=1"]
    judge = f"env.mine.function={folder / 'rewards.py:odd'}"
    places = model or folder / name, folder / "sums.jsonl", to or folder / f"eval-{name}"
    return tiny_runs.evaluation(*places, *sampled, judge, "--quiet")


def slow_divergence(folder: Path, left: str, right: str, prompt: str, answers: list[str]) -> float:
    """KL in nats per token, with plain transformers, one answer after another."""
    tokenizer = AutoTokenizer.from_pretrained(folder / left)
    chat = ChatFormat(tokenizer)
    before = tokenizer(chat.render([{"role": "user", "content": prompt}]), add_special_tokens=False)["input_ids"]
    models = [AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in (left, right)]
    values = []
    for answer in answers:
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            p, q = (model(torch.tensor([before + ids])).logits[0].log_softmax(-1) for model in models)
        places = range(len(before) - 1, len(before) + len(ids) - 1)
        values += [float((p[place].exp() * (p[place] - q[place])).sum()) for place in places]
    return sum(values) / len(values)


def test_the_divergence_is_that_of_plain_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = folder / "eval-new"
    assert main(["gate", "measure-kl", str(measured), "--base", str(folder / "old"), "--device", "cpu"]) == 0
    assert "nats per token, over 40 problems" in capsys.readouterr().out
    values = json.loads((measured / "kl.json").read_text())["values"]
    chat = ChatFormat(AutoTokenizer.from_pretrained(folder / "new"))
    for problem in read_evaluation(measured).problems[:5]:
        answers = [s.text + (chat.end_of_turn if s.finish_reason == "stop" else "") for s in problem.samples]
        expected = slow_divergence(folder, "new", "old", problem.prompt, answers)
        assert values[problem.id] == pytest.approx(expected, rel=1e-4)
        assert expected > 0.1, "two random models are far apart"

    assert main(["gate", "measure-kl", str(measured), "--base", str(folder / "new"), "--device", "cpu"]) == 0
    values = json.loads((measured / "kl.json").read_text())["values"]
    assert max(values.values()) < 1e-6, "a model has not moved from itself"


def test_a_divergence_of_other_answers_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = folder / "eval-old"
    assert main(["gate", "measure-kl", str(measured), "--base", str(folder / "new"), "--device", "cpu"]) == 0
    content = json.loads((measured / "kl.json").read_text())
    (measured / "kl.json").write_text(json.dumps({**content, "answers_sha256": "another"}))
    assert main(["gate", "--config", str(folder / "gate.yaml"), "--candidate", str(measured), "--no-production"]) == 64
    assert f"was measured on other answers than {PROBLEMS_FILE} holds now" in capsys.readouterr().err
    (measured / "kl.json").unlink()


def test_from_an_evaluation_to_production(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("POSTTRAIN_REGISTRY", raising=False)
    assert main(["gate", "measure-kl", "eval-new", "--base", "old", "--device", "cpu"]) == 0
    judged = ["gate", "--config", "gate.yaml", "--candidate", "eval-new", "--production", "eval-old"]
    assert main([*judged, "--json", "gate.json"]) == 0
    add = ["registry", "add", "sums", "new", "--eval", "main=eval-new", "--gate", "gate.json", "--data", "sums.jsonl"]
    assert main([*add, "--note", "the first", "--base-model", "old"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["registry", "add", "other", "old", "--gate", "gate.json", "--in-place"]) == 0
    assert "warning: the gate judged" in capsys.readouterr().err, "a verdict about another model"
    assert main(["registry", "add", "other", "old", "--eval", "main=eval-new", "--in-place"]) == 0
    assert "warning: --eval main: is of" in capsys.readouterr().err, "numbers of another model"
    assert main(["registry", "promote", "sums", "1", "--why", "gate passed"]) == 0
    assert main(["registry", "promote", "sums", "1", "--why", "canary was quiet", "--by", "ann"]) == 0
    assert main(["registry", "add", "sums", "old", "--metric", "mine=0.5"]) == 0
    assert main(["registry", "add", "sums", "eval-old"]) == 64
    assert "eval-old is a folder without config.json" in capsys.readouterr().err
    assert main(["registry", "promote", "sums", "2", "--to", "production", "--why", "x"]) == 64
    assert "it has no gate verdict" in capsys.readouterr().err
    assert main(["registry", "rollback", "sums", "--to", "2", "--why", "x"]) == 64
    assert "has never been in production" in capsys.readouterr().err, "no way around the gate"
    assert main(["registry", "promote", "sums", "2", "--to", "production", "--why", "emergency", "--force"]) == 0
    assert main(["registry", "rollback", "sums", "--why", "it was worse"]) == 0
    capsys.readouterr()

    assert main(["registry", "history", "sums", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["version"], row["to"], row["why"]) for row in told] == [
        (1, "canary", "gate passed"),
        (1, "production", "canary was quiet"),
        (2, "production", "emergency"),
        (1, "production", "it was worse"),
    ]
    assert [row["forced"] for row in told] == [False, False, True, False]
    assert main(["registry", "show", "sums@production", "--verify"]) == 0
    shown = capsys.readouterr().out
    for words in ("registry:sums@1  production", "old", "sums.jsonl", "main/pass@1", "files are what was registered"):
        assert words in shown
    assert main(["registry", "show", "sums", "2"]) == 0
    assert "sums@2" in capsys.readouterr().out
    assert main(["registry", "show", "sums@2", "1"]) == 64
    assert "names a version already" in capsys.readouterr().err
    assert main(["registry", "list", "sums"]) == 0
    assert "archived" in capsys.readouterr().out
    assert main(["registry", "diff", "sums", "1", "2"]) == 0
    assert "metrics" in capsys.readouterr().out
    # What is in production can be measured by that name.
    assert main(evaluation(folder, "new", "registry:sums@production", "eval-production")) == 0
    registered, original = (read_evaluation(Path(name)) for name in ("eval-production", "eval-new"))
    assert registered.summary.metrics == original.summary.metrics
    # And so can its distance from another version.
    distance = ["gate", "measure-kl", "eval-production", "--device", "cpu", "--base"]
    for version, is_itself in ((1, True), (2, False)):
        assert main([*distance, f"registry:sums@{version}"]) == 0
        values = json.loads(Path("eval-production/kl.json").read_text())["values"]
        assert (max(values.values()) < 1e-6) == is_itself
    assert main([*distance, "registry:sums@7"]) == 64
    # But not under the name of a stage that has moved on since.
    assert main(["registry", "promote", "sums", "2", "--to", "production", "--why", "x", "--force"]) == 0
    assert main([*distance, "old"]) == 64
    assert "registry:sums@production has other weights now" in capsys.readouterr().err
    assert main([*distance, "old", "--model", "registry:sums@1"]) == 0
    assert main(["registry", "rollback", "sums", "--why", "x"]) == 0
    capsys.readouterr()
    assert main(["registry", "resolve", "registry:sums@production"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert main(["registry", "resolve", "sums@production"]) == 0
    assert Path(capsys.readouterr().out.strip()) == path
    assert AutoModelForCausalLM.from_pretrained(path) is not None

    (path / "model.safetensors").write_bytes(b"tampered")
    assert main(["registry", "show", "sums@1", "--verify"]) == 2
    assert "damaged: model.safetensors" in capsys.readouterr().out
    assert main(["registry", "resolve", "registry:sums"]) == 64
    assert "is not what was registered" in capsys.readouterr().err
    assert main(["registry", "show", "sums", "1", "what"]) == 64
    assert "unexpected: 'what'" in capsys.readouterr().err
    assert main(["registry", "show", "sums", "what"]) == 64
    assert "sums@what: no such version" in capsys.readouterr().err
