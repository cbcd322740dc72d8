"""What a command imports before it has something to do with it: help and refusals do not wait for torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ["torch", "transformers", "peft", "datasets", "ray", "mlflow"]
SETTINGS = ["pydantic", "omegaconf", "yaml", "numpy", "rich"]
SCRIPT = """\
import json, sys
from posttrain.cli.main import main
try:
    code = main(json.loads(sys.argv[1]))
except SystemExit as ended:
    code = ended.code or 0
print(json.dumps([code, [name for name in json.loads(sys.argv[2]) if name in sys.modules]]))
"""


def imported(words: list[str], names: list[str], folder: Path) -> tuple[int, list[str]]:
    """The exit code of a command, and which of the packages it has imported."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(words), json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
    code, found = json.loads(done.stdout.splitlines()[-1])
    return code, found


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["status", "--help"], ["serve", "--help"]])
def test_help_imports_no_config(words: list[str], tmp_path: Path) -> None:
    assert imported(words, [*HEAVY, *SETTINGS], tmp_path) == (0, [])


@pytest.mark.parametrize(
    "words",
    [
        ["grpo", "no.such.key=1"],
        ["grpo", "--config", "missing.yaml"],
        ["grpo", "model=missing/folder"],
        ["dpo", "model=model", "data.train.dataset_name=PreferenceDataset", "data.train.data_path=missing.jsonl"],
        ["serve", "missing"],
        ["chat", "missing"],
        ["convert", "missing", "--to", "new"],
        ["eval", "missing", "data.dataset_name=gsm8k"],
    ],
)
def test_missing_input_is_refused_before_torch_is_imported(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "missing").mkdir() if "missing/folder" in words[-1] else None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert imported(words, HEAVY, tmp_path) == (64, [])


def test_the_package_imports_nothing_of_its_own(tmp_path: Path) -> None:
    script = "import sys, posttrain; print([name for name in sys.modules if name.startswith('posttrain.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "[]\n"
