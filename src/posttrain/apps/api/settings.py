"""The arguments of the Python functions as overrides of a config: `lr=1e-5` as on the command line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from posttrain.apps.api.inputs import Inputs, name_of
from posttrain.data.columns import REFERENCE_COLUMNS, columns_of, first_row, named_columns
from posttrain.errors import InputError
from posttrain.files.json_files import JsonMapping, JsonObject

if TYPE_CHECKING:
    import datasets

    from posttrain.config import LoadedConfig

    # A file or folder, a dataset by name, rows, or a map with the keys of a dataset in the config.
    Data: TypeAlias = str | Path | Iterable[JsonMapping] | datasets.Dataset | JsonMapping
    # A function, `file.py:name`, a type of reward, a map with the keys of a reward, or several: a list, or a map of
    # names.
    Reward: TypeAlias = Callable[..., object] | str | JsonMapping | Sequence[object]
    # A YAML file, or settings by their dotted keys or nested.
    Config: TypeAlias = str | Path | JsonMapping

ENVIRONMENT = "reward"  # the key under `env` of what is given as reward=


def overrides_of(settings: Mapping[str, object]) -> list[str]:
    return [f"{key}={_text(value, key)}" for key, value in settings.items()]


def loaded_config(
    kind: str, config: Config | None, overrides: Sequence[str]
) -> Callable[[Sequence[str]], LoadedConfig[Any]]:
    """The config from a file or from settings, with overrides; a function of further ones."""
    from posttrain.config import load_config
    from posttrain.config.base import ConfigError
    from posttrain.config.tree import COMMAND_LINE

    path = Path(config) if isinstance(config, str | Path) else None
    words = [*overrides_of(config), *overrides] if isinstance(config, Mapping) else list(overrides)

    def load(extra: Sequence[str]) -> LoadedConfig[Any]:
        try:
            return load_config(kind, path, [*words, *extra])
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{COMMAND_LINE}: ", "")) from error

    return load


def _text(value: object, key: str) -> str:
    """A value as the YAML that the config reads: JSON, but for what JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except TypeError as error:
        raise InputError(f"{key} = {value!r:.100}: a number, text, list or map is needed ({error})") from error


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if callable(getattr(value, "item", None)):  # a number of numpy or torch
        return value.item()  # type: ignore[attr-defined]
    raise TypeError(f"{type(value).__name__} has no place in a config")


# ------------------------------------------------------------------------------------------------------------ data


def dataset_block(
    kind: str, name: str, data: Data, inputs: Inputs, reward: Reward | None = None
) -> tuple[JsonObject, JsonMapping]:
    """The section `data.train` or `data.validation`, chosen by `name`, and the first row if it is known."""
    from posttrain.config.command_line import file_dataset
    from posttrain.data.named_datasets import PREFERENCE_DATASETS, RESPONSE_DATASETS, find_spec

    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return dict(data), {}
    own_rows = file_dataset(kind)
    if isinstance(data, str | Path):
        path = str(data)
        found = find_spec(path, PREFERENCE_DATASETS if own_rows == "PreferenceDataset" else RESPONSE_DATASETS)
        if isinstance(data, str) and found is not None and not Path(path).exists():
            return {"dataset_name": path}, {}
        found_row = first_row(path)
        first = found_row.values if found_row is not None else {}
    else:
        rows = rows_of(data, name)
        first = next(iter(rows), {})
        path = inputs.add_rows(name, rows)
    columns = _columns(kind, first, reward)
    if any(columns.values()):
        print(named_columns(f"data.{name}", columns), file=sys.stderr)
    return {"dataset_name": own_rows, "data_path": path, **columns}, first


def rows_of(data: Any, name: str) -> Sequence[JsonMapping]:
    if type(data).__name__ == "DatasetDict":
        raise InputError(
            f"{name}: a DatasetDict with the splits {', '.join(data)} is given; choose one, such as data['train']"
        )
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a DataFrame
        return data.to_dict("records")
    return data if hasattr(data, "__getitem__") else list(data)


def _columns(kind: str, row: Mapping[str, object], reward: Reward | None) -> dict[str, str]:
    """Which column is the prompt and which the answer, where the rows do not have the config's own names."""
    found = columns_of(kind, row) if isinstance(row, Mapping) else {}
    functions = list(_callables(reward))
    has_answer = any(column in row for column in REFERENCE_COLUMNS)
    if kind == "grpo" and functions and (not has_answer or any(map(_takes_batches, functions))):
        found["output_key"] = ""  # the columns go to the function under their own names
    return found


# ---------------------------------------------------------------------------------------------------------- rewards


def environment_block(reward: Reward, inputs: Inputs, *, as_messages: bool) -> JsonObject:
    """The section `env.reward`. `as_messages` is for functions with TRL's signature."""
    if isinstance(reward, Mapping) and not {"type", "function", "rewards"} & set(reward):
        named = dict(reward)
    elif isinstance(reward, Sequence) and not isinstance(reward, str):
        named = {}
        for index, one in enumerate(reward, start=1):
            name = name_of(one) if callable(one) else f"reward_{index}"
            named[name if name not in named else f"{name}_{index}"] = one
    else:
        return _one_reward(reward, inputs, as_messages)
    if not named:
        raise InputError("reward is empty: at least one is needed")
    blocks = {name: _one_reward(one, inputs, as_messages) for name, one in named.items()}
    return {"rewards": {name: {"type": "python", **one} if "function" in one else one for name, one in blocks.items()}}


def _one_reward(reward: object, inputs: Inputs, as_messages: bool) -> JsonObject:
    from posttrain.config.rewards import REWARD_TYPES

    if callable(reward):
        reward = {"function": reward}
    if isinstance(reward, Mapping):
        function = reward.get("function")
        if not callable(function):
            return dict(reward)
        style = {"as_messages": True} if as_messages and _takes_batches(function) else {}
        return {**style, **reward, "function": inputs.add_function(function)}
    if isinstance(reward, str) and reward in REWARD_TYPES:
        return {"type": reward}
    if isinstance(reward, str) and {":", "."} & set(reward):
        return {"function": reward}
    raise InputError(
        f"reward is {reward!r:.100}: a function, 'file.py:name', a map of settings or a type is needed; the types: "
        f"{', '.join(REWARD_TYPES)}"
    )


def _callables(reward: object) -> Iterator[Callable[..., Any]]:
    if callable(reward):
        yield reward
    elif isinstance(reward, Mapping):
        for one in reward.values():
            yield from _callables(one)
    elif isinstance(reward, Sequence) and not isinstance(reward, str):
        for one in reward:
            yield from _callables(one)


def _takes_batches(function: Callable[..., object]) -> bool:
    from posttrain.environments.python_function import takes_batches

    return takes_batches(function)
