"""The main program of the process that renders chat templates (`template_process.py` starts it).

It is run as a file and imports Jinja and the standard library only. A request is marshalled: how many bytes of text are
accepted, a template, variables, and conversations. The reply has one frame for each conversation: a byte that tells
what follows, and UTF-8. The first one that is no text is the last. The environment is that of `apply_chat_template` in
transformers.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import resource
import runpy
import signal
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from posttrain import processes
else:
    processes = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "processes.py")))

_MAX_TEMPLATES = 8  # compiled ones that are kept
_SHOWN_CHARACTERS = 1000
# What imports modules or reads files at its first use; later, no file can be opened.
_WARM_UP = (
    r"{{ 'a\n' ~ lipsum() | wordwrap | striptags | urlize | pprint ~ strftime_now('%c %Z') ~ 'a'.encode('ascii') }}"
    "{{ 'a'.encode('latin-1') ~ 1 / 0 }}"
)


def main() -> None:
    time_limit_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    channel, lifeline = int(sys.argv[3]), int(sys.argv[4])
    processes.die_with_parent(lifeline)
    # The kernel ends this process by SIGPROF at the limit of a rendering: code in C need not return first.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    render({}, _WARM_UP, {}, 0)
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 1,  # with 0, a program that receives crashes would still be given the memory
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of memory
            resource.setrlimit(which, (most, most))
    processes.write_frame(channel, b"")  # ready
    compiled: dict[str, jinja2.Template] = {}
    while (request := processes.read_frame(channel)) is not None:
        left_bytes, data = marshal.loads(request)
        template, shared, conversations = marshal.loads(data)
        variables = marshal.loads(shared)
        for given in conversations:
            signal.setitimer(signal.ITIMER_PROF, time_limit_s)
            reply = render(compiled, template, {**variables, **marshal.loads(given)}, left_bytes)
            signal.setitimer(signal.ITIMER_PROF, 0)
            processes.write_frame(channel, reply)
            left_bytes -= len(reply) - 1
            if not reply.startswith(b"t"):
                break


def render(compiled: dict[str, jinja2.Template], template: str, variables: dict[str, Any], max_bytes: int) -> bytes:
    try:
        try:
            if template not in compiled:
                if len(compiled) == _MAX_TEMPLATES:
                    compiled.clear()
                compiled[template] = environment().from_string(template)
            text = compiled[template].render(variables).encode("utf-8", "surrogatepass")
            return b"l" if len(text) > max_bytes else b"t" + text
        except MemoryError:
            return b"m"
        except TemplateSyntaxError as error:
            return b"s" + _shown(f"line {error.lineno}: {error.message}")
        except Exception as error:
            return b"e" + _shown(str(error) or type(error).__name__)
    except MemoryError:
        return b"m"
    except Exception as error:  # while the text of the other one was written
        return b"e" + type(error).__name__.encode()


def _shown(message: str) -> bytes:
    return message[:_SHOWN_CHARACTERS].encode("utf-8", "backslashreplace")


def environment() -> ImmutableSandboxedEnvironment:
    """One for each template, so that none changes another's."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    found.filters["tojson"] = _to_json
    found.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return found


class _Generation(jinja2.ext.Extension):
    """The tag `generation` marks an assistant's text and prints its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """Of `dict`, what templates use."""

    def __call__(self, *args: object, **kwargs: object) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Without private names, by which templates have left the sandbox."""

    def __init__(*args: object, **kwargs: object) -> None:
        own, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: names that start with _ are refused")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """Jinja's own escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main()
