"""Prints counts of the source with the goal for each: `make measure`, or with `--details` to list what is counted.

Everything is read from syntax trees, except for config fields, which are counted by the test that checks them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "posttrain"
SMALL_FILE_LINES = 60
TYPED_PACKAGES = ("build", "recipes", "roles", "rollouts")  # no `Any` in their signatures
NAMES_OF_RM = re.compile(r"Rm[A-Z]\w*")


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


def measure(modules: list[Module]) -> list[Count]:
    small = [m.name for m in modules if m.num_lines < SMALL_FILE_LINES and m.path.name != "__init__.py"]
    signatures = [name for m in modules if m.package in TYPED_PACKAGES for name in signatures_with_any(m)]
    twice, tangled = classes_defined_twice(modules), packages_in_cycles(modules)
    with_rm = [m.name for m in modules if uses_kind_rm(m)]
    unread = unread_config_fields()
    loop = next((m.num_lines for m in modules if m.name == "loop.py"), 0)
    return [
        Count("source lines", sum(m.num_lines for m in modules), 49_000),
        Count(f"files under {SMALL_FILE_LINES} lines, without __init__", len(small), 30, ", ".join(small)),
        Count("`Any`", sum(num_any(m.tree) for m in modules), 450),
        Count(f"signatures with `Any` in {', '.join(TYPED_PACKAGES)}", len(signatures), 0, ", ".join(signatures)),
        Count("public class names defined twice", len(twice), 0, "; ".join(twice)),
        Count("packages in an import cycle", len(tangled), 0, ", ".join(tangled)),
        Count("lines of loop.py", loop, 170),
        Count("files that know the kind rm", len(with_rm), 6, ", ".join(with_rm)),
        Count("config fields that nothing reads", len(unread), 0, ", ".join(unread)),
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
