"""What things hold, as hashes: models, traces. What the hashes are for is not known here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.hashing import FileHashes


def traces_content(path: str | Sequence[str], hashes: FileHashes) -> list[str]:
    """The content of each file of traces, in the order in which they are read. Names do not count.

    Files behind a URL are not read for this: their store says what changes when they do (an ETag, or size and time).
    """
    from posttrain.data.traces.files import locate

    contents = []
    for file in locate(path):
        protocol = file.filesystem.protocol
        names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        if "file" in names or "local" in names:
            contents.append(hashes.of(Path(file.location)))
        else:
            contents.append(f"{file.shown}:{file.size}:{file.filesystem.checksum(file.location)}")
    return contents


def model_identity(reference: str) -> str:
    """Of a local model, its files; a name on the hub stands for itself."""
    from posttrain.models.accepted_names import resolve_model
    from posttrain.models.fingerprint import model_fingerprint

    found = resolve_model(reference)
    return model_fingerprint(found) or found.model
