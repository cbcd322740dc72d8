"""Configs that would take gigabytes or hours are refused at once, with the reason and the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import ConfigError, load_config
from posttrain.config.yaml_files import parse_document, parse_value


def aliases(first: str, line: str, count: int) -> str:
    return f"a0: &a0 {first}\n" + "".join(f"a{i}: &a{i} {line.replace('?', f'*a{i - 1}')}\n" for i in range(1, count))


REFUSED = {
    "lists of aliases": (aliases("[x]", "[?, ?, ?, ?, ?, ?, ?, ?, ?]", 10), "values, or 64 levels, with its aliases"),
    "merges of aliases": (aliases("{x: 1}", "{<<: [?, ?, ?]}", 20), "values, or 64 levels, with its aliases"),
    "aliases in aliases": (aliases("[x]", "[?]", 3000), "values, or 64 levels, with its aliases"),
    "an alias in itself": ("&a [*a]", "an alias contains itself"),
    "flow nesting": ("[" * 200_000, "nested more than 64 deep"),
    "block nesting": ("- " * 200_000, "nested more than 64 deep"),
    "many values": ("[" + "a, " * 50_000 + "]", "more than 20000 values"),
    "long integer": ("1" * 5000, "beyond 64 bits"),
    "large integer": ("9223372036854775808", "beyond 64 bits"),
    "tag": ("!!timestamp x", "the tag !!timestamp is not read"),
    "value that is not of its tag": ("!!bool maybe", "does not fit its tag"),
    "key that is a list": ("{? [a]: b}", "a key is a list or a map"),
    "NUL": ('"a\\0b"', "NUL"),
    "half a character": ("\udc80", "surrogates not allowed"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_values_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_value(text)
    with pytest.raises(ConfigError, match=f"x.yaml: not valid YAML: .*{reason}"):
        parse_document(text, "x.yaml")
    with pytest.raises(ConfigError, match=f"command line: the value of 'grpo.seed=.*{reason}"):
        load_config("grpo", None, [f"grpo.seed={text}"])


def test_aliases_of_an_ordinary_size_are_read() -> None:
    assert parse_value("{a: &a [1, 2], b: *a, c: {<<: {d: 3}}}") == {"a": [1, 2], "b": [1, 2], "c": {"d": 3}}


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: cannot be read: more than 1 MiB"):
        load_config("grpo", Path("/dev/zero"))


def test_a_file_that_many_files_inherit_from_is_read_once(tmp_path: Path) -> None:
    for i in range(16):
        (tmp_path / f"{i}.yaml").write_text(f"defaults: [{', '.join([f'{i + 1}.yaml'] * 4)}]\n")
    (tmp_path / "16.yaml").write_text("grpo: {seed: 7}\n")
    assert load_config("grpo", tmp_path / "0.yaml").config.grpo.seed == 7


def test_a_long_chain_of_defaults_is_refused(tmp_path: Path) -> None:
    for i in range(80):
        (tmp_path / f"{i}.yaml").write_text(f"defaults: {i + 1}.yaml\n")
    with pytest.raises(ConfigError, match="`defaults:` of more than 64 files"):
        load_config("grpo", tmp_path / "0.yaml")


@pytest.mark.parametrize(
    "line", ["${.a?}${.a?}", "${logger.wandb.a?}${logger.wandb.a?}", "${oc.select:.a?}${oc.select:.a?}"]
)
def test_references_that_double_are_refused(line: str, tmp_path: Path) -> None:
    keys = "".join(f"    a{i}: '{line.replace('?', str(i - 1))}'\n" for i in range(1, 40))
    file = tmp_path / "x.yaml"
    file.write_text(f"logger:\n  wandb:\n    a0: xxxxxxxx\n{keys}")
    with pytest.raises(ConfigError, match="comes to more than 100000 characters"):
        load_config("grpo", file)


@pytest.mark.parametrize("text", ["${" * 3000, "${a:" * 90, "${a" + ".x" * 20_000 + "}"])
def test_references_nested_without_end_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"references|cannot be resolved"):
        load_config("grpo", None, [f"logger.wandb.name='{text}'"])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("grpo.seed=1e300", "must be a valid integer|within"),
        ("grpo.seed='${mul:9223372036854775807,9}'", "at most 64 bits"),
        ("loss_fn.reference_policy_kl_penalty=1e308", r"within ±1e\+30"),
        ("grpo.reward_scaling.target_max=-1e308", r"within ±1e\+30"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("grpo", None, [override])
