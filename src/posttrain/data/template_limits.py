"""Limits for chat templates, which come with models: a template that loops or builds giant strings ends with an error.

Transformers renders templates in Jinja's sandbox, which prevents access to Python but not endless loops.
`limited_templates` makes transformers compile them in a sandbox that counts: the steps of loops and calls of one
rendering, and the length of strings that operators build.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 5_000_000  # a few seconds
MAX_CHARACTERS = 2**28  # of one text
MAX_NUMBER = 10**7  # a width or a count; no template has a use for larger ones

_steps_left: ContextVar[list[int] | None] = ContextVar("steps_left", default=None)


class _LimitedSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.globals |= {_COUNTED: _Counted, _JOINED: _joined}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        """Jinja's hook between the parsed template and Python."""
        return super()._generate(_Transformer().visit(source), *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_length(_length(left) + _length(right))
        elif isinstance(left, int | float) and isinstance(right, int | float):
            power = operator == "**"
            if abs(right) > 64 if power else abs(left) * abs(right) > MAX_NUMBER:
                raise SecurityError(f"it computes {left} {operator} {right}; numbers up to {MAX_NUMBER} are accepted")
        else:
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            _check_length(_length(sequence) * max(count, 0) if isinstance(count, int) else 0)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _count_step()
        for value in (*args, *kwargs.values()):
            _check_number(value)
        return super().call(context, function, *args, **kwargs)


class _Transformer(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _call(_COUNTED, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call(_JOINED, *node.nodes)

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        _check_number(node.value)
        return node


_COUNTED, _JOINED = "posttrain_counted", "posttrain_joined"


def _call(name: str, *arguments: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)
    environment = arguments[0].environment
    assert environment is not None, "the parser sets it"
    call.set_environment(environment).set_lineno(arguments[0].lineno)
    return call


class _Counted:
    """The items of a loop; each iteration counts as a step."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _count_step()
            yield item


def _joined(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _count_step() -> None:
    left = _steps_left.get()
    if left is not None:
        left[0] -= 1
        if left[0] < 0:
            raise SecurityError(f"it needs more than {MAX_STEPS} steps")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise SecurityError(f"it builds a text or list of {length} characters or items; {MAX_CHARACTERS} are accepted")


def _check_number(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise SecurityError(f"it uses the number {value}; numbers up to {MAX_NUMBER} are accepted")


@contextmanager
def limited_templates() -> Iterator[None]:
    """Within, transformers renders one conversation with these limits."""
    from transformers.utils import chat_template_utils

    # The name under which transformers looks up the sandbox when it compiles a template, which it does once for each.
    if chat_template_utils.ImmutableSandboxedEnvironment is not _LimitedSandbox:
        chat_template_utils.ImmutableSandboxedEnvironment = _LimitedSandbox
        chat_template_utils._compile_jinja_template.cache_clear()
    token = _steps_left.set([MAX_STEPS])
    try:
        yield
    finally:
        _steps_left.reset(token)
