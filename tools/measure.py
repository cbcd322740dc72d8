"""Prints counts of the source with the goal for each: `make measure`, or with `--details` to list what is counted.

Everything is read from syntax trees, except for config fields, which are counted by the test that checks them, and the
walk through a run, which docs/concepts.md lists. `make measure ROOT=folder` counts another checkout.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(os.environ.get("ROOT") or Path(__file__).parents[1])
SOURCE = ROOT / "src" / "posttrain"
SMALL_FILE_LINES = 60
TYPED_PACKAGES = ("build", "recipes", "roles", "rollouts")  # no `Any` in their signatures
NAMES_OF_RM = re.compile(r"Rm[A-Z]\w*")
MAX_COLUMNS = 120
MAX_HELPER_LINES = 3
LAST_TEST_RUN = "results/make_test.json"  # written by `make test`


@dataclass(frozen=True)
class Module:
    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.relative_to(SOURCE).as_posix()

    @property
    def package(self) -> str:
        """The top-level package or module under posttrain."""
        return self.name.split("/")[0].removesuffix(".py")

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


@dataclass(frozen=True)
class Count:
    what: str
    value: int
    goal: int
    details: str = ""


def read_modules() -> list[Module]:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    return [Module(path, text, ast.parse(text)) for path, text in texts.items()]


def num_any(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def signatures_with_any(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            annotations = [node.returns, *(argument.annotation for argument in named if argument is not None)]
            if any(annotation is not None and num_any(annotation) for annotation in annotations):
                yield f"{module.name}:{node.name}"


def classes_defined_twice(modules: list[Module]) -> list[str]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    return [f"{name} ({', '.join(files)})" for name, files in sorted(places.items()) if len(files) > 1]


def packages_in_cycles(modules: list[Module]) -> list[str]:
    """Packages that can reach themselves over imports, those inside functions included."""
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for parts in (name.split(".") for name in names):
                if parts[0] == "posttrain" and len(parts) > 1 and parts[1] != module.package:
                    edges[module.package].add(parts[1])

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    return [package for package in sorted(edges) if package in reachable(package)]


def uses_kind_rm(module: Module) -> bool:
    """Whether the file names the kind of run `rm` or a class of its config."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and node.value == "rm":
            return True
        name = (
            node.id if isinstance(node, ast.Name) else node.name if isinstance(node, ast.alias | ast.ClassDef) else ""
        )
        if NAMES_OF_RM.fullmatch(name):
            return True
    return False


def unread_config_fields() -> list[str]:
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "config"))
    from test_every_field_is_read import RESOLVED_BY_CONFIG, sections, unread  # type: ignore[import-not-found]

    return sorted(unread(sections()) - set(RESOLVED_BY_CONFIG))


