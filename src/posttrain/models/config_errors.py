"""What transformers raises for a model's config with impossible values, and what to tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError

# Raised while a config is read or the modules of a model are built by it. ValueError is also what transformers says of a
# kind of model that it does not know.
CONFIG_ERRORS = (StrictDataclassError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)


def explain_config_error(error: Exception, config: Mapping[str, Any]) -> str:
    """What transformers, building a model by `config`, did not like of it, in one line."""
    if isinstance(error, KeyError) and error.args:
        # A look-up by a config's value, such as an activation's name; the error knows the value alone.
        keys = [key for key, value in config.items() if value == error.args[0]]
        return f"{keys[0]} {error.args[0]!r} is not known to transformers" if keys else f"KeyError: {error}"
    lines = str(error).split("\n")
    if type(error).__name__.startswith("StrictDataclass"):
        # The first line has the field, the second what is wrong with it.
        return " ".join(line.strip() for line in lines)
    first = next((line.strip() for line in lines if line.strip()), "")
    plain = isinstance(error, (ValueError, OSError)) and first
    return first if plain else f"{type(error).__name__}: {first}".removesuffix(": ")
