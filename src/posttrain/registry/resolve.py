"""`registry:name@production` as a model: the name that `serve`, `eval` and `chat` accept, turned into a folder."""

from __future__ import annotations

from pathlib import Path

from posttrain.models.accepted_names import REGISTRY_PREFIX
from posttrain.registry.errors import RegistryError
from posttrain.registry.registry import DEFAULT_WAIT_S, Registry
from posttrain.registry.version import ModelVersion


def resolve_version(
    reference: str, *, registry: str | Path | None = None, verify: bool = True, wait_s: float = DEFAULT_WAIT_S
) -> ModelVersion:
    """The version that `registry:NAME@WHICH` or `NAME@WHICH` names; WHICH is production (the default), canary or a number.

    Its files are at `.path`, compared with their checksums (`verify` False: only with their sizes). `registry` is where
    the registry is: POSTTRAIN_REGISTRY, or ./registry, if it is not given.
    """
    name, at, which = reference.removeprefix(REGISTRY_PREFIX).partition("@")
    if not name or (at and not which):
        raise RegistryError(
            f"{reference!r}: expected registry:NAME@production, registry:NAME@canary or registry:NAME@3 ('registry:' may be "
            "left out)"
        )
    return Registry(registry, wait_s=wait_s).resolve(name, which or "production", verify=verify)
