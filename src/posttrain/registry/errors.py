"""What can go wrong with a registry, in words for the user."""

from __future__ import annotations

from posttrain.errors import InputError


class RegistryError(InputError):
    """The registry, or what was asked of it, is not as it has to be; the message says which and what would be right."""


class RegistryBusy(RegistryError):
    """Somebody else is writing, and was still at it when the waiting time was over. Nothing was changed."""


class RegistryConflict(RegistryError):
    """The registry is no longer in the state that the caller expected. Nothing was changed."""
