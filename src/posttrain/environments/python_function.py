"""A user's reward function: lookup, and calls with the parameters it declares. Runs in a worker process.

It may be written with any of the names in `_ARGUMENTS`, in any order, or with three arguments of other names, which
then are prompt, response, reference in that order. It may be `async def`. A function with a parameter `completions` has
TRL's signature: lists in, a list out, and the columns of the data under their names. It is called with one completion
at a time.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import inspect
import pickle
import random
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence, Sized
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from posttrain.environments.item import BadSetup, ScoringItem, Unscored
from posttrain.errors import near_path
from posttrain.files.json_files import JsonMapping, JsonObject

# Accepted parameter name -> field of the item. The first name of a field is the one that `**kwargs` receives.
_ARGUMENTS = {
    "prompt": "prompt",
    "response": "response",
    "completion": "response",
    "reference": "reference",
    "reference_answer": "reference",
    "messages": "messages",
    "task_metadata": "metadata",
    "metadata": "metadata",
    "num_tokens": "num_tokens",
    "finish_reason": "finish_reason",
}
_POSITIONS = ("prompt", "response", "reference")
_TRAINER_ARGUMENTS = ("trainer_state", "log_extra", "log_metric", "environments")  # also TRL's; they need its trainer
_SHOWN_TRACEBACK_LINES = 12


class FunctionLoadError(BadSetup):
    """The function cannot be used; the message names the file or module and the remedy."""


def function_scorer(setup: JsonMapping) -> Callable[[ScoringItem], object]:
    return load_scorer(setup["function"], Path(setup["base_folder"]), as_messages=setup.get("as_messages", False))


def load_scorer(spec: str, base_folder: Path, *, as_messages: bool = False) -> Callable[[ScoringItem], object]:
    """The function that `spec` names, ready to be called with an item. `as_messages` is for TRL's signature."""
    function = load_function(spec, base_folder)
    is_batched = takes_batches(function)
    arguments_of = _batch_of_one(function, spec, as_messages) if is_batched else _arguments_for(function, spec)
    call = awaiting_caller()

    def score(item: ScoringItem) -> object:
        seed_noise(item.noise_key)
        positional, named = arguments_of(item)
        value = call(function, *positional, **named)
        if not is_batched:
            return value
        if not isinstance(value, Sized) or isinstance(value, str | dict) or len(value) != 1:
            needed = "a list with one number per completion is needed"
            raise Unscored(f"the reward function returned {value!r:.80}: {needed}")
        return cast(Sequence[object], value)[0]

    return score


def load_function(spec: str, base_folder: Path) -> Callable[..., object]:
    """`path/file.py:name` (relative to `base_folder`), `package.module:name` or `package.module.name`.

    `path/file.pkl:name` is a function that was pickled by value, as the Python API does.
    """
    file, _, _ = spec.rpartition(":")
    if file.endswith(".pkl"):
        path = base_folder / Path(file).expanduser()
        if not path.is_file():
            raise FunctionLoadError(f"there is no file {path}")
        try:
            function: Callable[..., object] = pickle.loads(path.read_bytes())
        except BaseException as error:
            raise FunctionLoadError(f"{path} cannot be loaded:\n{_error_lines(error)}") from error
        return function
    return _find_callable(*load_module(spec, base_folder))


