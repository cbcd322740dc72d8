"""Who may import what. Read from the source, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "posttrain"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`posttrain.config.loader` for src/posttrain/config/loader.py."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """The full name of everything that a file imports: modules, and for `from a import b` also `a.b`."""
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node) and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)


def _is_import_call(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__") and bool(node.args)


def importers(package: str) -> set[str]:
    """The files, relative to the package, that import a package or something in it."""
    return {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        if any(name == package or name.startswith(f"{package}.") for name in imports_of(path))
    }


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 50
    assert "posttrain.types.Task" in set(imports_of(PACKAGE / "roles.py"))
    assert "config/loader.py" in importers("posttrain.config.tree")


def test_ray_is_imported_in_its_own_files_only() -> None:
    found = importers("ray")
    assert found, "the files that use Ray"
    assert all(name.startswith("orchestration/ray_") for name in found), found


def test_vllm_is_imported_in_its_engine_only() -> None:
    assert importers("vllm") <= {"engines/vllm.py"}


def test_mlflow_is_imported_in_the_store_of_the_registry_only() -> None:
    assert importers("mlflow") == {"registry/store.py"}


@pytest.mark.parametrize("package", ["torch", "transformers", "numpy", "peft", "datasets", "ray"])
def test_config_imports_nothing_heavy(package: str) -> None:
    assert not [name for name in importers(package) if name.startswith("config/")]


def test_config_imports_nothing_of_ours_but_itself_and_errors() -> None:
    for path in (PACKAGE / "config").rglob("*.py"):
        ours = [name for name in imports_of(path) if within(name, ("posttrain",))]
        strangers = [name for name in ours if not within(name, ("posttrain.config", "posttrain.errors"))]
        assert not strangers, f"{path.name} imports {strangers}"


ALGORITHMS_MAY_USE = (
    "posttrain.algorithms",
    "posttrain.config",
    "posttrain.data.packing",
    "posttrain.errors",
    "posttrain.rollouts",
    "posttrain.policy.objectives",
    "posttrain.roles",
    "posttrain.types",
)


def test_algorithms_know_roles_and_values_only() -> None:
    for path in (PACKAGE / "algorithms").rglob("*.py"):
        ours = [name for name in imports_of(path) if within(name, ("posttrain",))]
        strangers = [name for name in ours if not within(name, ALGORITHMS_MAY_USE)]
        assert not strangers, f"{path.name} imports {strangers}"


def test_types_and_roles_know_nobody() -> None:
    assert not [name for name in imports_of(PACKAGE / "types.py") if within(name, ("posttrain",))]
    ours = [name for name in imports_of(PACKAGE / "roles.py") if within(name, ("posttrain",))]
    assert all(within(name, ("posttrain.types",)) for name in ours)


def test_only_the_composition_root_chooses_the_ray_workers() -> None:
    assert importers("posttrain.orchestration.ray_workers") == {"build.py"}


@pytest.mark.parametrize("package", ["math_verify", "datasets", "gguf", "mlflow"])
def test_slow_optional_packages_are_imported_inside_functions(package: str) -> None:
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not [name for name in names if within(name, (package,))], path


def test_the_package_knows_nothing_of_tests_and_of_its_surroundings() -> None:
    assert not importers("tests")
    assert not importers("tiny_models")
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".py", ".yaml", ".js", ".css"):
            text = path.read_text()
            for word in ("../shared", "shared/seeds"):
                assert word not in text, f"{path} mentions {word}"


HEAVY = ("torch", "transformers", "numpy", "peft", "datasets", "ray", "pyarrow", "math_verify")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["grpo", "--help"],
        ["serve", "--help"],
        ["config", "show", "grpo"],
        ["config", "check", "dpo"],
    ],
    ids=" ".join,
)
def test_help_and_config_answer_without_heavy_imports(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from posttrain.cli.main import main\n"
        "try:\n    code = main(sys.argv[1:])\n"
        "except SystemExit as end:\n    code = end.code or 0\n"
        f"print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])\n"
        "sys.exit(code)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "LOADED"


def test_training_in_one_process_does_not_import_ray() -> None:
    script = (
        "import sys, posttrain.build; print('ray' in sys.modules, 'vllm' in sys.modules, 'math_verify' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["False", "False", "False"], ended.stderr
