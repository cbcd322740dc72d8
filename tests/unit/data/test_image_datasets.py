"""CLEVR, Geometry3k and RefCOCO in their published layouts, made small: prompts, answers, and rewards by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from test_image_rows import CHAT
from test_images import encoded

from posttrain.config.data import EnvironmentConfig
from posttrain.config.rewards import NAMED_REWARDS, rewards_of_functions
from posttrain.data import entries
from posttrain.data.datasets import load_example_dataset, load_task_dataset
from posttrain.data.errors import DataError
from posttrain.data.named_datasets import RESPONSE_DATASETS, find_spec
from posttrain.environments.item import ScoringItem, Unscored
from posttrain.environments.reward_types import worker_scorer
from posttrain.environments.text_rewards import overlap

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def load(name: str, path: Path, **settings: Any) -> Any:
    entry = {"dataset_name": name, "data_path": str(path), **settings}
    return load_task_dataset(entry, None, CHAT, max_prompt_tokens=None, seed=0)


def stored(content: bytes) -> dict[str, Any]:
    return {"bytes": content, "path": "0.png"}


def content(task: Any) -> list[Any]:
    return [part.get("text", part["type"]) for part in task.messages[-1]["content"]]


def test_clevr(tmp_path: Path) -> None:
    rows = {
        "image": pa.array([stored(encoded()), stored(encoded((9, 9)))], IMAGE),
        "problem": ["How many cubes are there?", "Is the cube red?"],
        "solution": ["<answer> 3 </answer>", "<answer>yes</answer>"],
    }
    parquet.write_table(pa.table(rows), tmp_path / "train-00000-of-00001.parquet")
    first, second = load("clevr", tmp_path)
    assert content(first) == ["image", "How many cubes are there?"]
    assert (first.reference, second.reference) == ("3", "yes")
    entry = {"dataset_name": "clevr-cogent", "data_path": str(tmp_path)}
    learnt = load_example_dataset(entry, None, CHAT, max_total_tokens=999, only_unmask_final=False, seed=0)
    assert CHAT.tokenizer.decode(learnt[0].response_ids).startswith("3")
    assert len(learnt[0].images) == 1


def test_splits_of_clevr_are_datasets_of_their_own_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(entries, "read_hub", lambda *arguments: asked.append(arguments) or iter(()))
    known = find_spec("clevr", RESPONSE_DATASETS)
    for split in (None, "valA", "valB"):
        list(entries.Entry(dataset_name="clevr", split=split).rows(known))
    names = [(name.removeprefix("MMInstruction/Clevr_CoGenT_"), split) for name, _, split, _ in asked]
    assert names == [("TrainA_70K_Complex", "train"), ("ValA", "train"), ("ValB", "train")]


def test_geometry3k(tmp_path: Path) -> None:
    rows = {
        "images": pa.array([[stored(encoded())]], pa.list_(IMAGE)),
        "problem": ["<image>Find x."],
        "answer": ["3 \\sqrt { 2 }"],
    }
    parquet.write_table(pa.table(rows), tmp_path / "train-00000-of-00001.parquet")
    [task] = load("geometry3k", tmp_path)
    assert content(task) == ["image", "Find x."]
    assert task.reference == "3 \\sqrt { 2 }"


def test_refcoco(tmp_path: Path) -> None:
    folder = tmp_path / "coco_images" / "train2014"
    folder.mkdir(parents=True)
    file = io.BytesIO()
    Image.new("RGB", (400, 200)).save(file, "JPEG")
    (folder / "COCO_1.jpg").write_bytes(file.getvalue())
    rows = {
        "image_path": ["coco/train2014/COCO_1.jpg"],
        "captions": [["man", "the man on the left"]],
        "bbox": [[100.0, 50.0, 200.0, 150.0]],
        "split": ["train"],
    }
    parquet.write_table(pa.table(rows), tmp_path / "train.parquet")
    [task] = load("refcoco", tmp_path / "train.parquet", image_dir=str(tmp_path / "coco_images"))
    assert content(task)[0] == "image"
    assert content(task)[1].endswith("this phrase describes: the man on the left")
    assert task.reference == "[250, 250, 500, 750]"
    with pytest.raises(DataError, match=r"row 1: .*'train2014/COCO_1.jpg' not found in"):
        load("refcoco", tmp_path / "train.parquet")


# -- rewards -----------------------------------------------------------------------------------------------------------


def scored(config: EnvironmentConfig, name: str, response: str, reference: object) -> dict[str, float]:
    found = {}
    for part, reward in config.reward_configs(name).items():
        item = ScoringItem("", response, reference)
        score = worker_scorer(reward.model_dump(mode="json", by_alias=True))
        found[part] = reward.weight * score(item)  # type: ignore[operator]
    return found


TALK = "<think>two and one</think> <answer> {} </answer>"


@pytest.mark.parametrize(
    ("name", "response", "reference", "total"),
    [
        ("clevr-cogent", TALK.format("3"), "3", 1.0),
        ("clevr-cogent", TALK.format("Yes."), "yes", 1.0),
        ("clevr-cogent", TALK.format("4"), "3", 0.2),
        ("clevr-cogent", "<answer>3</answer>", "3", 0.8 + 0.2 * 0.75),
        ("clevr-cogent", "3", "3", 0.0),
        ("geometry3k", TALK.format("$3\\sqrt{2}$"), "3 \\sqrt { 2 }", 1.0),
        ("geometry3k", TALK.format("\\boxed{\\sqrt{18}}"), "3 \\sqrt { 2 }", 1.0),
        ("geometry3k", TALK.format("4"), "3 \\sqrt { 2 }", 0.1),
        ("geometry3k", "\\boxed{5}", "5", 0.0),
        ("refcoco", TALK.format("[0, 0, 10, 10]"), "[0, 0, 10, 10]", 1.0),
        # Half of the box: IoU 1/2, which is not below the threshold.
        ("refcoco", TALK.format("[0, 0, 10, 5]"), "[0, 0, 10, 10]", 0.1 + 0.9 * 0.5),
        # Beside it: IoU 0; the hull of 30 x 10 is a third empty, so GIoU is -1/3.
        ("refcoco", TALK.format("[20, 0, 30, 10]"), "[0, 0, 10, 10]", 0.1 - 0.9 / 3),
        ("refcoco", TALK.format("left"), "[0, 0, 10, 10]", 0.1 - 0.9),
    ],
)
def test_rewards_of_the_datasets(name: str, response: str, reference: str, total: float) -> None:
    assert sum(scored(EnvironmentConfig(), name, response, reference).values()) == pytest.approx(total)


def test_functions_of_nemo_rl_are_these_rewards() -> None:
    for name, functions in NAMED_REWARDS.items():
        assert EnvironmentConfig(reward_functions=functions).reward_configs("x") == EnvironmentConfig().reward_configs(
            name
        )
    scaled = rewards_of_functions([{"name": "exact_alnum", "weight": 3}, {"name": "math_expr", "weight": 1}])
    assert [reward["weight"] for reward in scaled.values()] == [0.75, 0.25]
    tagged = rewards_of_functions([{"name": "math_expr", "weight": 1, "kwargs": {"tag": "result"}}])
    assert "<result>" in tagged["math"]["extract"]
    for functions, message in {
        (): "positive sum",
        ("geo3k",): "'geo3k'; format, exact_alnum",
    }.items():
        with pytest.raises(ValueError, match=message):
            EnvironmentConfig(reward_functions=[{"name": one, "weight": 1} for one in functions])
    with pytest.raises(ValueError, match="no argument 'size'"):
        EnvironmentConfig(reward_functions=[{"name": "format", "weight": 1, "kwargs": {"size": 2}}])
    with pytest.raises(ValueError, match="both given"):
        EnvironmentConfig(type="math", reward_functions=NAMED_REWARDS["geometry3k"])


def box_reward(response: str, reference: object = "[0, 0, 4, 4]", **keys: Any) -> float:
    config = EnvironmentConfig.model_validate({"type": "box", **keys}).reward_configs("x")[""]
    score = worker_scorer(config.model_dump(mode="json", by_alias=True))
    return score(ScoringItem("", response, reference))  # type: ignore[return-value]


def test_boxes_by_hand() -> None:
    assert box_reward("[0,0,4,4]") == 1.0
    assert box_reward("(2, 0, 6, 4)") == pytest.approx(8 / 24)
    assert box_reward("first [0, 0, 4, 4], no: [2, 2, 6, 6]") == pytest.approx(4 / 28)
    assert box_reward("[5, 5, 6, 6]") == 0.0
    assert box_reward("[4, 4, 0, 0]") == box_reward("[1, 2, 3]") == box_reward("") == 0.0
    assert box_reward("[2.0, 0, 6.5, 4]", [0, 0, 4, 4]) == pytest.approx(8 / 26)
    assert box_reward("[0, 0, 4, 3]", threshold=0.5) == 1.0
    assert box_reward("[0, 0, 4, 1]", threshold=0.5) == 0.0
    assert box_reward("[0, 0, 4, 1]", giou_below=0.5) == pytest.approx(0.25)  # the hull is the box itself
    assert overlap((0, 0, 1, 1), (9, 9, 10, 10)) == (0.0, pytest.approx(-0.98))
    with pytest.raises(Unscored, match="is not a box"):
        box_reward("[0, 0, 4, 4]", "left")
    with pytest.raises(ValueError, match="takes no giou_below"):
        box_reward("", threshold=0.5, giou_below=0.5)
