"""The image of a run: its base has a digest, and its packages exact versions with hashes that fit pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[4]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LOCK = (ROOT / "requirements" / "image.txt").read_text(encoding="utf-8")


def pins(python: str) -> dict[str, Requirement]:
    """What pip installs with that Python on Linux."""
    place = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    place |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    lines = re.findall(r"^([a-zA-Z0-9][^\\\n]*)", LOCK, re.MULTILINE)
    found = [Requirement(line.strip()) for line in lines]
    kept = [one for one in found if one.marker is None or one.marker.evaluate(place)]
    by_name = {canonicalize_name(one.name): one for one in kept}
    assert len(by_name) == len(kept), "a package has one version"
    return by_name


def test_every_package_has_an_exact_version_and_a_hash() -> None:
    for entry in re.split(r"\n(?=[a-zA-Z0-9])", re.sub(r"(?m)^#.*\n", "", LOCK)):
        assert re.match(r"[\w.\[\],-]+==[\w.]+( ;.*)? \\\n +--hash=sha256:[0-9a-f]{64}\b", entry), entry[:200]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_versions_fit_the_dependencies_of_the_package(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["ray"], *extras["s3"], *project["build-system"]["requires"]]
    locked = pins(python)
    for requirement in map(Requirement, wanted):
        if requirement.name == "torch":
            assert "torch" not in locked, "it is that of the base image"
            continue
        (exact,) = locked[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(exact.version), f"{requirement}: make lock"


def test_the_image_installs_them_and_nothing_else() -> None:
    installs = re.findall(r"pip install (.*?)(?:\n(?! )|$)", DOCKERFILE.replace("\\\n", ""), re.DOTALL)
    assert len(installs) == 2
    assert "--no-deps --require-hashes --requirement requirements/image.txt" in installs[0]
    assert "--no-index" in installs[1]


@pytest.mark.parametrize(
    ("base", "code"),
    [
        ("nvcr.io/nvidia/pytorch@sha256:" + "0a" * 32, 0),
        ("nvcr.io/nvidia/pytorch:26.02-py3", 64),
        ("nvcr.io/nvidia/pytorch@sha256:0a", 64),
        ("", 64),
    ],
)
def test_a_base_without_a_digest_is_refused(base: str, code: int) -> None:
    (check,) = re.findall(r"^RUN (echo .*)$", DOCKERFILE, re.MULTILINE)
    done = subprocess.run(
        ["sh", "-c", check], env={"BASE": base, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == code
    assert code == 0 or "give its digest" in done.stderr
