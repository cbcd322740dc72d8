"""What a user gets for a config that cannot be used."""

from __future__ import annotations

from posttrain.errors import InputError


class ConfigError(InputError):
    """A config problem that the user can repair; the message names the key, where it was set, and the remedy."""
