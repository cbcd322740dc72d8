"""Renders chat templates, which come with models, in a process with limits of time, memory and text.

Jinja's sandbox keeps a template from Python, not from endless loops and giant texts. So the process
(`template_worker.py`) has limits that the kernel enforces, and only text comes back from it. One process for each
Python process, started at the first rendering; after a violation the next rendering starts another.
"""

from __future__ import annotations

import atexit
import importlib.util
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.processes import Child, ending_of, frame, take_frames
from posttrain.reporting.wording import printable

TIME_LIMIT_S = 10.0  # of the processor, for one conversation
MEMORY_LIMIT_BYTES = 1 << 30  # of the process
MAX_TEXT_BYTES = 1 << 22  # of the texts of one request, and
TEXT_BYTES_PER_BYTE = 16  # more for each byte of the request: template, variables and conversations
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_CONVERSATION_BYTES = 1 << 27
_GROUP, _GROUP_BYTES = 32, 1 << 22  # conversations of one request
_PROGRAM = Path(__file__).with_name("template_worker.py")
_MARSHAL_VERSION = 2  # writes a text as often as it occurs, so the size is that of the conversation
_WAITS = 12  # as long as the limit of processor time: a busy machine
_START_LIMIT_S = 120.0
_KILL_GRACE_S = 5.0
_KEPT_VARIABLES = ("TZ", "LD_LIBRARY_PATH", "PYTHONHOME")  # no credentials
_SHOWN_CHARACTERS = 1000
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateRefused(Exception):
    """Why a conversation was not rendered. `index`: which; `is_syntax`: the template itself is not valid."""

    def __init__(self, reason: str, index: int = 0, is_syntax: bool = False) -> None:
        super().__init__(reason)
        self.index, self.is_syntax = index, is_syntax


class _Died(TemplateRefused):
    """The process has ended or has no memory left, perhaps for another reason than the conversation."""


