"""`posttrain rewards list` and `posttrain rewards test`: the reward types, and a check of one on known samples."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.overrides_parser import OverridesParser, add_command, yaml_value
from posttrain.config import guess_kind, load_config
from posttrain.config.rewards import REWARD_TYPES, RewardConfig, reward_keys, takes_text_only
from posttrain.data.errors import nearest
from posttrain.environments import build_environments, check_environments
from posttrain.errors import InputError
from posttrain.files import durable
from posttrain.files.json_files import JsonObject
from posttrain.files.redaction import redact

if TYPE_CHECKING:
    from posttrain.environments.agreement import StoredSample
    from posttrain.types import Score

EXIT_DISAGREEMENT = 2


def add_arguments(parser: OverridesParser) -> None:
    commands = parser.commands()
    listing = add_command(commands, "list", "show every type of reward and its keys")
    listing.words("TYPE", "show only these types")
    listing.switch("--json", "print {type: {key: {default, description}}}")
    listing.set_defaults(run=_list)
    test = add_command(
        commands,
        "test",
        "score stored samples and compare with the rewards recorded for them",
        usage="posttrain rewards test (--type TYPE | --config FILE [--env NAME]) FILE [options] [key=value …]",
    )
    test.words("FILE key=value", "the samples, then settings of the reward or config")
    test.option("--type TYPE", "a type of reward; its settings are given as key=value")
    test.config_file("config of a run, whose environment is tried")
    test.option("--env NAME", "key under `env` of the config; may be left out if there is one")
    test.option("--prompt COLUMN", "column with the prompt")
    test.option("--response COLUMN", "column with the answer to score")
    test.option("--reference COLUMN", "column with the expected answer")
    test.option("--expected COLUMN", "column with the reward or label to compare with")
    test.option("--part NAME", "compare this part of the reward instead of the sum")
    test.option("--row-settings COLUMNS", "columns, by comma, that are settings of the reward")
    test.option("--tokenizer MODEL", "counts tokens, for rewards by length in tokens")
    test.option("--tolerance", "difference that is still agreement", default=1e-6)
    test.option("--limit N", "read only the first N samples", type=int)
    test.option("--show N", "disagreements and reasons to show", default=10)
    test.option("--out FILE", "write every sample's scores there, as jsonl", type=Path)
    test.switch("--strict", "exit with 2 if anything disagrees or is unscored")
    test.set_defaults(run=_test)


def _list(args: argparse.Namespace) -> int:
    for name in args.words:
        _known_type(name)
    chosen = {name: _keys(REWARD_TYPES[name]) for name in REWARD_TYPES if name in args.words or not args.words}
    if args.json:
        print(json.dumps(chosen, indent=2))
        return 0
    common = _keys(RewardConfig)
    for name, keys in chosen.items():
        print(f"{name}\n  {' '.join((REWARD_TYPES[name].__doc__ or '').split())}")
        _print_keys({key: about for key, about in keys.items() if key not in common})
        print()
    print("every type also has")
    _print_keys(common)
    return 0


def _keys(section: type[RewardConfig]) -> dict[str, JsonObject]:
    return {
        key: {
            "required": info.is_required(),
            "default": None if info.is_required() else info.get_default(call_default_factory=True),
            "description": info.description,
        }
        for key, info in reward_keys(section).items()
    }


def _print_keys(keys: dict[str, JsonObject]) -> None:
    for key, about in keys.items():
        default = "(required)" if about["required"] else json.dumps(about["default"])
        print(f"    {key:<24} {default:<20} {about['description']}")


def _known_type(name: str) -> None:
    if name not in REWARD_TYPES:
        known = ", ".join(REWARD_TYPES)
        raise InputError(f"unknown type of reward {name!r}{nearest(name, REWARD_TYPES)}; known: {known}")


def _test(args: argparse.Namespace) -> int:
    file, settings = _split_words(args.words)
    name, block = _environment(args, settings)
    row_settings = [column.strip() for column in (args.row_settings or "").split(",") if column.strip()]
    if row_settings and args.type is None:
        raise InputError("--row-settings gives settings of one reward: name it with --type")

    from posttrain.environments.agreement import Columns, Verdict, disagreements, read_samples, report, unscored

    if not row_settings:
        check_environments({name: block})
    samples = read_samples(
        file,
        Columns(args.prompt, args.response, args.reference, args.expected),
        row_settings=row_settings,
        limit=args.limit,
        encode=_encoder(args.tokenizer),
    )
    started = time.perf_counter()
    scores = _score(name, block, samples)
    seconds = time.perf_counter() - started
    known = dict.fromkeys(part for score in scores for part in score.parts)
    if args.part is not None and args.part not in known:
        raise InputError(f"--part {args.part}: the reward has the parts {', '.join(known) or '(none)'}")
    verdicts = [
        Verdict(sample, score, args.tolerance, args.part) for sample, score in zip(samples, scores, strict=True)
    ]
    print(f"{file}, env.{name}:" if args.type is None else f"{file}, reward of type {args.type}:")
    print(report(verdicts, seconds, num_shown=args.show))
    if args.out is not None:
        rows = "".join(redact(json.dumps(verdict.as_row(), ensure_ascii=False)) + "\n" for verdict in verdicts)
        durable.write_for_user(args.out, rows.encode("utf-8", "backslashreplace").decode())
        print(f"scores written to {args.out}", file=sys.stderr)
    bad = disagreements(verdicts) or [verdict for verdict in unscored(verdicts) if verdict.is_compared]
    return EXIT_DISAGREEMENT if args.strict and bad else 0


def _split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """The file and the settings. A path may have an equals sign in it, so a word that exists is the file."""
    rest = list(words)
    files = [word for word in rest if Path(word).exists()] or [
        word for word in rest if "=" not in word and word[0] != "~"
    ]
    if not files:
        raise InputError("name the file with the samples: posttrain rewards test --type math samples.jsonl")
    rest.remove(files[0])
    return files[0], rest


def _environment(args: argparse.Namespace, settings: Sequence[str]) -> tuple[str, Any]:
    """The name and the block of the environment to try."""
    if (args.type is None) == (args.config is None):
        raise InputError("give what scores: --type TYPE (posttrain rewards list), or --config FILE with --env NAME")
    if args.type is not None:
        _known_type(args.type)
        return args.env or args.type, {"type": args.type, **_settings_of(args.type, settings)}

    config = load_config(guess_kind(args.config), args.config, settings).config
    name = args.env or (next(iter(config.env)) if len(config.env) == 1 else None)
    if name is None or name not in config.env:
        known = ", ".join(config.env) or "none"
        raise InputError(f"--env {'is missing' if name is None else name}: under env of {args.config} there is {known}")
    return name, config.env[name]


def _settings_of(kind: str, words: Sequence[str]) -> JsonObject:
    block: JsonObject = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"{word!r} is not a setting; write key=value")
        info = reward_keys(REWARD_TYPES[kind]).get(key)
        # A regular expression such as [a-z] is a list to YAML; what can only be text is not parsed.
        block[key] = text if info is not None and takes_text_only(info) else yaml_value(word)
    return block


def _encoder(model: str | None) -> Callable[[str], Sequence[int]] | None:
    if model is None:
        return None
    from posttrain.models.loading import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _score(name: str, block: Any, samples: Sequence[StoredSample]) -> list[Score]:
    """One score per sample. Samples with other settings of their own get an environment of their own."""
    rows_of: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        rows_of.setdefault(json.dumps(sample.row_settings, sort_keys=True), []).append(row)
    scores: dict[int, Score] = {}
    for settings, rows in rows_of.items():
        own = json.loads(settings)
        with build_environments({name: {**block, **own} if own else block}) as environment:
            chosen = [samples[row] for row in rows]
            found = environment.score([sample.task for sample in chosen], [sample.completion for sample in chosen])
        scores.update(zip(rows, found, strict=True))
    return [scores[row] for row in range(len(samples))]
