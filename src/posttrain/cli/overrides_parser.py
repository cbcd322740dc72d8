"""Command lines that mix options and `key=value` words in any order, as Hydra users type them."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, get_args

from posttrain.apps.options import Option, options_of
from posttrain.errors import ExitCode, InputError
from posttrain.files.json_files import JsonObject, read_at_most
from posttrain.files.redaction import redact_argument

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HELP = Path(__file__).with_name("help")
RAW = argparse.RawDescriptionHelpFormatter  # keeps line breaks
Subparsers: TypeAlias = "argparse._SubParsersAction[OverridesParser]"
Fill: TypeAlias = "Callable[[OverridesParser], None]"


class OverridesParser(argparse.ArgumentParser):
    """Takes overrides before, between and after options; argparse alone stops at the first option that follows one.
    Words beyond those that a command takes are refused.

    `fill` adds the arguments, when the command is chosen: `posttrain --help` imports no command. `actions`: first
    words with a parser of their own, filled on demand too. argparse's subparsers cannot be optional next to positional
    arguments. `short_names`: settings that may also be given as options, `--lr 1e-6`. What `--help` says beside the
    options is in `help/`: a description, a line `---`, and what comes last; or the latter alone. A file has the words
    of its command, or is one of `texts`, in which `values` are filled in.
    """

    def __init__(self, *args: Any, fill: Fill | None = None, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": RAW, **options})
        self.fill = fill
        self.actions: dict[str, tuple[str, Fill]] = {}  # summary, and what adds the arguments
        self.short_names: Collection[str] = ()
        self.meant_by_a_word = ""  # what to say of one that is too many, {}
        self.texts: Sequence[str] = ()
        self.values: dict[str, str] = {}

    def format_help(self) -> str:
        program, *words = self.prog.split()
        names = self.texts or ["-".join(words) or program] * (program == "posttrain")
        files = [HELP / f"{name}.txt" for name in names]
        if text := "".join(file.read_text("utf-8") for file in files if file.exists()):
            before, _, after = text.rpartition("---\n")
            self.description = before or self.description
            self.epilog = after.format(**self.values) if self.values else after
        return super().format_help()

    def option(self, name: str, help: str, **settings: object) -> None:
        """`--limit N`, with a value of the default's type. The help names the default, unless it does so already."""
        add_option(self, name, help, **settings)

    def switch(self, name: str, help: str) -> None:
        self.add_argument(name, action="store_true", help=help)

    def words(self, metavar: str = "key=value", help: str = "settings that override the file's") -> None:
        self.add_argument("words", nargs="*", default=[], metavar=metavar, help=help)

    def config_file(self, help: str = "YAML file; what it does not set keeps its default", **settings: object) -> None:
        self.option("--config FILE", help, type=Path, **settings)

    def commands(self, **options: Any) -> Subparsers:
        """Where `add_command` adds the second words: `config show`."""
        options = options or {"title": "commands"}
        return self.add_subparsers(metavar="COMMAND", required=True, parser_class=OverridesParser, **options)

    def error(self, message: str) -> NoReturn:
        """Like argparse's, with the exit code of bad input, and with the command that was probably meant."""
        if (match := re.search(r"invalid choice: '([^']*)'", message)) and self._subparsers is not None:
            self.exit(ExitCode.BAD_INPUT, f"{self.prog}: error: unknown command {match[1]!r}{self._meant(match[1])}\n")
        self.print_usage(sys.stderr)
        self.exit(ExitCode.BAD_INPUT, f"{self.prog}: error: {message}\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if (fill := self.fill) is not None:
            self.fill = None
            fill(self)
        given = self._without_dashes(list(sys.argv[1:] if args is None else args))
        if given and given[0] in self.actions:
            summary, fill = self.actions[given[0]]
            action = OverridesParser(prog=f"{self.prog} {given[0]}", description=sentence(summary), fill=fill)
            return action.parse_known_args(given[1:], namespace)
        parsed, rest = super().parse_known_args(given, namespace)
        words = [word for word in rest if not word.startswith("-")]
        options = [word for word in rest if word.startswith("-")]
        if options and self._subparsers is None:
            # argparse would report it with the usage of the top-level program, which names no option.
            self._refuse(options)
        several = next((action for action in self._actions if action.nargs == "*"), None)
        if several is not None:
            given_first = getattr(parsed, several.dest) or []
            setattr(parsed, several.dest, [*given_first, *map(several.type or str, words)])  # type: ignore[arg-type]
        elif words:
            hint = self.meant_by_a_word.format(words[0]) or f"see `{self.prog} --help`"
            raise InputError(f"unexpected: {' '.join(map(repr, words))}; {hint}")
        return parsed, options

    def _without_dashes(self, given: list[str]) -> list[str]:
        """`--lr 1e-6` and `--lr=1e-6` as `lr=1e-6`, for the short names of settings."""
        words, rest = [], iter(given)
        for word in rest:
            name, equals, value = word.partition("=")
            short = name.removeprefix("--").replace("-", "_")
            if not name.startswith("--") or short not in self.short_names or name in self._option_string_actions:
                words.append(word)
            elif equals:
                words.append(f"{short}={value}")
            elif (following := next(rest, None)) is None:
                self.error(f"{word} needs a value, e.g. {short}=…")
            else:
                words.append(f"{short}={following}")
        return words

    def _meant(self, word: str) -> str:
        """A hint to put behind an unknown command."""
        from posttrain.data.errors import nearest

        known = [name for action in self._actions for name in (action.choices or ()) if isinstance(name, str)]
        if word.lower() in ("train", "run", "finetune", "fine-tune") and "grpo" in known:
            return "; grpo, ppo, distill, dpo, rm and sft train: e.g. posttrain grpo --config FILE"
        return nearest(word, known) or f"; one of {', '.join(known)}"

    def _refuse(self, options: Sequence[str]) -> NoReturn:
        from posttrain.data.errors import nearest

        known = [*self._option_string_actions, *(f"--{name.replace('_', '-')}" for name in self.short_names)]
        hint = nearest(options[0].partition("=")[0], known)
        self.error(f"unrecognized arguments: {redact_argument(' '.join(options))}{hint}")


def add_command(commands: Subparsers, name: str, summary: str, **options: Any) -> OverridesParser:
    """A subcommand. Its description is the summary as a sentence unless `options` have another one."""
    return commands.add_parser(name, help=summary, **{"description": sentence(summary), **options})


def add_option(group: argparse._ActionsContainer, name: str, help: str, **settings: Any) -> None:
    flag, _, metavar = name.partition(" ")
    default = settings.get("default")
    if isinstance(default, int | float | Path) and "type" not in settings:
        settings["type"] = type(default)
    if default not in (None, "", []) and "default" not in help:
        help += " (default: %(default)s)"
    if metavar:
        settings["metavar"] = metavar
    group.add_argument(flag, help=help, **settings)


def add_fields(group: argparse._ActionsContainer, kind: type[DataclassInstance], prefix: str = "") -> None:
    """The options of a dataclass (`apps/options.py`), None where not given: the dataclass has the defaults."""
    for name, type_, default, option in options_of(kind):
        type_ = next((each for each in get_args(type_) if each is not NoneType), type_)
        flag, help = f"--{prefix}{name}".replace("_", "-"), option.help
        if type_ is bool:
            flag = flag.replace("--", "--no-") if default else flag
            group.add_argument(
                flag, dest=f"{prefix}{name}", action="store_false" if default else "store_true", default=None, help=help
            )
            continue
        if default is not None and help:
            shown = f"{default / 2**20:g} MiB" if name.endswith("_bytes") else default
            help += f" ({shown:g})" if isinstance(shown, float) else f" ({shown})"
        metavar = option.metavar or {int: "N", float: "X"}.get(type_)
        if option.choices:
            metavar = None
        group.add_argument(
            flag, dest=f"{prefix}{name}", type=type_, choices=option.choices, metavar=metavar, help=help or None
        )


def given_fields(args: argparse.Namespace, kind: type[DataclassInstance], prefix: str = "") -> JsonObject:
    """What `add_fields` has parsed, by the names of the fields."""
    found = {name: getattr(args, f"{prefix}{name}") for name, *_ in options_of(kind)}
    return {name: value for name, value in found.items() if value is not None}


def pairs(option: str, words: Sequence[str], form: str = "NAME=VALUE") -> dict[str, str]:
    """The values of an option that may be repeated."""
    found: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not name or not value:
            raise InputError(f"{option} {word}: expected {form}")
        if name in found:
            raise InputError(f"{option} {word}: {name} is given twice")
        found[name] = value
    return found


def yaml_value(word: str) -> Any:
    """The value of a word `key=value`, as a config would hold it."""
    from posttrain.config.yaml_files import parse_value

    try:
        return parse_value(word.partition("=")[2])
    except ValueError as error:
        raise InputError(f"{word!r:.200}: the value is not valid YAML ({error})") from error


def number(kind: type[int] | type[float], option: Option) -> Callable[[str], float]:
    """For argparse: text to a number that the option accepts."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and option.accepts(value)):
            word = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not possible; {word}, {option.accepted}")
        return value

    return parse


def read_secret(option: str, file: Path, max_bytes: int) -> str:
    try:
        return read_at_most(file, max_bytes).decode()
    except (OSError, ValueError) as error:
        no_text = "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else None
        reason = no_text or getattr(error, "strerror", None) or error
        raise InputError(f"{option} {file} cannot be read: {reason}") from error


def sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."
