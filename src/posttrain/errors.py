"""What the user can mend. The command line prints the message of an `InputError`, without a traceback, and exits with 64."""


class InputError(ValueError):
    """Bad config, data, reward function or checkpoint: the message names the place and what would be right."""
