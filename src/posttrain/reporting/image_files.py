"""`images/` of a run folder: what the prompts of its rollouts show, each image once, for the report and the dashboard.

A small image is kept as it came, a larger one as a JPEG of at most `MAX_SIDE` pixels. The name is the digest of the
image itself, whatever is kept of it.
"""

from __future__ import annotations

import io
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.files import durable
from posttrain.files.json_files import JsonMapping, JsonObject
from posttrain.reporting.run_files import IMAGES_FOLDER

if TYPE_CHECKING:
    from posttrain.types import ImageRef

MAX_SIDE = 512  # pixels
MAX_BYTES = 128 << 10  # of one file
MAX_FILES = 4096  # of a run; further images are named in its rollouts and not kept
_NAME = re.compile(r"[0-9a-f]{64}\.(png|jpg|webp|gif|bmp)")
_ENDINGS = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}
_STARTS = {
    rb"\x89PNG\r\n\x1a\n": "image/png",
    rb"\xff\xd8\xff": "image/jpeg",
    rb"RIFF....WEBP": "image/webp",
    rb"GIF8[79]a": "image/gif",
    rb"BM": "image/bmp",
}


def image_rows(images: Sequence[ImageRef]) -> list[JsonObject]:
    """What a row of rollouts says about the images of a prompt."""
    return [{"file": _name(image), "width": image.width, "height": image.height} for image in images]


def write_images(folder: Path, images: Iterable[ImageRef]) -> None:
    """Keep those that the folder of a run does not have yet."""
    place = folder / IMAGES_FOLDER
    wanted = {_name(image): image for image in images}
    if not wanted:
        return
    place.mkdir(exist_ok=True)
    there = {path.name for path in place.iterdir()}
    missing = [name for name in wanted if name not in there]
    for name in missing[: max(MAX_FILES - len(there), 0)]:
        durable.write_bytes(place / name, _kept(wanted[name]))


def _name(image: ImageRef) -> str:
    return f"{image.digest}.{_ENDINGS[image.format] if _is_small(image) else 'jpg'}"


def _is_small(image: ImageRef) -> bool:
    return max(image.width, image.height) <= MAX_SIDE and image.num_bytes <= MAX_BYTES


def _kept(image: ImageRef) -> bytes:
    return image.data if _is_small(image) else reduced(image, MAX_SIDE)


def reduced(image: ImageRef, max_side: int) -> bytes:
    """A JPEG of at most so many pixels a side."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(image.data)) as picture:  # its size was checked when its row was read
        picture.draft("RGB", (max_side, max_side))
        upright = ImageOps.exif_transpose(picture)
        upright.thumbnail((max_side, max_side))
        layer = upright.convert("RGBA")
        buffer = io.BytesIO()
        Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


def media_type(name: str, content: bytes) -> str | None:
    """The type of a kept image by its first bytes; None for what is none, or has another name."""
    if not _NAME.fullmatch(name):
        return None
    return next((kind for start, kind in _STARTS.items() if re.match(start, content, re.DOTALL)), None)


def embedded(folder: Path, row: JsonMapping) -> str | None:
    """An image of a row as a `data:` URL; None if it was not kept."""
    name = str(row.get("file"))
    path = folder / IMAGES_FOLDER / name
    if not _NAME.fullmatch(name) or path.is_symlink() or not path.is_file() or path.stat().st_size > 2 * MAX_BYTES:
        return None
    content = path.read_bytes()
    kind = media_type(name, content)
    return f"data:{kind};base64,{b64encode(content).decode()}" if kind else None
