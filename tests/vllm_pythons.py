"""Interpreters for `vllm_cfg.python`: one that finds the stand-in, and the real one that `make test-vllm` has made."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

REAL = os.environ.get("POSTTRAIN_VLLM_PYTHON", "")
NO_REAL = "POSTTRAIN_VLLM_PYTHON names no Python with vLLM; `make test-vllm` makes one and runs these tests"


def stand_in(folder: Path) -> str:
    """The Python of this environment, to which `import vllm` gives tests/vllm_stand_in.py."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("vllm_stand_in.py"), folder / "vllm.py")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)
