"""What the Python functions make of their arguments: files, overrides and sections of a config."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import datasets
import pytest

from posttrain.apps.api.inputs import Inputs, importable_name, pickled
from posttrain.apps.api.settings import dataset_block, environment_block, loaded_config, overrides_of
from posttrain.config import ConfigError, load_config
from posttrain.config.changes import changes_since
from posttrain.data.columns import has_conversations
from posttrain.environments.python_function import load_function
from posttrain.errors import InputError


@pytest.fixture
def inputs() -> Any:
    made = Inputs("FOLDER")
    yield made
    made.close()


def at_module_level(response: str) -> float:
    return float(len(response))


def test_values_of_python_reach_the_config_as_they_are() -> None:
    settings = {"lr": 1e-5, "lora": 16, "steps": 3, "policy.precision": "float32", "data": {"shuffle": False}}
    config = loaded_config("grpo", {"policy": {"model_name": 'it\'s: "mine" #1'}}, overrides_of(settings))([]).config
    assert config.policy.optimizer.kwargs["lr"] == 1e-5
    assert config.policy.dtensor_cfg.lora_cfg.dim == 16
    assert config.grpo.max_num_steps == 3
    assert (config.policy.precision, config.data.shuffle) == ("float32", False)
    assert config.policy.model_name == 'it\'s: "mine" #1'


def test_an_error_in_a_setting_names_it() -> None:
    with pytest.raises(ConfigError, match="learning"):
        loaded_config("grpo", None, overrides_of({"learning": 1}))([])
    with pytest.raises(ConfigError, match=r"policy\.model_name=…"):
        loaded_config("grpo", {"policy.model_name": "???"}, [])([])
    with pytest.raises(InputError, match=r"policy\.precision"):
        overrides_of({"policy.precision": object()})


@pytest.mark.parametrize(
    ("kind", "row", "keys"),
    [
        ("grpo", {"input": "a", "output": "b"}, {}),
        ("grpo", {"prompt": "a", "answer": "b"}, {"input_key": "prompt", "output_key": "answer"}),
        ("sft", {"prompt": "a", "completion": "b"}, {"input_key": "prompt", "output_key": "completion"}),
        ("sft", {"messages": []}, {}),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, {}),
    ],
)
def test_columns_of_rows_are_found_by_their_usual_names(
    kind: str, row: dict[str, Any], keys: dict[str, str], inputs: Inputs, tmp_path: Path
) -> None:
    for data in ([row], datasets.Dataset.from_list([row])):
        block, first = dataset_block(kind, "train", data, inputs)
        assert {key: value for key, value in block.items() if key.endswith("_key")} == keys
        assert dict(first) == row
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    of_file, _ = dataset_block(kind, "train", path, inputs)
    assert of_file == {**block, "data_path": str(path)}


def test_a_function_of_all_columns_needs_no_reference(inputs: Inputs) -> None:
    def scored(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [0.0]

    block, _ = dataset_block("grpo", "train", [{"prompt": "a", "answer": "b"}], inputs, scored)
    assert (block["input_key"], block["output_key"]) == ("prompt", "")
    assert dataset_block("grpo", "train", "gsm8k", inputs)[0] == {"dataset_name": "gsm8k"}


def test_rows_that_cannot_be_used_are_named(inputs: Inputs) -> None:
    with pytest.raises(InputError, match="train, row 2: column 'when'"):
        dataset_block("grpo", "train", [{"input": "a"}, {"input": "b", "when": object()}], inputs)
    with pytest.raises(InputError, match="row 1: a mapping of columns is needed, not str"):
        dataset_block("grpo", "train", ["a"], inputs)
    with pytest.raises(InputError, match="there are no rows"):
        dataset_block("grpo", "train", [], inputs)
    with pytest.raises(InputError, match="choose one, such as"):
        dataset_block("grpo", "train", datasets.DatasetDict({"test": datasets.Dataset.from_list([{"a": 1}])}), inputs)


def test_rewards_become_sections_of_the_environment(inputs: Inputs) -> None:
    def short(response: str) -> float:
        return 1.0 / len(response)

    def batch(completions: list[Any], **columns: Any) -> list[float]:
        return [0.0]

    def block(reward: Any, *, as_messages: bool = False) -> dict[str, Any]:
        found = environment_block(reward, inputs, as_messages=as_messages)
        settings = overrides_of({"env.reward": found, "data.default.env_name": "reward"})
        load_config("grpo", None, settings)  # it is one that the config accepts
        return found

    assert block("math") == {"type": "math"}
    assert block("rewards.py:mine") == {"function": "rewards.py:mine"}
    assert block(at_module_level) == {"function": f"{__name__}:at_module_level"}
    assert block(short)["function"].endswith(".pkl:short")
    assert block(batch, as_messages=True)["as_messages"] is True
    assert "as_messages" not in block(short, as_messages=True)
    several = block([short, "math", short])["rewards"]
    assert list(several) == ["short", "reward_2", "short_3"]
    assert several["reward_2"] == {"type": "math"}
    weighted = block({"brief": {"function": short, "weight": 0.5}, "right": "math"})["rewards"]
    assert (weighted["brief"]["type"], weighted["brief"]["weight"]) == ("python", 0.5)
    for wrong in ("nonsense", 3, []):
        with pytest.raises(InputError, match="reward is"):
            environment_block(wrong, inputs, as_messages=False)


def test_prompts_that_are_messages_are_recognised() -> None:
    assert has_conversations({"prompt": [{"role": "user", "content": "a"}]})
    assert not has_conversations({"prompt": "a"})
    assert not has_conversations({"chosen": ["a"]})


# ------------------------------------------------------------------------------------------------------ functions

SCRIPT = """
BONUS = {bonus}
def helper(text):
    return len(text) {operator} BONUS
