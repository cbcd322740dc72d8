"""The one error that a user can cause here."""

from posttrain.errors import InputError


class CheckpointError(InputError):
    """A checkpoint that cannot be used by this run. The message names the file and what is wrong with it."""
