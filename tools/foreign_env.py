#!/usr/bin/env python3
"""Makes a Python environment for OpenEnv or verifiers, whose requirements exclude ours; `env.<name>.python` names it.

python tools/foreign_env.py openenv .openenv-venv
python tools/foreign_env.py verifiers .verifiers-venv my-taskset      with packages of environments
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

# Those that posttrain was tried with.
PACKAGES = {"openenv": "openenv==0.10.0", "verifiers": "verifiers==0.4.0"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=PACKAGES)
    parser.add_argument("folder", type=Path, help="where the environment is made")
    parser.add_argument("packages", nargs="*", help="further packages, as pip names them")
    args = parser.parse_args()
    python = args.folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", args.folder], check=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, PACKAGES[args.kind], *args.packages], check=True)
    (args.folder / ".installed").touch()
    print(f"{PACKAGES[args.kind]}: env.<name>.python={python.absolute()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
