"""Errors of the registry."""

from __future__ import annotations

from posttrain.errors import InputError


class RegistryError(InputError):
    """The registry or a request to it is invalid; the message names the cause and the remedy."""


class RegistryBusy(RegistryError):
    """Another process held the lock longer than the waiting time. Nothing was changed."""


class RegistryConflict(RegistryError):
    """The registry is no longer in the state that the caller expected. Nothing was changed."""
