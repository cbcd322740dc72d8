"""Images of rows: read from files, bytes, `data:` URLs and, where allowed, the web; checked once, decoded on demand.

Every image is decoded when its row is read, so that a damaged one ends the command before training. Bytes that came
with a row stay in a temporary file: a dataset's images need not fit in memory. Independent of models.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from posttrain.data.errors import DataError
from posttrain.errors import STORAGE_FAULTS, reason_of
from posttrain.files.digests import sha256_of
from posttrain.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES = 32 << 20
MAX_IMAGE_PIXELS = 64_000_000
IMAGE_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
}
_EXIF_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)  # orientations that exchange width and height
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
# What other files begin with, for the message.
_OTHER_KINDS = (
    (rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!DOCTYPE svg[^>]*>\s*)?<svg", "an SVG drawing"),
    (rb"\s*<(!doctype )?html", "an HTML page"),
    (rb"%PDF", "a PDF document"),
    (rb"II\*\x00|MM\x00\*", "a TIFF image"),
    (rb"....ftyp(heic|heix|mif1|avif|avis)", "a HEIC or AVIF image"),
    (rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI ", "a video"),
    (rb"version https://git-lfs", "a Git LFS pointer; fetch the file itself"),
)


def open_image(ref: ImageRef) -> Image:
    """The pixels: RGB, upright, on white where they were transparent."""
    return _decoded(ref.data, f"image {ref.digest[:12]}")


def image_of(
    data: bytes, where: str, source: Callable[[], bytes] | None = None, max_pixels: int = MAX_IMAGE_PIXELS
) -> ImageRef:
    """Checks an image by decoding it. `where` begins the message of a DataError: row and file, or the place in a
    request. `source` reads the same bytes again; without it they stay in memory."""
    image = _opened(data, where, max_pixels)
    width, height = image.size
    try:
        if image.getexif().get(_EXIF_ORIENTATION) in _TURNED:
            width, height = height, width
        if image.format == "JPEG":
            image.draft(
                "RGB", (max(width // 8, 1), max(height // 8, 1))
            )  # all of the file is read, few pixels are computed
        image.load()
    except Exception as error:
        raise DataError(f"{where}: the image is damaged or cut off ({_reason(error)})") from error
    kind = "JPEG" if image.format == "MPO" else str(image.format)
    return ImageRef(sha256_of(data), width, height, kind, len(data), source or data, where)


def _opened(data: bytes, where: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Image:
    """The image with its size known and no pixel decoded; DataError for one that is not read."""
    from PIL import Image

    _quiet_pillow()
    if not data:
        raise DataError(f"{where}: the image is empty, it has 0 bytes")
    if len(data) > MAX_IMAGE_BYTES:
        raise DataError(
            f"{where}: the image has {len(data) / 2**20:.1f} MiB; at most {MAX_IMAGE_BYTES >> 20} MiB are read"
        )
    try:
        image = Image.open(io.BytesIO(data), formats=list(IMAGE_TYPES))
    except Image.DecompressionBombError:
        raise DataError(f"{where}: the image has far more than {_pixels(MAX_IMAGE_PIXELS)}, the most allowed") from None
    except Image.UnidentifiedImageError:
        known = (kind for start, kind in _OTHER_KINDS if re.match(start, data[:1024], re.DOTALL | re.IGNORECASE))
        found = next(known, "no image, or its beginning is damaged")
        raise DataError(f"{where}: {found}; {', '.join(IMAGE_TYPES)} are read") from None
    except Exception as error:
        raise DataError(f"{where}: the image is damaged ({_reason(error)})") from error
    width, height = image.size
    if width * height > max_pixels:
        raise DataError(
            f"{where}: the image has {width} × {height} = {_pixels(width * height)}; "
            f"at most {_pixels(max_pixels)} are read{' after those before it' * (max_pixels < MAX_IMAGE_PIXELS)}"
        )
    if not width * height:
        raise DataError(f"{where}: the image has {width} × {height} pixels")
    try:
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # of a phone: the picture comes first
    except Exception as error:
        raise DataError(f"{where}: the image is damaged or cut off ({_reason(error)})") from error
    if frames > 1:
        raise DataError(f"{where}: an animation of {frames} frames; save the one that is meant, video is not read")
    if image.mode in _DEEP_MODES:
        raise DataError(f"{where}: the image has 16 or more bits of grey a pixel; save it with 8")
    return image


def _decoded(data: bytes, where: str) -> Image:
    from PIL import Image, ImageOps

    image = _opened(data, where)
    try:
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data:
            layer = upright.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
        return upright.convert("RGB")
    except Exception as error:
        raise DataError(f"{where}: the image is damaged or cut off ({_reason(error)})") from error


@cache
def _quiet_pillow() -> None:
    """Sizes are checked here, with a lower limit than that of Pillow's warning."""
    from PIL import Image

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def _pixels(count: int) -> str:
    return f"{count / 1e6:.1f} million pixels"


