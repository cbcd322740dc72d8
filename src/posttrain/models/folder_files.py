"""The files of a model's folder: no named pipes, and no links to files that are not the model's."""

from __future__ import annotations

import os
from pathlib import Path

from posttrain.errors import InputError


def refuse_pipes(folder: Path) -> None:
    """InputError if a file there is a named pipe: the libraries that read models would wait for ever."""
    for file in folder.iterdir():
        if file.is_fifo():
            raise InputError(f"{file}: a named pipe, not a file")


def refuse_links_outside(folder: Path) -> None:
    """InputError if a link below `folder` leads out of it. For folders that are copied: the target may be confidential.

    The hub's cache consists of links, to files elsewhere in the cache.
    """
    from huggingface_hub import constants

    own = folder.resolve()
    allowed = [own, Path(constants.HF_HUB_CACHE).resolve()]
    if own.parent.name == "snapshots":  # a copy of the hub's cache: models--owner--name/snapshots/revision
        allowed.append(own.parent.parent)
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in allowed):
                raise InputError(
                    f"{path}: a link to {path.resolve()}, outside of {folder}; put the file itself there if it is the model's"
                )