def load_module(spec: str, base_folder: Path) -> tuple[ModuleType, str, str]:
    """The module that `spec` names, as it is called there, and the name of what is wanted of it."""
    module_name, separator, attribute = spec.rpartition(":")
    if not separator:
        module_name, _, attribute = spec.rpartition(".")
    if not module_name or not attribute:
        raise FunctionLoadError(f"{spec!r} names no function: write 'file.py:name' or 'package.module:name'")
    if attribute == "py" and not separator:
        raise FunctionLoadError(f"{spec!r} names a file and no function: write '{spec}:name_of_the_function'")
    if module_name.endswith(".py") or "/" in module_name:
        module = _import_file(base_folder / Path(module_name).expanduser())
    else:
        module = _import_module(module_name, base_folder)
    return module, module_name, attribute


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FunctionLoadError(f"there is no file {path}{near_path(path)}")
    # As for a script: modules in the same folder can be imported.
    sys.path.insert(0, str(path.parent))
    name = f"posttrain_reward_{path.stem}"
    location = importlib.util.spec_from_file_location(name, path)
    assert location is not None, "a path that ends in .py always has a loader"
    assert location.loader is not None
    module = importlib.util.module_from_spec(location)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        location.loader.exec_module(module)
    except BaseException as error:
        raise FunctionLoadError(f"{path} does not import:\n{_error_lines(error)}") from error
    return module


def _import_module(name: str, base_folder: Path) -> ModuleType:
    if str(base_folder) not in sys.path:
        sys.path.insert(0, str(base_folder))
    try:
        return importlib.import_module(name)
    except BaseException as error:
        raise FunctionLoadError(f"module {name!r} does not import:\n{_error_lines(error)}") from error


def _error_lines(error: BaseException) -> str:
    """The end of the traceback, without the frames of the import system and of posttrain."""
    ours = ("importlib", __file__)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not any(o in frame.filename for o in ours)
    ]
    lines = "".join(traceback.format_list(frames) + traceback.format_exception_only(error)).rstrip().splitlines()
    if len(lines) > _SHOWN_TRACEBACK_LINES:
        lines = ["  …", *lines[-_SHOWN_TRACEBACK_LINES:]]
    return "\n".join(lines)


def _find_callable(module: ModuleType, module_name: str, attribute: str) -> Callable[..., object]:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise FunctionLoadError(f"{module_name} has no {attribute!r}; {_callables_of(module)}")
        found = getattr(found, part)
    if isinstance(found, type):
        raise FunctionLoadError(
            f"{module_name}:{attribute} is a class: name a function, or an instance that can be called"
        )
    if not callable(found):
        raise FunctionLoadError(
            f"{module_name}:{attribute} is {found!r:.80} ({type(found).__name__}), not a function; "
            f"{_callables_of(module)}"
        )
    result: Callable[..., object] = found
    return result


def _callables_of(module: ModuleType) -> str:
    return _listed(
        name
        for name, value in vars(module).items()
        if callable(value)
        and not isinstance(value, type)
        and not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    )


def _listed(found: Iterable[str]) -> str:
    names = sorted(found)
    return f"the functions it has: {', '.join(names)}" if names else "it has no functions"


def _arguments_for(
    function: Callable[..., object], spec: str
) -> Callable[[ScoringItem], tuple[tuple[object, ...], JsonObject]]:
    """How to call the function: by keyword where its parameters have the known names, else with three in order."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have no signature
        return lambda item: (tuple(getattr(item, name) for name in _POSITIONS), {})
    parameters = list(signature.parameters.values())
    named = {p.name: _ARGUMENTS[p.name] for p in parameters if p.name in _ARGUMENTS and p.kind in _BY_KEYWORD}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        for name, field in _ARGUMENTS.items():
            if field not in named.values():
                named[name] = field
    if named and _binds(signature, (), named):
        return lambda item: ((), {name: getattr(item, field) for name, field in named.items()})
    known_in_place = all(
        _ARGUMENTS.get(p.name, position) == position for p, position in zip(parameters, _POSITIONS, strict=False)
    )
    if known_in_place and _binds(signature, _POSITIONS, {}):
        return lambda item: (tuple(getattr(item, name) for name in _POSITIONS), {})
    raise FunctionLoadError(
        f"{spec}{signature} cannot be called: its parameters must be some of {', '.join(_ARGUMENTS)} (in any order, "
        "others need a default), or exactly three: prompt, response, reference; or TRL's, with completions"
    )


def named_arguments(spec: str, base_folder: Path) -> str:
    """How `file.py:name` is written down: its name, and its three arguments where their names do not say what they are.
    The file is read, not executed."""
    node, name = _definition(spec, base_folder), spec.rpartition(":")[2]
    if node is not None:
        given = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        if len(given) == len(_POSITIONS) and not set(given) & {*_ARGUMENTS, "completions"} and not node.args.kwarg:
            return f"{name} ({', '.join(given)} are taken as {', '.join(_POSITIONS)})"
    return name


def is_written_for_batches(spec: str, base_folder: Path) -> bool:
    """Whether `file.py:name` has TRL's signature. The file is read, not executed."""
    node = _definition(spec, base_folder)
    return node is not None and "completions" in {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}