def _reason(error: Exception) -> str:
    return reason_of(error) or type(error).__name__


# -- where the bytes are -----------------------------------------------------------------------------------------------


def decode_data_url(url: str, where: str) -> bytes:
    """The bytes of `data:image/png;base64,…`."""
    head, comma, body = url.partition(",")
    if not comma:
        raise DataError(f"{where}: a data: URL needs a comma before its content: {url[:40]!r}")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(re.sub(r"\s", "", body), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: the data: URL {url[:40]!r} is not valid base64 ({_reason(error)})") from error


def read_image_file(name: str, folder: Path, where: str) -> tuple[bytes, Path]:
    """The bytes of a regular file inside `folder`, links followed."""
    try:
        root = folder.resolve(strict=True)
        file = (root / Path(name).expanduser()).resolve(strict=True)
        if not file.is_relative_to(root):
            raise DataError(
                f"{where}: image {name!r} lies outside of {folder}; set `image_dir` to a folder that holds all images"
            )
        return _read_regular(file, f"{where}: image {name!r}"), file
    except FileNotFoundError:
        hint = '`image_dir` names another folder; image_key: "" if the column has no images'
        raise DataError(f"{where}: image {name!r} not found in {folder}; {hint}") from None
    except (OSError, ValueError, RuntimeError) as error:  # also NUL in a name, links in a circle
        if isinstance(error, DataError) or getattr(error, "errno", None) in STORAGE_FAULTS:
            raise
        raise DataError(f"{where}: image {name!r} cannot be read ({_reason(error)})") from error


def _read_regular(file: Path, where: str) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not wait for its writer
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DataError(f"{where}: not a regular file")
        return stream.read(MAX_IMAGE_BYTES + 1)


def _read_unchanged(file: Path, digest: str) -> bytes:
    """The file as it was when its row was read."""
    try:
        data = _read_regular(file, str(file))
    except FileNotFoundError:
        data = b""
    if sha256_of(data) != digest:
        raise DataError(f"image {file} has changed or gone since its row was read; keep images while a run uses them")
    return data


class ImageStore:
    """The images of one dataset, each once. `of_file` leaves them where they are, `of_bytes` in a temporary file."""

    def __init__(self) -> None:
        self._known: dict[str, ImageRef] = {}
        self._lock = threading.Lock()  # rows are read by several threads
        self._file: Any = None
        self._end = 0

    def of_file(self, name: str, folder: Path, where: str) -> ImageRef:
        data, file = read_image_file(name, folder, where)
        return self._once(data, f"{where}: image {name!r}", partial(_read_unchanged, file, sha256_of(data)))

    def of_bytes(self, data: bytes, where: str) -> ImageRef:
        return self._once(data, where, None)

    def _once(self, data: bytes, where: str, source: Callable[[], bytes] | None) -> ImageRef:
        digest = sha256_of(data)
        if digest in self._known:
            return self._known[digest]
        found = image_of(data, where, source or (lambda: data))
        with self._lock:
            if digest not in self._known:
                if source is None:
                    found = replace(found, source=self._keep(data))
                self._known[digest] = found
            return self._known[digest]

    def _keep(self, data: bytes) -> Callable[[], bytes]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="posttrain-images-")  # noqa: SIM115
        start, self._end = self._end, self._end + len(data)
        self._file.write(data)
        self._file.flush()
        return partial(_read_at, self._file, start, len(data))


def _read_at(file: Any, start: int, size: int) -> bytes:
    return os.pread(file.fileno(), size, start)
