"""Texts from Jinja2 templates that are files beside the code: manifests, scripts, model cards."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render_text(template: Path, write: Callable[[object], str] | None = None, **values: object) -> str:
    """`write` writes every value, such as one of another language than plain text."""
    return _templates(template.parent, write).get_template(template.name).render(values)


@cache
def _templates(folder: Path, write: Callable[[object], str] | None) -> Environment:
    return Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=write,
    )
