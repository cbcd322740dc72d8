"""What import-linter cannot check: what is loaded at run time, and imports that must be inside functions.

Which package may import which is in pyproject.toml ([tool.importlinter]) and checked by `make lint`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "posttrain"
HEAVY = ("torch", "transformers", "numpy", "peft", "datasets", "ray", "pyarrow", "math_verify")


@pytest.mark.parametrize(
    "package", ["math_verify", "datasets", "gguf", "mlflow", "wandb", "trackio", "swanlab", "tensorboard", "pandas"]
)
def test_slow_optional_packages_are_imported_inside_functions(package: str) -> None:
    importing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if any(name == package or name.startswith(f"{package}.") for name in names):
                importing.append(str(path.relative_to(PACKAGE)))
    assert importing == []


def test_source_does_not_mention_files_outside_the_repository() -> None:
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".py", ".yaml", ".js", ".css"):
            text = path.read_text()
            assert not [word for word in ("../shared", "shared/seeds", "tiny_models") if word in text], path


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
def test_help_and_config_load_no_heavy_packages(arguments: list[str]) -> None:
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


def test_import_posttrain_loads_no_heavy_packages_and_knows_its_names() -> None:
    script = (
        "import sys, posttrain\n"
        "assert callable(posttrain.grpo) and 'grpo' in dir(posttrain)\n"
        f"print(*[name for name in {(*HEAVY, 'pydantic', 'pandas')!r} if name in sys.modules])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == ""


@pytest.mark.parametrize(
    "program", ["environments/worker.py", "environments/sandbox/guest.py", "apps/launch/local/namespaces.py"]
)
def test_programs_of_other_processes_start_without_posttrain(program: str) -> None:
    """A worker gets its `sys.path` over a pipe; the others have no posttrain at all."""
    script = "import runpy, sys; sys.modules['posttrain'] = None; runpy.run_path(sys.argv[1])"
    subprocess.run([sys.executable, "-I", "-c", script, str(PACKAGE / program)], check=True, timeout=60)
