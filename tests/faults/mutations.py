"""Mutated configs, overrides and rows of data, and whether they are nonsense for certain.

Nonsense must be refused. What only may be nonsense (a byte changed somewhere) must be refused or used, without a
traceback.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tiny_runs

FILE = "FILE"  # stands for the path of the only file, in arguments


@dataclass(frozen=True)
class Input:
    """A command with its files, by name. `nonsense`: exit code 0 would be a mistake."""

    arguments: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    nonsense: bool = False


# -- configs and overrides ---------------------------------------------------------------------------------------------

KINDS = ("grpo", "dpo", "rm", "sft", "eval")
# Sections whose keys are another library's or the user's own.
FREE_SECTIONS = (
    "kwargs",
    "reward_model_cfg",
    "env.",
    "logger.",
    "scheduler",
    "chat_template_kwargs",
    "defaults",
    "preset",
    "data.",
)
WORDS = ("nonsense words", "{a: 1}", "[1, 2]", "{}", "''", "2026-01-01", "0x", "1 2", "--", "tru", "[[[]]]")
NUMBERS = (
    ".nan",
    ".inf",
    "-.inf",
    "1e400",
    "9" * 400,
    "9" * 5000,
    "-1",
    "0",
    "1e-320",
    "1_0",
    "0b1",
    "1:30",
    "٣",
    "1.5e",
)
# Each of these, as a config of grpo, says something that is no config.
NONSENSE_YAML = (
    "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9) if n else 'x'}]\n" for n in range(12)),
    "grpo: &g {x: *g}\n",
    "when: !!timestamp x\n",
    "x: !!python/object/apply:os.system [id]\n",
    "{? [a]: b}\n",
    "[" * 5000,
    "{" * 5000,
    "- 1\n- 2\n",
    "42\n",
    "1: 2\n",
    "grpo: []\n",
    "grpo: 7\n",
    "grpo: {1: 2}\n",
    "data: {train: 7}\n",
    "env: {a: 1}\n",
)
# These may be refused or mean something.
HOSTILE_YAML = (
    "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n",
    "x: !!binary '****'\n",
    "? {a: b}\n: c\n",
    "- " * 5000 + "\n",
    "%YAML 9.9\n---\n",
    "---\na: 1\n---\nb: 2\n",
    "\x00\n",
    "\ufeffgrpo: {}\n",
    "grpo:\n\tseed: 1\n",
    "<<: [1, 2]\n",
    "<<: *nothing\n",
    "grpo: {seed: ${grpo.seed}}\n",
    "grpo: {seed: ${oc.env:NO_SUCH_VARIABLE}}\n",
    "grpo: {seed: ${oc.decode:'${grpo.seed}'}}\n",
    "grpo: ${grpo}\n",
    "defaults: [a, a, a]\n",
    "defaults: FILE\n",
    "grpo.seed: 1\ngrpo: {seed: 2}\n",
    "null\n",
    "true: false\n",
    "grpo: null\n",
    "policy: {optimizer: {kwargs: 3}}\n",
    "data: {train: [{}]}\n",
    "data: {train: [[]]}\n",
    "env: {math: {type: no_such_reward}}\n",
    "env: {x: {rewards: {a: {type: math, weight: .nan}}}}\n",
    "env: {x: {rewards: {}}}\n",
    "cluster: {num_nodes: 1e9}\n",
)
SYNTAX = "=.+~{}[]$:&*!|>'\"%@`\\#,-? \t\n\x00éß\u2028😀0123456789aegmnoprs"


class Configs:
    """`defaults`: of each kind, every key with its value."""

    def __init__(self) -> None:
        from posttrain.config import load_config

        self.defaults = {kind: load_config(kind, None, []).flat() for kind in KINDS}  # type: ignore[arg-type]

    def draw(self, chance: random.Random) -> Input:
        return chance.choice(
            [
                self.unknown_key,
                self.wrong_type,
                self.wrong_type,
                self.number,
                self.broken_word,
                self.hostile,
                self.bytes_,
            ]
        )(chance)

    def _check(self, kind: str, *words: str, nonsense: bool, text: str | bytes | None = None) -> Input:
        if text is None:
            return Input(("config", "check", kind, *words), {}, nonsense)
        content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return Input(("config", "check", kind, "--config", FILE, *words), {"c.yaml": content}, nonsense)

    def _key(self, chance: random.Random, kind: str, types: tuple[type, ...]) -> str:
        keys = [
            key
            for key, value in self.defaults[kind].items()
            if type(value) in types and not any(free in f"{key}." for free in FREE_SECTIONS)
        ]
        return chance.choice(keys)

    def _set(self, chance: random.Random, kind: str, key: str, value: str, nonsense: bool) -> Input:
        """As an override, or in a file."""
        if chance.random() < 0.5:
            return self._check(kind, f"{key}={value}", nonsense=nonsense)
        *sections, name = key.split(".")
        text = "".join(f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections))
        return self._check(kind, text=f"{text}{'  ' * len(sections)}{name}: {value}\n", nonsense=nonsense)

    def unknown_key(self, chance: random.Random) -> Input:
        kind = chance.choice(KINDS)
        key = self._key(chance, kind, (int, float, bool, str))
        *sections, name = key.split(".")
        place = chance.randrange(len(name) + 1)
        wrong = ".".join([*sections, name[:place] + chance.choice("qxz") + name[place:]])
        return self._set(chance, kind, wrong, "1", nonsense=wrong not in self.defaults[kind])

    def wrong_type(self, chance: random.Random) -> Input:
        kind = chance.choice(KINDS)
        return self._set(chance, kind, self._key(chance, kind, (int, float, bool)), chance.choice(WORDS), nonsense=True)

    def number(self, chance: random.Random) -> Input:
        kind, value = chance.choice(KINDS), chance.choice(NUMBERS)
        return self._set(chance, kind, self._key(chance, kind, (int, float)), value, nonsense=value == ".nan")

    def broken_word(self, chance: random.Random) -> Input:
        kind = chance.choice(KINDS)
        word = list(f"{chance.choice(list(self.defaults[kind]))}={chance.choice([*WORDS, *NUMBERS])}")
        for _ in range(chance.randrange(1, 6)):
            word.insert(chance.randrange(len(word) + 1), chance.choice(SYNTAX))
        text = "".join(word).replace("\x00", "")  # no command line can have it
        return self._check(kind, text, nonsense=False)

    def hostile(self, chance: random.Random) -> Input:
        if chance.random() < 0.3:
            return self._check("grpo", text=chance.choice(NONSENSE_YAML), nonsense=True)
        mixed = ["grpo:\n  seed: 1\n", chance.choice([*NONSENSE_YAML, *HOSTILE_YAML])]
        chance.shuffle(mixed)
        return self._check(chance.choice(KINDS), text="".join(mixed[: chance.randrange(1, 3)]), nonsense=False)

    def bytes_(self, chance: random.Random) -> Input:
        """A file of a real config with a few bytes changed, removed, doubled or added."""
        kind = chance.choice(KINDS)
        keys = chance.sample(sorted(self.defaults[kind]), 12)
        lines = [f"{key.split('.')[0]}:\n  {'.'.join(key.split('.')[1:]) or 'x'}: 1\n" for key in keys]
        return self._check(kind, text=mutated("".join(lines).encode(), chance), nonsense=False)


def mutated(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.randrange(1, 5)):
        place = chance.randrange(len(changed)) if changed else 0
        deed = chance.randrange(5)
        if deed == 0 and changed:
            changed[place] ^= 1 << chance.randrange(8)
        elif deed == 1:
            del changed[place : place + chance.randrange(1, 20)]
        elif deed == 2:
            changed[place:place] = changed[place : place + chance.randrange(1, 40)]
        elif deed == 3:
            changed[place:place] = chance.choice(
                [b"\x00", b"\xff\xfe", b"\xf0\x9f", b"\r", b"\t", b"{", b"}", b"[", b'"', b":"]
            )
        else:
            changed[place:] = b""
    return bytes(changed)


# -- rows of data ------------------------------------------------------------------------------------------------------

NOTHING: Sequence[str] = (
    "null",
    "NaN",
    "Infinity",
    "-Infinity",
    "{}",
    "[]",
    '[{"role": "user"}]',
    '[{"content": 1}]',
    "[[]]",
)
ODD_VALUES = (
    "true",
    "1e999",
    "9" * 5000,
    "[" * 3000 + "]" * 3000,
    '"\\ud800"',
    '"\\u0000"',
    '""',
    '" "',
    "-0.0",
    '{"a": {"b": {}}}',
    '[{"role": "user", "content": "x"}]',
    '[{"role": 7, "content": "x"}]',
    '"' + "x" * 200_000 + '"',
)
# reader: rows, columns that it needs
READERS: Mapping[str, tuple[Sequence[dict[str, Any]], Sequence[str]]] = {
    "@tasks": (tiny_runs.questions(4), ("input", "output")),
    "@examples": (tiny_runs.questions(4), ("input", "output")),
    "@pairs": (tiny_runs.preferences(4), ("prompt", "chosen", "rejected")),
}


def with_value(rows: Sequence[dict[str, Any]], row: int, column: str, text: str) -> list[str]:
    """Lines of JSON; row `row` has the JSON `text` as its `column`."""
    lines = [json.dumps(one) for one in rows]
    rest = {key: value for key, value in rows[row].items() if key != column}
    lines[row] = f"{json.dumps(rest)[:-1]}, {json.dumps(column)}: {text}}}"
    return lines


class Rows:
    def draw(self, chance: random.Random) -> Input:
        return chance.choice([self.value, self.value, self.missing, self.twice, self.bytes_, self.not_rows])(chance)

    def _file(self, reader: str, lines: Sequence[str] | bytes, nonsense: bool, name: str = "rows.jsonl") -> Input:
        content = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        return Input((reader, FILE), {name: content}, nonsense)

    def _chosen(self, chance: random.Random) -> tuple[str, list[dict[str, Any]], int, str]:
        reader = chance.choice(sorted(READERS))
        rows, columns = READERS[reader]
        return reader, [dict(row) for row in rows], chance.randrange(len(rows)), chance.choice(list(columns))

    def value(self, chance: random.Random) -> Input:
        reader, rows, row, column = self._chosen(chance)
        if chance.random() < 0.5:
            return self._file(reader, with_value(rows, row, column, chance.choice(ODD_VALUES)), nonsense=False)
        text = chance.choice(NOTHING)
        is_reference = reader == "@tasks" and column == "output"  # of any shape: a reward function may want a list
        nonsense = not (is_reference and text[0] in "[{")
        return self._file(reader, with_value(rows, row, column, text), nonsense=nonsense)

    def missing(self, chance: random.Random) -> Input:
        reader, rows, row, column = self._chosen(chance)
        del rows[row][column]
        return self._file(reader, [json.dumps(one) for one in rows], nonsense=True)

    def twice(self, chance: random.Random) -> Input:
        reader, rows, row, column = self._chosen(chance)
        lines = [json.dumps(one) for one in rows]
        lines[row] = f'{lines[row][:-1]}, {json.dumps(column)}: "another"}}'
        return self._file(reader, lines, nonsense=True)

    def bytes_(self, chance: random.Random) -> Input:
        reader, rows, _, _ = self._chosen(chance)
        content = mutated("".join(json.dumps(row) + "\n" for row in rows).encode(), chance)
        return self._file(reader, content, nonsense=not _is_json_lines(content))

    def not_rows(self, chance: random.Random) -> Input:
        reader = chance.choice(sorted(READERS))
        name = chance.choice(["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.jsonl.gz"])
        content = chance.choice(
            [
                b"",
                b"\n\n",
                b"[]",
                b"[1, 2]",
                b"null",
                b"7",
                b'"x"',
                b"\x1f\x8b\x08garbage",
                b"PAR1garbagePAR1",
                b"\x00" * 64,
            ]
        )
        return self._file(reader, content, nonsense=True, name=name)


def _is_json_lines(content: bytes) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        for line in content.decode().split("\n"):
            if line.strip():
                json.loads(line, parse_constant=refuse)
    except ValueError:
        return False
    return True


# -- labelled traces, samples of rewards -------------------------------------------------------------------------------


class Traces:
    """Rows that cannot be used are counted and reported; a file without a usable one is refused."""

    def draw(self, chance: random.Random) -> Input:
        rows = tiny_runs.traces(3, 4)
        command = chance.choice(
            [("data", "inspect"), ("data", "advise"), ("rewards", "test", "--type", "regex", "pattern=x")]
        )
        json_option = ("--json",) if command[0] == "data" and chance.random() < 0.5 else ()
        column = chance.choice(["input", "output", "final_reward"])
        content: bytes
        if chance.random() < 0.5:
            text = chance.choice([*NOTHING, *ODD_VALUES])
            content = "\n".join(with_value(rows, chance.randrange(len(rows)), column, text)).encode()
        else:
            content = mutated("".join(json.dumps(row) + "\n" for row in rows).encode(), chance)
        if chance.random() < 0.2:
            content = bytes(chance.randrange(256) for _ in range(500))
            return Input((*command, FILE, *json_option), {"traces.jsonl": content}, nonsense=True)
        return Input((*command, FILE, *json_option), {"traces.jsonl": content})
