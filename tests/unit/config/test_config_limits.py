"""What cannot be a config: refused with the reason and the place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from posttrain.config import ConfigError, load_config
from posttrain.config.yaml_files import parse_document, parse_value
from posttrain.files.json_files import without_repeats


def aliases(first: str, line: str, count: int) -> str:
    return f"a0: &a0 {first}\n" + "".join(f"a{i}: &a{i} {line.replace('?', f'*a{i - 1}')}\n" for i in range(1, count))


REFUSED = {
    "lists of aliases": (aliases("[x]", "[?, ?, ?, ?, ?, ?, ?, ?, ?]", 10), "with its aliases"),
    "an alias in itself": ("&a [*a]", "with its aliases"),
    "nesting": ("[" * 200_000, "nested more than 64 deep"),
    "long integer": ("1" * 5000, "integer string conversion"),
    "value that is not of its tag": ("!!bool maybe", "does not fit its tag"),
    "tag of another language": ("!!python/name:os.system x", "the tag .* is not read"),
    "tag of a date": ("!!timestamp 2024-01-01", "the tag !!timestamp is not read"),
    "aliases under one key": (aliases("[x]", "{k: ?, k: ?}", 40), "with its aliases"),
    "key that is a list": ("{? [a]: b}", "keys are names"),
    "key twice": ("{a: 1, a: 2}", "key `a` is set twice"),
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


@pytest.mark.parametrize("pair", ["'${{{0}}}${{{0}}}'", "{{l: '${{{0}}}', r: '${{{0}}}'}}", "['${{{0}}}', '${{{0}}}']"])
@pytest.mark.parametrize("place", [".", "logger.wandb."])
def test_references_that_double_are_refused_before_they_fill_the_memory(tmp_path: Path, pair: str, place: str) -> None:
    up = ".." if place == "." and pair.startswith(("{", "[")) else place
    lines = [f"    a{i}: {pair.format(f'{up}a{i - 1}')}\n" for i in range(1, 40)]
    (tmp_path / "x.yaml").write_text("logger:\n  wandb:\n    a0: xxxxxxxx\n" + "".join(lines))
    with pytest.raises(ConfigError, match=r"x\.yaml:\d+: `logger\.wandb\.a\d+.*longer than"):
        load_config("grpo", tmp_path / "x.yaml")


def test_references_in_a_circle_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"logger\.wandb\.name.*Recursive interpolation"):
        load_config("grpo", None, ["logger.wandb.name='${logger.wandb.entity}'", "logger.wandb.entity='${.name}'"])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("cluster.num_nodes=1e9", "cluster.num_nodes.*10000"),
        ("cluster.gpus_per_node=1000000000", "cluster.gpus_per_node.*1000"),
        ("grpo.seed=1e300", "must be a valid integer|within"),
        ("grpo.seed='${mul:9223372036854775807,9}'", "at most 64 bits"),
        ("loss_fn.reference_policy_kl_penalty=1e308", r"within ±1e\+30"),
        ("grpo.reward_scaling.target_max=-1e308", r"within ±1e\+30"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("grpo", None, [override])


def test_the_keys_of_a_large_map_are_compared_in_linear_time() -> None:
    """A map of 20,000 keys, compared one by one, took a minute."""
    text = "".join(f"k{number}: 1\n" for number in range(15_000))
    before = time.process_time()
    with pytest.raises(ConfigError, match="`k14999` is set twice"):
        parse_document(f"{text}k14999: 2\n", "x.yaml")
    pairs: list[tuple[str, object]] = [(f"k{number}", 1) for number in range(15_000)]
    with pytest.raises(ValueError, match="'k14999' is set twice"):
        without_repeats([*pairs, pairs[-1]])
    assert time.process_time() - before < 10
