"""Pages that are one file: no network, no fonts, no library; the style sheet, the script and the numbers of charts are
inside.

A page is a Jinja2 template that extends `assets/page.html` and takes parts (tiles, tables, charts) from
`assets/parts.html`. Values are escaped, so that text of models, datasets and configs cannot inject markup.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from posttrain.files.digests import running_sha256
from posttrain.reporting.charts import label

ASSETS = Path(__file__).with_name("assets")
MAX_CHARACTERS = 4000  # of one text


def render_page(
    template: Path, *, status: str = "", status_words: str = "", status_kind: str = "", **values: object
) -> str:
    """The page of a template, in any folder. `facts` lie under the `title`; `status` is the badge beside it."""
    badge = {"status": status, "status_words": status_words, "status_kind": status_kind}
    return _environment(template.parent).get_template(template.name).render(**badge, **values)


@cache
def _environment(folder: Path) -> Environment:
    found = Environment(
        loader=FileSystemLoader([folder, ASSETS]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    found.globals["asset"] = asset
    script = asset("chart.js") + asset("page.js")
    # The only script that a browser runs in a page: not one in a text, should one escape being escaped.
    found.globals["script"] = script
    found.globals["script_digest"] = "sha256-" + b64encode(running_sha256(script.encode()).digest()).decode()
    found.filters["label"] = lambda value: label(value) if isinstance(value, int | float) else "–"
    found.filters["cut"] = lambda value, where="": shortened(str(value), MAX_CHARACTERS, where)
    return found


def asset(name: str) -> Markup:
    return Markup((ASSETS / name).read_text("utf-8"))


def when(timestamp: object) -> str:
    """2025-01-31T12:34:56+00:00 as 2025-01-31 12:34 UTC."""
    return str(timestamp)[:16].replace("T", " ") + " UTC"


def shortened(text: str, max_characters: int, where: str = "") -> str:
    """The beginning of a long text, and how much of it is left out."""
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}\n… {len(text) - max_characters:,} more characters{where}"
