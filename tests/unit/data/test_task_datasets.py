"""Tasks: the question in the prompt, the answer as the reference, over-long prompts counted, splits without leaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, byte_tokenizer

from posttrain.config import DatasetConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import TaskDataset, load_task_dataset
from posttrain.data.errors import DataError
from posttrain.data.readers import NO_REFERENCE
from posttrain.environments.item import ScoringItem
from posttrain.environments.python_function import load_scorer

CHAT = ChatFormat(byte_tokenizer(CHATML))
SHARED = Path(__file__).parents[3].parent / "shared" / "data"


def write(file: Path, records: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def numbered(file: Path, count: int) -> str:
    return write(file, [{"input": f"{index}+0?", "output": str(index)} for index in range(count)])


def load(entries: Any, defaults: Any = None, limit: int | None = None, seed: int = 0) -> TaskDataset:
    return load_task_dataset(entries, defaults, CHAT, max_prompt_tokens=limit, seed=seed)


def references(tasks: TaskDataset) -> list[Any]:
    return [task.reference for task in tasks]


def test_task_holds_prompt_tokens_reference_and_conversation(tmp_path: Path) -> None:
    tasks = load({"dataset_name": numbered(tmp_path / "sums.jsonl", 3)})
    task = tasks[2]
    with pytest.raises(IndexError):
        tasks[3]
    assert task.prompt == "<|im_start|>user\n2+0?<|im_end|>\n<|im_start|>assistant\n"
    assert list(task.prompt_ids) == CHAT.prompt(task.messages)[1]
    assert task.messages == ({"role": "user", "content": "2+0?"},)
    assert (task.draw, task.id, task.reference, task.environment) == (2, "sums:2", "2", "math")


def test_defaults_fill_missing_keys_and_a_written_null_stays(tmp_path: Path) -> None:
    template = tmp_path / "t.txt"
    template.write_text("Q: {}")
    path = numbered(tmp_path / "a.jsonl", 1)
    defaults = {"prompt_file": str(template), "env_name": "sums"}
    task = load({"data_path": path}, defaults)[0]
    assert task.messages[0]["content"] == "Q: 0+0?"
    assert task.environment == "sums"
    assert load({"data_path": path, "prompt_file": None}, defaults)[0].messages[0]["content"] == "0+0?"
    assert load([DatasetConfig(data_path=path)], DatasetConfig(env_name="code"))[0].environment == "code"


def test_several_entries_are_concatenated_and_a_repeated_one_repeats(tmp_path: Path) -> None:
    first, second = numbered(tmp_path / "a.jsonl", 2), numbered(tmp_path / "b.jsonl", 3)
    tasks = load([{"data_path": first, "repeat": 2, "env_name": "x"}, {"data_path": second}])
    assert [task.id for task in tasks] == ["a:0", "a:1", "a:0", "a:1", "b:0", "b:1", "b:2"]
    assert [task.draw for task in tasks] == list(range(7))
    assert [task.environment for task in tasks][::4] == ["x", "math"]
    assert tasks.name == "a+b"


def test_long_prompts_are_dropped_and_counted_never_cut(tmp_path: Path) -> None:
    records = [{"input": "x" * length, "output": "1"} for length in (1, 50, 2, 60)]
    path = write(tmp_path / "a.jsonl", records)
    frame = len(CHAT.prompt([{"role": "user", "content": ""}])[1])
    tasks = load({"data_path": path}, limit=frame + 50)
    assert [task.messages[0]["content"] for task in tasks] == ["x", "x" * 50, "xx"]
    assert tasks.dropped == {f"prompt longer than {frame + 50} tokens": 1}
    with pytest.raises(DataError, match=r"a: no row is left .prompt longer than 3 tokens: 4"):
        load({"data_path": path}, limit=3)


def test_question_may_be_a_conversation_and_all_other_columns_are_metadata(tmp_path: Path) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes?"), ("user", "2?"))]
    path = write(tmp_path / "a.jsonl", [{"input": turns, "output": "4", "level": 3, "tags": ["x"]}])
    [task] = load({"data_path": path})
    assert list(task.messages) == turns
    assert task.metadata == {"output": "4", "level": 3, "tags": ["x"]}


def test_a_reward_with_trls_signature_finds_the_answer_under_the_name_of_its_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1 + 1?", "answer": "2"}])
    task = load({"data_path": path, "input_key": "prompt", "output_key": "answer"})[0]
    (tmp_path / "rewards.py").write_text(
        "def right(completions, answer, **columns):\n    return [completions == answer]\n"
    )
    score = load_scorer("rewards.py:right", tmp_path)
    assert score(ScoringItem(task.prompt, "2", task.reference, metadata=dict(task.metadata))) is True


def test_rows_with_an_empty_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": "1", "output": ""}, {"input": "2", "output": "2"}])
    tasks = load({"data_path": path})
    assert references(tasks) == ["2"]
    assert tasks.dropped == {NO_REFERENCE: 1}


def test_reference_may_be_absent_with_an_empty_output_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": "write a poem"}])
    assert load({"data_path": path, "output_key": ""})[0].reference is None
    with pytest.raises(DataError, match="row 1: no key 'output'"):
        load({"data_path": path})


def test_missing_key_in_a_later_row_is_located(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": "1", "output": "1"}, {"question": "2", "output": "2"}])
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: no key 'input'"):
        load({"data_path": path})


def test_chat_template_that_refuses_a_row_is_located(tmp_path: Path) -> None:
    refuse = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = "{% for m in messages %}" + refuse + "{{ m.content }}{% endfor %}"
    path = write(
        tmp_path / "a.jsonl",
        [{"input": "1", "output": "1"}, {"input": [{"role": "system", "content": "x"}], "output": "1"}],
    )
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: the chat template refuses .*\[system\]: no system"):
        load_task_dataset(
            {"data_path": path}, None, ChatFormat(CHAT.tokenizer, template), max_prompt_tokens=None, seed=0
        )


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({}, "needs `dataset_name`"),
        ({"dataset_name": "gsm8q"}, "unknown dataset 'gsm8q' .did you mean 'gsm8k'.*OpenMathInstruct-2"),
        ({"dataset_name": "ResponseDataset"}, "point `data_path` at a file"),
        ({"dataset_name": "nowhere/x.jsonl"}, "not found: nowhere/x.jsonl"),
        ({"data_path": "x.jsonl", "repeat": 0}, "repeat is 0: must be greater"),
        ({"data_path": "x.jsonl", "prompt_fil": "y"}, "unknown dataset key 'prompt_fil' .did you mean 'prompt_file'"),
        ([], "list of datasets is empty"),
        (None, "no dataset is named"),
        (["gsm8k"], "described by keys"),
    ],
)
def test_entry_that_makes_no_sense_is_refused(entry: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        load(entry)


def test_fingerprint_is_of_the_content_and_its_order(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 3)
    same = numbered(tmp_path / "other_name.jsonl", 3)
    longer = numbered(tmp_path / "c.jsonl", 4)
    answers = write(tmp_path / "d.jsonl", [{"input": f"{index}+0?", "output": "9"} for index in range(3)])
    print_of = {file: load({"data_path": file}).fingerprint for file in (path, same, longer, answers)}
    assert print_of[path] == print_of[same]
    assert len(set(print_of.values())) == 3
    assert load({"data_path": path, "repeat": 2}).fingerprint not in print_of.values()


@pytest.mark.parametrize(("size", "expected"), [(0.25, 5), (7, 7), (1, 1), (0.001, 1)])
def test_split_takes_a_share_or_a_number_of_rows(tmp_path: Path, size: float, expected: int) -> None:
    path = numbered(tmp_path / "a.jsonl", 20)
    tasks, (train, validation) = load({"data_path": path}), split(path, size, seed=3)
    assert len(validation) == expected
    assert sorted(references(train) + references(validation)) == sorted(references(tasks))
    assert [task.draw for task in validation] == list(range(expected))
    assert references(split(path, size, seed=3)[1]) == references(validation)
    assert references(split(path, 10, seed=1)[1]) != references(split(path, 10, seed=2)[1])


def split(path: str, size: float, seed: int, repeat: int = 1) -> tuple[TaskDataset, TaskDataset]:
    entry = {"data_path": path, "split_validation_size": size, "seed": seed, "repeat": repeat}
    train, validation = load(entry).held_out()
    assert validation is not None
    return train, validation


def test_split_never_puts_equal_rows_on_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": f"{index % 10}?", "output": str(index % 10)} for index in range(30)])
    train, validation = split(path, 3, seed=0, repeat=2)
    assert len(validation) == 3
    assert len(train) == 60 - 3 * 6
    assert not set(references(train)) & set(references(validation))


@pytest.mark.parametrize("size", [20, 25, 0.99])
def test_split_that_leaves_nothing_is_refused(tmp_path: Path, size: float) -> None:
    path = numbered(tmp_path / "a.jsonl", 20)
    with pytest.raises(DataError, match="leaves nothing to train on"):
        split(path, size, seed=0)


def test_each_entry_holds_out_its_own_share(tmp_path: Path) -> None:
    first = numbered(tmp_path / "a.jsonl", 10)
    second = write(tmp_path / "b.jsonl", [{"input": f"b{index}", "output": f"b{index}"} for index in range(10)])
    train, validation = load([{"data_path": first, "split_validation_size": 0.3}, {"data_path": second}]).held_out()
    assert validation is not None
    assert len(validation) == 3
    assert not any(reference.startswith("b") for reference in references(validation))
    assert len(train) == 17
    assert load({"data_path": second}).held_out()[1] is None


@pytest.mark.parametrize(
    ("name", "path", "rows", "first_answer"),
    [
        ("gsm8k", "gsm8k/train.jsonl.gz", 7473, "72"),
        ("GSM8K", "gsm8k/test.jsonl", 1055, "18"),
        ("math500", "math/math500_test.jsonl", 400, r"\left( 3, \frac{\pi}{2} \right)"),
        ("MATH-500", "math", 400, r"\left( 3, \frac{\pi}{2} \right)"),
        ("math_500", "math/math_train.jsonl.gz", 7472, "0"),  # two rows have an empty answer
        ("AIME2024", "competition/aime24.jsonl", 30, "204"),
        ("aime24", "competition/aime24.jsonl", 30, "204"),
        ("aime2025", "competition/aime25.jsonl", 30, "70"),
        ("amc23", "competition/amc23.jsonl", 40, "27"),
        ("DeepScaler", "deepscaler", 2889, r"\frac{3}{7}"),
        ("agentica-org/DeepScaleR-Preview-Dataset", "deepscaler/train.jsonl.gz", 2889, r"\frac{3}{7}"),
    ],
)
def test_known_datasets_load_from_local_files(name: str, path: str, rows: int, first_answer: str) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"the shared data is not here: {SHARED}")
    tasks = load({"dataset_name": name, "data_path": str(SHARED / path)})
    assert len(tasks) == rows
    assert tasks[0].reference == first_answer
    assert all(isinstance(task.reference, str) and task.reference for task in tasks)


def test_own_keys_read_a_file_that_has_no_name_here() -> None:
    file = SHARED / "competition" / "olympiadbench_en_math.jsonl"
    if not file.is_file():
        pytest.skip(f"the shared data is not here: {SHARED}")
    tasks = load(
        {"dataset_name": "ResponseDataset", "data_path": str(file), "input_key": "problem", "output_key": "answers"}
    )
    assert tasks[0].reference == "2"
    assert len(tasks) == 675


def test_gsm8k_answer_is_what_follows_the_hashes(tmp_path: Path) -> None:
    rows = [
        {"question": "?", "answer": "1000+234\n#### 1,234"},
        {"question": "?", "answer": "x #### 7", "final_answer": "8"},
    ]
    entry = {"dataset_name": "gsm8k", "data_path": write(tmp_path / "a.jsonl", rows)}
    assert references(load(entry)) == ["1234", "8"]
    entry["data_path"] = write(tmp_path / "b.jsonl", [{"question": "?", "answer": "1234"}])
    with pytest.raises(DataError, match="row 1: 'answer' has no '####'"):
        load(entry)


def test_openmathinstruct_dapo_and_squad_rows_are_understood(tmp_path: Path) -> None:
    openmath = write(tmp_path / "o.jsonl", [{"problem": "p", "generated_solution": "s", "expected_answer": "3"}])
    dapo = write(
        tmp_path / "d.jsonl",
        [{"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "34", "style": "rule"}}],
    )
    squad = write(tmp_path / "s.jsonl", [{"context": "c", "question": "q", "answers": {"text": ["yes", "aye"]}}])
    assert references(load({"dataset_name": "OpenMathInstruct-2", "data_path": openmath})) == ["3"]
    assert references(load({"dataset_name": "DAPOMath17K", "data_path": dapo})) == ["34"]
    task = load({"dataset_name": "squad", "data_path": squad})[0]
    assert task.reference == "yes"
    assert list(task.messages) == [{"role": "system", "content": "c"}, {"role": "user", "content": "q"}]
