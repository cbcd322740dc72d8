"""Pages that are one file: no network, no fonts, no library; the style sheet, the script and the numbers of charts are
inside.

A page is a Jinja2 template that extends `assets/page.html` and takes parts (tiles, tables, charts) from
`assets/parts.html`. Values are escaped, so that text of models, datasets and configs cannot inject markup.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from posttrain.reporting.scales import label

ASSETS = Path(__file__).with_name("assets")
MAX_CHARACTERS = 4000  # of one text


def render_page(
    template: Path,
    *,
    title: str,
    facts: str,
    status: str = "",
    status_words: str = "",
    status_kind: str = "",
    **values: object,
) -> str:
    """The page of a template, in any folder. `facts` lie under the title; `status` is the badge beside it."""
    header = {
        "title": title,
        "facts": facts,
        "status": status,
        "status_words": status_words,
        "status_kind": status_kind,
    }
    return _environment(template.parent).get_template(template.name).render(**header, **values)


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
    found.globals["asset"] = lambda name: Markup((ASSETS / name).read_text("utf-8"))
    found.filters["label"] = lambda value: label(value) if isinstance(value, int | float) else "–"
    found.filters["cut"] = lambda value, where="": shortened(str(value), MAX_CHARACTERS, where)
    return found


def interval_mark(low: float, estimate: float, high: float, threshold: float) -> Html:
    """The part `interval` alone."""
    return Html(_environment(ASSETS).get_template("parts.html").module.interval(low, estimate, high, threshold))  # type: ignore[attr-defined]


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html(value: object) -> Html:
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(parts: Iterable[object]) -> Html:
    return Html("".join(map(html, parts)))


def tag(name: str, *content: object, kind: str = "") -> Html:
    """`<name class="kind">content</name>`"""
    attribute = f' class="{escape(kind)}"' if kind else ""
    return Html(f"<{name}{attribute}>{join(content)}</{name}>")


def page(title: str, *body: object, style: str = "") -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · posttrain</title><style>{_asset('theme.css')}{_asset('report.css')}{style}</style></head>"
        f"<body>{tag('main', *body)}</body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("posttrain.reporting") / "assets" / name).read_text("utf-8")


def header(title: str, facts: str, status: object = "", *, status_kind: str = "") -> Html:
    badge = tag("p", status, kind=f"status {status_kind}".strip()) if status else ""
    return tag("header", tag("div", tag("h1", title), tag("p", facts, kind="facts")), badge)


def section(title: str, *content: object) -> Html:
    return tag("section", tag("h2", title), *content)


def note(text: object) -> Html:
    return tag("p", text, kind="note")


def bullets(lines: Iterable[object]) -> Html:
    return tag("ul", *(tag("li", line) for line in lines))


def folded(summary: object, *content: object, kind: str = "", is_open: bool = False) -> Html:
    attributes = (f' class="{escape(kind)}"' if kind else "") + (" open" if is_open else "")
    return Html(f"<details{attributes}>{tag('summary', summary)}{join(content)}</details>")


def tile(name: str, value: str, detail: str = "", *, kind: str = "") -> Html:
    """One key figure. `kind` is good, bad or nothing."""
    parts = (tag("div", name, kind="name"), tag("div", value, kind="value"), tag("div", detail, kind="detail"))
    return tag("div", *parts, kind=f"tile {kind}".strip())


def tiles(shown: Iterable[Html]) -> Html:
    return tag("section", *shown, kind="tiles")


def table(
    headings: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Collection[int] = (), kind: str = ""
) -> Html:
    """`numbers` are the indices of the columns that are aligned to the right. Without headings there is no first
    row."""

    def line(name: str, cells: Sequence[object]) -> Html:
        return tag("tr", *(tag(name, cell, kind="n" if index in numbers else "") for index, cell in enumerate(cells)))

    head = [line("th", headings)] if headings else []
    return tag("table", *head, *(line("td", row) for row in rows), kind=kind)


def when(timestamp: object) -> str:
    """2025-01-31T12:34:56+00:00 as 2025-01-31 12:34 UTC."""
    return str(timestamp)[:16].replace("T", " ") + " UTC"


def shortened(text: str, max_characters: int, where: str = "") -> str:
    """The beginning of a long text, and how much of it is left out."""
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}\n… {len(text) - max_characters:,} more characters{where}"
