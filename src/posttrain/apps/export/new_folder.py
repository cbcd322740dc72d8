"""Creates a folder atomically: it is written under a temporary name beside the target, and renamed."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from posttrain.errors import InputError
from posttrain.files import durable


def check_target(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file; accepted: a folder that does not exist yet, or is empty")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise InputError(f"{target} is not empty; name another folder, or replace it with --force")
    if not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise InputError(
            f"{target} holds something else than a model, which --force does not replace; name another folder"
        )


@contextmanager
def new_folder(target: Path, force: bool) -> Iterator[Path]:
    """A folder to write into that becomes `target` on leaving; on an error nothing is left, and `target` is as it was."""
    target = target.resolve()  # a link stays, and the folder that it leads to is written
    try:
        durable.make_folder(target.parent)
        _remove_abandoned(target)
        unfinished = target.with_name(f".{target.name}.{_owner()}")
        unfinished.mkdir()
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error}") from error
    try:
        yield unfinished
        check_target(target, force)  # another process may have written there meanwhile
        if target.exists():
            replaced = target.with_name(f".{target.name}.replaced-{_owner()}")
            os.rename(target, replaced)
            os.rename(unfinished, target)
            shutil.rmtree(replaced)
        else:
            os.rename(unfinished, target)
        durable.sync_folder(target.parent)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, InputError):
            raise InputError(f"{target} cannot be written: {error}") from error
        raise


def _owner() -> str:
    return f"unfinished-{socket.gethostname()}-{os.getpid()}"


def _remove_abandoned(target: Path) -> None:
    """Remove what a killed conversion to the same target left. The folder that it was about to replace is restored, unless
    there is another one already."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(replaced-)?unfinished-{re.escape(socket.gethostname())}-(\d+)")
    for entry in target.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if not match or (psutil.pid_exists(int(match[2])) and int(match[2]) != os.getpid()):
            continue
        if match[1] and not target.exists():
            os.rename(entry, target)
        else:
            shutil.rmtree(entry, ignore_errors=True)
