"""Installs packages at the versions of a lock file into the environment of this Python, with uv.

    .venv/bin/python tools/install.py requirements/demo.txt

uv gets the index that pip is configured with. If it fails, pip installs the same versions, which takes longer.
"""

from __future__ import annotations

import os
import subprocess
import sys

TORCH = "requirements/torch.txt"
# Settings of pip, and the variables of uv that mean the same.
SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
}


def of_pip(setting: str) -> str:
    if value := os.environ.get(f"PIP_{setting.upper().replace('-', '_')}"):
        return value
    asked = [sys.executable, "-m", "pip", "config", "get", f"global.{setting}"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


def main() -> int:
    (lock,) = sys.argv[1:]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = {variable: of_pip(setting) for setting, variable in SETTINGS.items() if variable not in os.environ}
    # As pip does, the best version of all indexes is taken, not that of the first index that has one.
    environment = {**os.environ, "UV_INDEX_STRATEGY": "unsafe-best-match"} | {k: v for k, v in wanted.items() if v}
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    own = ["--no-deps", "--editable", "."]
    has_uv = subprocess.run([*pip, "uv>=0.8,<1"]).returncode == 0
    if has_uv and all(
        subprocess.run([*uv, *words], env=environment).returncode == 0 for words in (["-r", TORCH, "-r", lock], own)
    ):
        return 0
    print("uv could not install the packages; trying pip", file=sys.stderr)
    return max(subprocess.run([*pip, *words]).returncode for words in (["-r", TORCH], ["-r", lock], own))


if __name__ == "__main__":
    raise SystemExit(main())
