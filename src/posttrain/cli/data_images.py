"""`posttrain data inspect` of rows with images: counts, formats and sizes, and a page with thumbnails."""

from __future__ import annotations

import argparse
import json
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from posttrain.cli.tables import console, facts
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.reporting.image_files import reduced
from posttrain.reporting.pages import ASSETS, render_page

if TYPE_CHECKING:
    from posttrain.data.entries import Entry
    from posttrain.data.sources import Row

ROWS_PEEKED = 64
MAX_SHOWN = 200  # rows on the page
THUMBNAIL_SIDE = 192
MAX_TEXT = 400


@dataclass
class _Images:
    """What was found. Of each distinct image, its size in pixels and bytes."""

    rows: int = 0
    rows_with_images: int = 0
    images: int = 0
    sizes: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    shown: list[JsonObject] = field(default_factory=list)

    def add(self, row: Row, with_pictures: bool) -> None:
        self.rows += 1
        self.rows_with_images += bool(row.images)
        self.images += max(len(row.image_column), len(row.images))
        for image in row.images.values():
            if image.digest not in self.sizes:
                self.formats[image.format] += 1
            self.sizes[image.digest] = (image.width, image.height, image.num_bytes)
        if with_pictures and row.images and len(self.shown) < MAX_SHOWN:
            images = [(one, b64encode(reduced(one, THUMBNAIL_SIDE)).decode()) for one in row.images.values()]
            pictures = [
                (f"{one.width} × {one.height} {one.format}", f"data:image/jpeg;base64,{jpeg}") for one, jpeg in images
            ]
            self.shown.append({"where": row.where, "values": _text(row), "pictures": pictures})

    def as_dict(self) -> JsonObject:
        counts = {name: getattr(self, name) for name in ("rows", "rows_with_images", "images")}
        numbers = zip(("width", "height", "bytes"), zip(*self.sizes.values(), strict=True), strict=True)
        ranges = {name: {"min": min(v), "median": sorted(v)[len(v) // 2], "max": max(v)} for name, v in numbers}
        return {**counts, "distinct_images": len(self.sizes), "formats": dict(self.formats), **ranges}


def inspect_images(args: argparse.Namespace) -> bool:
    """Shows the images if the rows have some and are no labelled traces; False otherwise."""
    from posttrain.data.entries import Entry

    entries = [Entry(data_path=path, image_key=args.image_key, image_dir=args.image_dir) for path in args.paths]
    if not any(_has_images(entry, args.reward) for entry in entries):
        if option := "--html" if args.html else "--image-key" if args.image_key else "":
            raise InputError(f"{option}: the first rows of {' '.join(args.paths)} have no images")
        return False
    if args.html and not args.html.parent.is_dir():
        raise InputError(f"--html: the folder {args.html.parent} does not exist")
    found = _Images()
    for entry in entries:
        for row in entry.rows(None):
            found.add(row, args.html is not None)
    numbers, name = found.as_dict(), " ".join(args.paths)
    lines = {key.replace("_", " "): _words(value) for key, value in numbers.items()}
    if args.html:
        page = render_page(ASSETS / "images.html", title=f"Images of {name}", facts="", numbers=lines, rows=found.shown)
        args.html.write_text(page, encoding="utf-8")
    if args.json:
        print(json.dumps({"path": name, **numbers}, indent=2))
    else:
        console(soft_wrap=False).print(facts({"rows of": name, **lines, "page": str(args.html or "")}))
    return True


def _has_images(entry: Entry, reward: str) -> bool:
    try:
        return any(
            reward not in row.values and entry.holds_images(row) for row in islice(entry.raw_rows(), ROWS_PEEKED)
        )
    except InputError:
        return False


def _words(value: object) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in value.items()) if isinstance(value, dict) else f"{value:,}"


def _text(row: Row) -> str:
    from posttrain.data.image_rows import without_marks

    return without_marks(json.dumps(dict(row.values), ensure_ascii=False, default=str))[:MAX_TEXT]