def num_code_lines(module: Module) -> int:
    """Lines that are not blank, not a comment and not part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in silent:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def num_statements(module: Module) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(module.tree))


def helpers_called_once(modules: list[Module]) -> list[str]:
    """Private functions of at most `MAX_HELPER_LINES` lines that one place uses."""
    uses: Counter[str] = Counter()
    found: list[tuple[str, str]] = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name, body = node.name, [part for part in node.body if not _is_docstring(part)]
                is_private = name.startswith("_") and not name.startswith("__") and not node.decorator_list
                if is_private and body and (body[-1].end_lineno or 0) - body[0].lineno < MAX_HELPER_LINES:
                    found.append((name, f"{module.name}:{node.lineno} {name}"))
    return [place for name, place in found if uses[name] == 1]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def files_with(modules: list[Module], pattern: str) -> list[str]:
    return [module.name for module in modules if re.search(pattern, module.text)]


def walk_of_a_run() -> list[str]:
    """The files of docs/concepts.md from `posttrain grpo` to the optimizer step and the checkpoint, in the order of
    calls.
    """
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    part = page.partition("<!-- walk -->")[2].partition("<!-- end of walk -->")[0]
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.py)`", part)))


def measure(modules: list[Module]) -> list[Count]:
    small = [m.name for m in modules if m.num_lines < SMALL_FILE_LINES and m.path.name != "__init__.py"]
    signatures = [name for m in modules if m.package in TYPED_PACKAGES for name in signatures_with_any(m)]
    twice, tangled = classes_defined_twice(modules), packages_in_cycles(modules)
    with_rm = [m.name for m in modules if uses_kind_rm(m)]
    unread = unread_config_fields()
    loop = next((m.num_lines for m in modules if m.name == "loop.py"), 0)
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    names = sorted(path.name for path in SOURCE.iterdir() if path.name not in ("__pycache__", "py.typed"))
    walk = walk_of_a_run()
    of_config = [name for name in walk if name.startswith("config/")]
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("src", "tests", "bench", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    helpers = helpers_called_once(modules)
    knows_85 = [
        m.name
        for m in modules
        if any(isinstance(n, ast.Constant) and type(n.value) is int and n.value == 85 for n in ast.walk(m.tree))
    ]
    renames = files_with(modules, r"\bos\.(?:replace|rename)\(|\.rename\(")
    digests = files_with(modules, r"\bhashlib\b")
    return [
        Count("source lines", sum(m.num_lines for m in modules), 69_000),
        Count("source lines without blanks, docstrings, comments", sum(map(num_code_lines, modules)), 51_000),
        Count("statements of the source (syntax tree)", sum(map(num_statements, modules)), 43_000),
        Count("test lines", sum(text.count("\n") for text in tests), 60_000),
        Count("names in src/posttrain", len(names), 24, ", ".join(names)),
        Count("files of the walk from `posttrain grpo` to a checkpoint", len(walk), 60, ", ".join(walk)),
        Count("of them config", len(of_config), 6, ", ".join(of_config)),
        Count(f"private functions used once, up to {MAX_HELPER_LINES} lines", len(helpers), 57, "; ".join(helpers)),
        Count(f"lines over {MAX_COLUMNS} columns", len(wide), 0, ", ".join(wide[:200])),
        Count("files with the number of exit code 85", len(knows_85), 1, ", ".join(knows_85)),
        Count("files that rename files themselves", len(renames), 1, ", ".join(renames)),
        Count("files that call hashlib", len(digests), 1, ", ".join(digests)),
        Count(f"files under {SMALL_FILE_LINES} lines, without __init__", len(small), 30, ", ".join(small)),
        Count("`Any`", sum(num_any(m.tree) for m in modules), 450),
        Count(f"signatures with `Any` in {', '.join(TYPED_PACKAGES)}", len(signatures), 0, ", ".join(signatures)),
        Count("public class names defined twice", len(twice), 0, "; ".join(twice)),
        Count("packages in an import cycle", len(tangled), 0, ", ".join(tangled)),
        Count("lines of loop.py", loop, 170),
        Count("files that know the kind rm", len(with_rm), 6, ", ".join(with_rm)),
        Count("config fields that nothing reads", len(unread), 0, ", ".join(unread)),
        *last_test_run(),
    ]


def last_test_run() -> list[Count]:
    path = ROOT / LAST_TEST_RUN
    if not path.exists():
        return []
    run = json.loads(path.read_text())
    return [
        Count("seconds of `make test`, the last time", round(run["wall_s"]), 480),
        Count("CPU seconds of `make test`, the last time", round(run["cpu_s"]), 900),
    ]


def main() -> int:
    modules = read_modules()
    counts = measure(modules)
    print(f"{'':<58} {'now':>7} {'goal':>7}")
    for count in counts:
        mark = "" if count.value <= count.goal else "  over"
        print(f"{count.what:<58} {count.value:>7,} {count.goal:>7,}{mark}")
    if "--details" in sys.argv[1:]:
        for count in counts:
            if count.details:
                print(f"\n{count.what}: {count.details}")
    return 0 if all(count.value <= count.goal for count in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
