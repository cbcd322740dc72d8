"""The parts of a self-contained HTML page: skeleton, header, tiles, sections, tables.

No network, no fonts, no library: one style sheet for every page, and on request one small script. Text is escaped unless
it is `Html`, so that text of models, datasets and configs cannot inject markup.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape
from importlib.resources import files


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


def page(title: str, *body: object, style: str = "", with_script: bool = False) -> str:
    """A whole document. `with_script` adds the one that reads values off the charts under the pointer."""
    script = f"<script>{_asset('report.js')}</script>" if with_script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · posttrain</title><style>{_asset('theme.css')}{_asset('report.css')}{style}</style></head>"
        f"<body>{tag('main', *body)}{script}</body></html>\n"
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
    """`numbers` are the indices of the columns that are aligned to the right. Without headings there is no first row."""

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
