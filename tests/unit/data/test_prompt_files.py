"""A prompt file has one place for the question, and nothing in a question can break it."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.data.conversations import PromptFiles
from posttrain.data.errors import DataError

LATEX = r"Find $\frac{1}{x}$ if {x} = \left\{ {0} \right\} and {}"


def write(folder: Path, text: str) -> str:
    (folder / "prompt.txt").write_text(text, encoding="utf-8")
    return str(folder / "prompt.txt")


def test_braces_of_the_question_survive(tmp_path: Path) -> None:
    files = PromptFiles.read(write(tmp_path, "Answer in \\boxed{{}}.\n{}\nGo.\n"), None)
    assert files.messages(LATEX) == [{"role": "user", "content": "Answer in \\boxed{}.\n" + LATEX + "\nGo."}]


@pytest.mark.parametrize("text", ["no place", "two {} places {}", "a {name}", "an open {", r"\boxed{} and {}"])
def test_file_without_exactly_one_place_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"prompt\.txt: .*exactly one \{\}"):
        PromptFiles.read(write(tmp_path, text), None)


def test_missing_files_are_named() -> None:
    with pytest.raises(DataError, match=r"prompt_file: file not found: nowhere\.txt"):
        PromptFiles.read("nowhere.txt", None)
    with pytest.raises(DataError, match=r"system_prompt_file: file not found: nowhere\.txt"):
        PromptFiles.read(None, "nowhere.txt")


def test_system_prompt_goes_first_unless_the_conversation_has_one(tmp_path: Path) -> None:
    files = PromptFiles.read(None, write(tmp_path, "Be brief.\n"))
    question = {"role": "user", "content": "Why?"}
    system = {"role": "system", "content": "Be brief."}
    assert files.messages("Why?") == [system, question]
    assert files.messages([question]) == [system, question]
    own = {"role": "system", "content": "Be long."}
    assert files.messages([own, question]) == [own, question]
    assert files.messages("Why?", "Be kind.") == [{"role": "system", "content": "Be kind."}, question]


def test_the_example_prompt_asks_for_steps_and_a_box() -> None:
    file = Path(__file__).parents[3] / "examples" / "prompts" / "cot.txt"
    (message,) = PromptFiles.read(str(file), None).messages(LATEX)
    assert LATEX in message["content"]
    assert r"\boxed{}" in message["content"]
    assert "step by step" in message["content"]
