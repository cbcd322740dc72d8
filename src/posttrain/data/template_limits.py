"""Limits for chat templates, which come with models: one that takes long or builds giant texts ends with an error.

Transformers renders templates in Jinja's sandbox, which prevents access to Python but not endless loops.
`limited_templates` makes transformers compile them in a sandbox in which every operation pays, before it runs, from the
budget of one rendering: steps of loops and calls, and characters (`template_costs.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from posttrain.data import template_costs as costs
from posttrain.data.template_costs import Cost, Lazy, check_number, size, sizes, spend

MAX_TEMPLATE_CHARACTERS = 2**20
_ADDED_BY_JINJA = ("_loop_vars", "_block_vars")  # arguments of each call within a loop or block
# Filters of ours, by names that no template can write.
_COUNTED, _JOINED, _READ, _PAID = "posttrain counted", "posttrain joined", "posttrain read", "posttrain paid"


class _LimitedSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=_shown, **kwargs)
        self.globals.pop("lipsum")  # as long as one likes, and no chat has a use for it

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> Any:
        """Jinja's hook between the parsed template and Python. The filters are complete by now."""
        if _COUNTED not in self.filters:
            self.filters = {name: _paid(name, run, costs.FILTERS.get(name)) for name, run in self.filters.items()}
            self.filters |= {_COUNTED: _Counted, _JOINED: _joined, _READ: _read, _PAID: _pay}
            self.tests |= {name: _paid(name, self.tests[name], sizes) for name in costs.TESTS}
            modulo = ("odd", "even", "divisibleby")
            self.tests |= {name: _paid(name, self.tests[name], costs.number_only) for name in modulo}
        return super()._generate(_Transformer().visit(source), *args, **kwargs)

    @staticmethod
    def concat(parts: Any) -> str:
        kept = []
        for part in parts:
            spend(len(part))
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend(costs.cost_of_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            spend(size(argument))
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        run = super().wrap_str_format(value)
        if run is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> Any:
            spend(costs.cost_of_format(value.__self__, *args, **kwargs))
            return run(*args, **kwargs)

        return limited

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name not in _ADDED_BY_JINJA}
        for value in (*args, *given.values()):
            check_number(value)
        name = getattr(function, "__name__", "")
        cost = costs.cost_of_method(getattr(function, "__self__", None), name)
        if cost is not None:
            if name == "join":
                args = tuple([*items] if isinstance(items, Lazy) else items for items in args)
            spend(cost(function.__self__, *args, **given))
        elif isinstance(function, Macro):
            spend(1)
        else:
            # A format of `strftime_now` may name widths, up to which Python's buffer grows.
            spend(sizes(*args, **given) * (256 if isinstance(function, FunctionType) else 1))
        return super().call(context, function, *args, **kwargs)


class _Transformer(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(_COUNTED, cast(nodes.Expr, node.iter), nodes.Const(_num_nodes(node)))
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        """Its body pays each time."""
        self.generic_visit(node)
        paid = nodes.ExprStmt(_filtered(_PAID, nodes.Const(_num_nodes(node)), at=node))
        node.body.insert(0, paid.set_lineno(node.lineno))
        return node

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(_JOINED, *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _read_once(node.expr)
        for operand in node.ops:
            operand.expr = _read_once(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(_READ, node.node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _read_once(node.key)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        check_number(node.value)
        return node


def _filtered(name: str, value: nodes.Expr, *arguments: nodes.Expr, at: nodes.Node | None = None) -> nodes.Filter:
    found = nodes.Filter(value, name, list(arguments), [], None, None)
    environment = (at or value).environment
    assert environment is not None, "the parser sets it"
    found.set_environment(environment).set_lineno((at or value).lineno)
    return found


def _read_once(node: nodes.Expr) -> nodes.Expr:
    is_short = isinstance(node, nodes.Const) and len(str(node.value)) < 100
    return node if is_short else _filtered(_READ, node)


def _num_nodes(node: nodes.Node) -> int:
    return sum(1 for _ in node.find_all(nodes.Node))


@pass_context  # so that Jinja does not run them when it compiles
class _Counted:
    """The items of a loop; each iteration pays for the loop's body."""

    def __init__(self, context: Any, items: Any, num_nodes: int) -> None:
        self._items = items
        self._num_nodes = num_nodes

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            spend(0, self._num_nodes)
            yield item


@pass_context
def _joined(context: Any, *parts: Any) -> str:
    spend(sizes(*parts))
    return "".join(map(str, parts))


@pass_context
def _read(context: Any, value: Any) -> Any:
    spend(size(value))
    return value


@pass_context
def _pay(context: Any, num_nodes: int) -> None:
    spend(0, num_nodes)


def _shown(value: Any) -> Any:
    """What `{{ }}` writes. A text pays when it is written."""
    if not isinstance(value, str):
        spend(size(value))
    return value


def _paid(name: str, run: Any, cost: Cost | None) -> Any:
    """A filter or test that pays first."""
    first = 1 if hasattr(run, "jinja_pass_arg") else 0
    plain = inspect.unwrap(run)  # a variant of Jinja's takes a context that this function does not
    num_added = first - hasattr(plain, "jinja_pass_arg")

    @functools.wraps(run)
    def limited(*args: Any, **kwargs: Any) -> Any:
        if cost is None:
            raise SecurityError(f"it uses the filter {name!r}, which is not accepted in chat templates")
        for value in (*args[first + 1 :], *kwargs.values()):
            check_number(value)
        if name in costs.CONSUMING and isinstance(args[first], Lazy):
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        if kwargs and cost is not sizes:  # by their places, whatever their names are
            bound = inspect.signature(plain).bind(*args[num_added:], **kwargs)
            bound.apply_defaults()
            args, kwargs = (*args[:num_added], *bound.args), bound.kwargs
        spend(cost(*args[first:], **kwargs))
        found = run(*args, **kwargs)
        return Lazy(found, args[first]) if isinstance(found, Iterator) else found

    return limited


@contextmanager
def limited_templates(template: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Within, transformers renders one conversation with these limits."""
    from transformers.utils import chat_template_utils

    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise SecurityError(f"it has {len(template)} characters; {MAX_TEMPLATE_CHARACTERS} are accepted")
    # The name under which transformers looks up the sandbox when it compiles a template, which it does once for each.
    if chat_template_utils.ImmutableSandboxedEnvironment is not _LimitedSandbox:
        chat_template_utils.ImmutableSandboxedEnvironment = _LimitedSandbox
        chat_template_utils._compile_jinja_template.cache_clear()
    given = sum(len(str(value)) for message in messages for value in message.values())
    token = costs.budget.set(
        costs.Budget(
            costs.MAX_STEPS + costs.STEPS_PER_MESSAGE * len(messages),
            costs.MAX_CHARACTERS + costs.CHARACTERS_PER_CHARACTER * given,
        )
    )
    try:
        yield
    finally:
        costs.budget.reset(token)
