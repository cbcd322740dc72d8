"""Which dependencies of pyproject.toml have a release that our bounds exclude. Asks the package index.

Prints a line for each; always exits with 0, so that a release of others does not fail a build.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def newest(name: str) -> Version | None:
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", name],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    first = asked.stdout.partition("\n")[0]  # "torch (2.15.0)"
    return Version(first.partition("(")[2].rstrip(")")) if "(" in first else None


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    written = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    wanted = {one.name: one for one in map(Requirement, written) if one.name != "posttrain"}
    behind = 0
    for name, requirement in sorted(wanted.items()):
        version = newest(name)
        if version is None:
            print(f"{name}: the package index has no answer")
        elif not requirement.specifier.contains(version, prereleases=True):
            behind += 1
            print(f"{name}: {version} is excluded by {requirement.specifier}")
    print(f"{behind} of {len(wanted)} dependencies have a newer release than pyproject.toml allows")


if __name__ == "__main__":
    main()