def mine(response, reference_answer=None):
    return [helper(word) for word in response.split()]
from posttrain.apps.api.inputs import pickled
print(pickled(mine).digest, pickled(lambda response: {bonus}).stem.rpartition("-")[0])
"""


def digest_of_script(tmp_path: Path, bonus: object, operator: str = "+", hash_seed: str = "0") -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(bonus=bonus, operator=operator))
    source = str(Path(__file__).parents[4] / "src")
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": source}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True)
    digest, name = ended.stdout.split()
    assert name == "lambda"
    return digest


def test_the_digest_of_a_function_changes_with_what_it_computes_and_with_nothing_else(tmp_path: Path) -> None:
    first = digest_of_script(tmp_path, 1)
    assert digest_of_script(tmp_path, 1, hash_seed="7") == first
    assert digest_of_script(tmp_path, 2) != first  # a value it refers to
    assert digest_of_script(tmp_path, 1, operator="-") != first  # a function it calls, from a comprehension


def test_a_closure_is_pickled_with_its_values_and_its_digest_follows_them(tmp_path: Path) -> None:
    def made(bonus: float) -> Any:
        return lambda response: bonus + len(response)

    one, same, other = pickled(made(1.0)), pickled(made(1.0)), pickled(made(2.0))
    assert one.digest == same.digest != other.digest
    (tmp_path / "mine.pkl").write_bytes(other.content)
    assert load_function("mine.pkl:lambda", tmp_path)("abc") == 5.0


def test_a_function_that_cannot_be_sent_is_refused_with_the_remedy() -> None:
    lock = threading.Lock()
    with pytest.raises(InputError, match="Create that inside the function"):
        pickled(lambda response: lock.locked())


def test_only_functions_that_others_can_import_go_by_name() -> None:
    assert importable_name(at_module_level) == f"{__name__}:at_module_level"
    assert importable_name(lambda: 0) is None
    assert importable_name(json.dumps) == "json:dumps"
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent("def inside(): return 1"), made)
    assert importable_name(made["inside"]) is None
    assert cloudpickle.loads(pickled(made["inside"]).content)() == 1


def test_inputs_of_equal_content_are_equal_settings_in_any_folder(inputs: Inputs, tmp_path: Path) -> None:
    def loaded(folder: str, rows: list[dict[str, Any]]) -> Any:
        staged = Inputs("${checkpointing.checkpoint_dir}")
        block, _ = dataset_block("grpo", "train", rows, staged)
        settings = {"data.train": block, "checkpointing.checkpoint_dir": str(tmp_path / folder)}
        found = load_config("grpo", None, overrides_of(settings))
        staged.write(tmp_path / folder)
        staged.close()
        return found

    row = {"input": "x", "output": "y"}
    first, elsewhere, other = loaded("a", [row]), loaded("b", [row]), loaded("a", [{**row, "input": "z"}])

    def training(old: Any, new: Any) -> list[str]:
        return [change.key for change in changes_since(old.to_yaml(), new) if change.is_training]

    assert training(first, elsewhere) == []
    assert training(first, other) == ["data.train.data_path"]
    assert [path.name for path in (tmp_path / "a" / "inputs").iterdir() if path.suffix != ".jsonl"] == []