def why_absent(spec: str, base_folder: Path) -> str | None:
    """Why `file.py:name` names nothing, where that is certain. The file is read, not executed."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py"):
        return None
    path = base_folder / Path(file).expanduser()
    if not path.is_file():
        return f"there is no file {path}{near_path(path)}"
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:  # loading it says why
        return None
    if re.search(rf"\b{re.escape(name.split('.')[0])}\b|import \*|globals|vars\(|exec\(|[gs]etattr|__dict__", text):
        return None
    names = re.findall(r"^(?:async )?def ([^\W_]\w*)", text, re.MULTILINE)
    return f"{file} has no {name!r}; {_listed(names)}"


def _definition(spec: str, base_folder: Path) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    file, _, name = spec.rpartition(":")
    try:
        parsed = ast.parse((base_folder / Path(file).expanduser()).read_text("utf-8")) if file.endswith(".py") else None
    except (OSError, ValueError, SyntaxError):
        parsed = None
    for node in parsed.body if parsed is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    return None


def takes_batches(function: Callable[..., object]) -> bool:
    """Whether it has TRL's signature."""
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _batch_of_one(
    function: Callable[..., object], spec: str, as_messages: bool
) -> Callable[[ScoringItem], tuple[tuple[object, ...], JsonObject]]:
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    known = {p.name for p in parameters if p.kind in _BY_KEYWORD}
    required = {p.name for p in parameters if p.kind in _BY_KEYWORD and p.default is inspect.Parameter.empty}
    if missing := sorted(required & set(_TRAINER_ARGUMENTS)):
        raise FunctionLoadError(f"{spec} asks for {', '.join(missing)}, which only TRL's trainer has")

    def arguments(item: ScoringItem) -> tuple[tuple[object, ...], JsonObject]:
        values = {
            **item.metadata,
            "prompts": item.messages if as_messages else item.question,
            "completions": [{"role": "assistant", "content": item.response}] if as_messages else item.response,
            "completion_ids": list(item.token_ids or ()),
        }
        if missing := sorted(required - values.keys()):
            columns = ", ".join(map(str, item.metadata)) or "none"
            raise Unscored(f"the reward function asks for the column {missing[0]!r}; the row has the columns {columns}")
        return (), {name: [value] for name, value in values.items() if takes_all or name in known}

    return arguments


_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _binds(signature: inspect.Signature, positional: tuple[str, ...], named: dict[str, str]) -> bool:
    try:
        signature.bind(*positional, **named)
    except TypeError:
        return False
    return True


def awaiting_caller() -> Callable[..., object]:
    """Calls a function, which may be `async def`. There is one event loop for the worker's life: clients that a
    function keeps stay usable."""
    runner = asyncio.Runner()

    async def awaited(value: Awaitable[object]) -> object:
        return await value

    def call(function: Callable[..., object], *positional: object, **named: object) -> object:
        value = function(*positional, **named)
        return runner.run(awaited(value)) if inspect.isawaitable(value) else value

    return call


def seed_noise(key: str) -> None:
    random.seed(key.encode("utf-8", "surrogatepass"))  # a sampled text may hold half a character
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(random.getrandbits(32))
