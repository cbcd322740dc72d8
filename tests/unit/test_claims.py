"""A number in the README that praises posttrain names what shows it: a script or command that exists, and a date. So
does each section of the evidence that has one. On the other pages a section with a measured number names its command or
date, or leads to the page of measurements."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from posttrain.config import load_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLAIM = re.compile(r"\d[\d.,]* ?(?:%|times\b|tok/s|tokens/s|requests/s|pairs/s)")
DATE = re.compile(r"20\d\d-\d\d-\d\d")
SCRIPT = re.compile(r"`(bench/\w+\.py|make [a-z-]+|posttrain [a-z]+)[^`]*`")


def claims(markdown: str) -> list[str]:
    """Rows of tables and paragraphs that have a figure, without code blocks."""
    plain = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    rows = [line for line in plain.splitlines() if line.startswith("|")]
    paragraphs = re.split(r"\n\s*\n", "\n".join(line for line in plain.splitlines() if not line.startswith("|")))
    return [text for text in (*rows, *paragraphs) if CLAIM.search(text)]


def test_the_readme_has_figures() -> None:
    assert len(claims(README)) >= 8


@pytest.mark.parametrize("text", claims(README))
def test_a_figure_names_its_command_and_its_date(text: str) -> None:
    assert DATE.search(text), text
    shown = SCRIPT.search(text)
    assert shown, text
    if shown[1].startswith("bench/"):
        assert (ROOT / shown[1]).is_file()
    elif shown[1].startswith("make "):
        assert re.search(rf"^{shown[1].removeprefix('make ')}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_a_figure_without_a_command_is_found() -> None:
    found = claims("We are 3.1 times as fast.\n\n| a | 12 tok/s |\n")
    assert len(found) == 2
    assert not any(SCRIPT.search(text) for text in found)


@pytest.mark.parametrize("page", ["README.md", "docs/README.md"])
def test_no_page_installs_from_an_index_that_has_no_release(page: str) -> None:
    assert "pip install posttrain" not in (ROOT / page).read_text(encoding="utf-8")


def test_every_test_and_script_of_the_evidence_exists() -> None:
    text = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    paths = re.findall(r"\b((?:tests|bench|configs)/[\w/.]+\.(?:py|yaml))", text)
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("target", ["reproduce-gsm8k", "reproduce-qwen3-4b"])
def test_the_settings_of_a_reproduction_are_accepted(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be checked without a GPU and the hub."""
    monkeypatch.chdir(ROOT)
    make = ["make", "--dry-run", "--assume-old=setup", target]
    printed = subprocess.run(make, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    commands = [shlex.split(line)[1:] for line in printed.splitlines() if line.startswith(".venv/bin/posttrain ")]
    assert {"grpo", "eval"} <= {kind for kind, *_ in commands}
    for kind, first, second, *words in commands:
        if kind == "eval":
            load_config(kind, None, [f"generation.model_name={first}", second, *words])
        elif kind != "models":
            assert first == "--config"
            load_config(kind, Path(second), words)


MEASURED = re.compile(CLAIM.pattern + r"|\b1\.0\d+\b|\b\d+ (?:tests|s|minutes)\b")
COMMAND = re.compile(r"^(?:\.venv/bin/(?:posttrain|pytest) [\w/.-]+|make ([\w-]+))", re.MULTILINE)


def test_a_figure_of_the_evidence_has_a_command_and_a_date_in_its_section() -> None:
    sections = (ROOT / "docs/evidence.md").read_text(encoding="utf-8").split("\n## ")[1:]
    measured = [section for section in sections if MEASURED.search(section)]
    assert len(measured) >= 5
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for section in measured:
        commands = list(COMMAND.finditer(section))
        assert commands, section
        assert all(re.search(rf"^{one[1]}:", makefile, re.MULTILINE) for one in commands if one[1]), section
        lines = re.split(r"\n(?=\n|\||make |\.venv)", section)
        undated = [line for line in lines if MEASURED.search(line) and not DATE.search(line)]
        assert undated == []


# Rates, ratios of speed, seconds of a unit of work, and shares of what was compared.
RATE = re.compile(
    r"\d[\d.,]* ?(?:(?:tok|tokens|requests|pairs|rows|samples|GiB)/s|times (?:as fast|as much|faster|slower|the speed))"
    r"|\d[\d.,]* (?:ms|s) (?:a|per|each) (?:step|token|row|answer|pair)\b"
    r"|\b(?:took|takes) (?:about )?\d[\d.,]* (?:ms|s|minutes|hours)\b"
    r"|\b(?:measured|faster|slower)\b[^.|]*\d[\d.,]* ?(?:%|times)"
    r"|\d[\d.,]* ?% (?:faster|slower|of the (?:memory|time|speed))"
)
SHOWN = re.compile(
    r"(?:bench|tests|tools|examples)/[\w/]+\.(?:py|ipynb)|`(?:make [a-z-]+|posttrain [a-z]+)"
    r"|\b(?:performance|LOG|evidence)\.md|20\d\d-\d\d-\d\d"
)


def sections_without_a_source(markdown: str) -> list[str]:
    plain = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    sections = re.split(r"^#+ ", plain, flags=re.MULTILINE)
    return [section for section in sections if RATE.search(section) and not SHOWN.search(section)]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("**/*.md")), ids=lambda page: page.stem)
def test_a_section_with_a_measured_number_says_where_it_is_from(page: Path) -> None:
    assert sections_without_a_source(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("It does 12,300 tok/s.", True),
        ("| packed | 1.4 times as fast |", True),
        ("A step takes 31.9 ms.", True),
        ("It is faster by 40 %.", True),
        ("It does 12,300 tok/s (`bench/decode.py`).", False),
        ("## A\n\n9 ms a token\n\n## B\n\n[log](LOG.md)", True),
        ("A tenth of the rows, 10 %, is held out for 5 s at most.", False),
        ("```\n1.4 times as fast\n```", False),
    ],
)
def test_a_measured_number_without_a_source_is_found(text: str, is_found: bool) -> None:
    assert bool(sections_without_a_source(text)) == is_found


def test_no_page_has_the_markers_of_a_merge() -> None:
    pages = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("configs/**/*.yaml"),
        *ROOT.glob("examples/**/*.*"),
    ]
    marked = re.compile(rb"^(<{7} |>{7} |={7}$)", re.MULTILINE)
    assert [page for page in pages if marked.search(page.read_bytes())] == []