class TemplateRenderer:
    _process: Child | None = None
    _channel: socket.socket

    def __init__(
        self,
        time_limit_s: float = TIME_LIMIT_S,
        memory_bytes: int = MEMORY_LIMIT_BYTES,
        max_text_bytes: int = MAX_TEXT_BYTES,
    ) -> None:
        self._time_limit_s, self._memory_bytes, self._max_text_bytes = time_limit_s, memory_bytes, max_text_bytes
        self.forget()

    def render(
        self, template: str, variables: Mapping[str, object], conversations: Sequence[tuple[Sequence[object], bool]]
    ) -> Iterator[str]:
        """The texts of conversations, each with whether the text opens an answer. Some go through the pipe at once."""
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateRefused(f"it has {len(template)} characters; {MAX_TEMPLATE_CHARACTERS} are accepted")
        shared = _packed(lambda: {"tools": None, "documents": None, **plain(variables)}, 0)
        group: list[bytes] = []
        num_bytes = 0
        for index, (messages, opens_answer) in enumerate(conversations):
            group.append(_packed(partial(_variables, messages, opens_answer), index))
            num_bytes += len(group[-1])
            if len(group[-1]) > MAX_CONVERSATION_BYTES:
                raise TemplateRefused(f"{len(group[-1])} bytes are more than {MAX_CONVERSATION_BYTES}", index)
            if len(group) < _GROUP and num_bytes < _GROUP_BYTES and index + 1 < len(conversations):
                continue
            request, first = marshal.dumps((template, shared, group)), index + 1 - len(group)
            with self._lock:
                try:
                    texts = self._exchange(request, first, len(group))
                except _Died:  # a process that another template left without memory, or that somebody ended
                    texts = self._exchange(request, first, len(group))
            yield from texts
            group, num_bytes = [], 0

    def close(self) -> None:
        """End the process. The next rendering starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill_group(_KILL_GRACE_S)
            self._channel.close()

    def forget(self) -> None:
        """Where this Python process was forked, the rendering process belongs to the parent."""
        if self._process is not None:
            self._process.returncode = 0
            self._process.hang_up()
            self._channel.close()
        self._process, self._lock = None, threading.Lock()

    def _exchange(self, request: bytes, first: int, count: int) -> list[str]:
        """The texts of one request, whose first conversation has this index."""
        texts: list[str] = []
        wait_s = _WAITS * self._time_limit_s
        max_bytes = self._max_text_bytes + TEXT_BYTES_PER_BYTE * len(request)
        if self._process is None:
            self._start()
        try:
            self._channel.settimeout(wait_s)
            self._channel.sendall(frame(marshal.dumps((max_bytes, request))))
            while len(texts) < count:
                for reply in self._receive(wait_s, max_bytes + 1):
                    kind, text = reply[:1], reply[1:].decode("utf-8", "surrogatepass")
                    if kind == b"m":
                        raise _Died(f"it needs more than {self._memory_bytes >> 20} MiB of memory", first + len(texts))
                    if kind == b"l":
                        text = f"its text has more than {max_bytes} bytes"
                    if kind != b"t":
                        reason = printable(text[:_SHOWN_CHARACTERS])
                        raise TemplateRefused(reason, first + len(texts), is_syntax=kind == b"s")
                    texts.append(text)
            return texts
        except TimeoutError:
            self.close()
            raise TemplateRefused(f"it takes more than {wait_s:g} s", first + len(texts)) from None
        except (OSError, EOFError, ValueError):  # it has ended, or its reply is none
            raise self._death(first + len(texts)) from None
        except TemplateRefused as error:
            if isinstance(error, _Died):
                self.close()
            raise
        except BaseException:  # a signal: the replies to this request are not for the next one
            self.close()
            raise

    def _death(self, index: int) -> TemplateRefused:
        process = self._process
        assert process is not None
        process.ended_within(_KILL_GRACE_S)
        code = process.poll()
        self.close()
        if code == -signal.SIGPROF:
            return TemplateRefused(f"it takes more than {self._time_limit_s:g} s", index)
        how = "sent no reply" if code is None else f"ended with {ending_of(code)}"
        return _Died(f"the process that renders it {how}", index)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        names = ("jinja2", "markupsafe")
        folders = {str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in names}  # type: ignore
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        limits = [str(self._time_limit_s), str(self._memory_bytes)]
        # -S: none of the packages installed here runs code of its own at the start.
        command = [sys.executable, "-S", "-s", "-P", str(_PROGRAM), *limits]
        self._channel, self._incoming = ours, bytearray()
        environment["PYTHONPATH"] = os.pathsep.join(sorted(folders))
        try:
            self._process = Child(command, [theirs.detach()], subprocess.DEVNULL, environment)
        except BaseException:
            ours.close()
            raise
        try:
            self._receive(_START_LIMIT_S)
        except (OSError, EOFError, ValueError):
            raise RuntimeError(f"chat templates cannot be rendered: {self._death(0)}") from None
        except BaseException:
            self.close()
            raise

    def _receive(self, limit_s: float, max_bytes: int = 0) -> list[bytes]:
        give_up_at = time.monotonic() + limit_s
        while not (frames := take_frames(self._incoming, max_bytes)):
            self._channel.settimeout(max(give_up_at - time.monotonic(), 0.001))
            part = self._channel.recv(1 << 20)
            if not part:
                raise EOFError
            self._incoming += part
        return frames


RENDERER = TemplateRenderer()
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)


def _packed(make: Callable[[], dict[str, object]], index: int) -> bytes:
    try:
        return marshal.dumps(make(), _MARSHAL_VERSION)
    except (RecursionError, ValueError):
        raise TemplateRefused("lists and maps are nested too deep", index) from None


def _variables(messages: Sequence[Any], opens_answer: bool) -> dict[str, Any]:
    return {"messages": [_message(one) for one in messages], "add_generation_prompt": opens_answer}


def _message(message: Mapping[str, object]) -> dict[str, Any]:
    """As transformers passes it on: without empty values, and thoughts by the names that templates read."""
    found = {name: plain(value) for name, value in message.items() if value is not None}
    thoughts = next((found[name] for name in _REASONING if name in found), None)
    return found if thoughts is None else {"thinking": thoughts, **found, "reasoning_content": thoughts}


def plain(value: object) -> Any:
    """Of a value, texts, numbers, lists and maps; the name of its type for anything else, as in transformers."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # of a class of its own
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "shape", ()):
        return plain(value.item())
    return f"<{type(value).__name__}>"
