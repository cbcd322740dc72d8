"""Images of rows: what is read, what is refused and by which name, and that bytes stay what they were."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from posttrain.data import images
from posttrain.data.errors import DataError
from posttrain.data.images import ImageStore, decode_data_url, image_of, open_image, read_image_file


def encoded(size: tuple[int, int] = (6, 4), kind: str = "PNG", colour: object = "red", mode: str = "RGB", **options):
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, kind, **options)
    return file.getvalue()


def animation(kind: str) -> bytes:
    first, second = (Image.new("RGB", (6, 4), colour) for colour in ("red", "blue"))
    file = io.BytesIO()
    first.save(file, kind, save_all=True, append_images=[second])
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A header that promises pixels which are not there."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def noise(kind: str) -> bytes:
    picture = Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(64 * 64 * 3))
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


BAD_IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "0 bytes"),
    "text": (lambda: b"not an image", "no image, or its beginning is damaged; PNG, JPEG"),
    "svg": (lambda: b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
    "html": (lambda: b"<!doctype html><html>404</html>", "an HTML page"),
    "pdf": (lambda: b"%PDF-1.7", "a PDF document"),
    "tiff": (lambda: encoded(kind="TIFF"), "a TIFF image"),
    "heic": (lambda: b"\0\0\0\x18ftypheic" + bytes(32), "a HEIC or AVIF image"),
    "video": (lambda: b"\0\0\0\x18ftypmp42" + bytes(32), "a video"),
    "lfs pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "png without pixels": (lambda: png_of_size(64, 64), "damaged or cut off"),
    "png cut off": (lambda: noise("PNG")[:-200], "damaged or cut off"),
    "png header cut off": (lambda: noise("PNG")[:20], "damaged"),
    "png with a wrong checksum": (lambda: noise("PNG").replace(b"IDAT", b"IDAU"), "damaged"),
    "jpeg cut off": (lambda: noise("JPEG")[:-200], "damaged or cut off"),
    "webp cut off": (lambda: noise("WEBP")[:-20], "damaged"),
    "bomb": (lambda: png_of_size(10_000, 10_000), "10000 × 10000 = 100.0 million pixels; at most 64.0 million"),
    "bomb beyond Pillow's limit": (lambda: png_of_size(60_000, 60_000), "far more than 64.0 million"),
    "no width": (lambda: png_of_size(0, 4), "damaged|0 × 4"),
    "gif animation": (lambda: animation("GIF"), "an animation of 2 frames"),
    "png animation": (lambda: animation("PNG"), "an animation of 2 frames"),
    "webp animation": (lambda: animation("WEBP"), "an animation of 2 frames"),
    "16 bits of grey": (lambda: encoded(mode="I;16", colour=9000), "16 or more bits of grey"),
    "too many bytes": (lambda: encoded() + bytes(images.MAX_IMAGE_BYTES), "MiB; at most 32 MiB"),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_is_refused_by_name(kind: str) -> None:
    make, message = BAD_IMAGES[kind]
    with pytest.raises(DataError, match=rf"^rows\.jsonl, row 3: (.*)({message})"):
        image_of(make(), "rows.jsonl, row 3")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_good_image_is_read(kind: str) -> None:
    found = image_of(encoded(kind=kind), "here")
    picture = open_image(found)
    assert (found.width, found.height, found.format) == (6, 4, kind) == (*picture.size, kind)
    assert picture.mode == "RGB"
    assert all(abs(value - wanted) < 8 for value, wanted in zip(picture.getpixel((2, 2)), (255, 0, 0), strict=True))


def test_sizes_are_those_of_the_upright_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    found = image_of(encoded(kind="JPEG", exif=exif), "here")
    assert (found.width, found.height) == (4, 6) == open_image(found).size


def test_transparent_pixels_are_white() -> None:
    found = image_of(encoded(mode="RGBA", colour=(255, 0, 0, 0)), "here")
    assert open_image(found).getpixel((0, 0)) == (255, 255, 255)


def test_bytes_travel_with_a_reference_and_stay_out_of_memory_before() -> None:
    store, data = ImageStore(), encoded()
    found = store.of_bytes(data, "here")
    assert not isinstance(found.source, bytes)
    assert found.data == data
    assert store.of_bytes(data, "there") is found
    blue = store.of_bytes(encoded(colour="blue"), "here")
    assert open_image(blue).getpixel((0, 0)) == (0, 0, 255)
    copied = pickle.loads(pickle.dumps(found))
    assert copied == found
    assert copied.source == data


def test_a_file_that_changes_after_its_row_was_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    found = ImageStore().of_file("a.png", tmp_path, "here")
    assert found.data == encoded()
    (tmp_path / "a.png").write_bytes(encoded(colour="blue"))
    with pytest.raises(DataError, match=r"a\.png has changed or gone"):
        _ = found.data
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png has changed or gone"):
        _ = found.data


def test_files_outside_of_the_folder_and_special_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(encoded())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe.png")
    cases = {
        "../secret.png": "lies outside of",
        str(tmp_path / "secret.png"): "lies outside of",
        "link.png": "lies outside of",
        "loop.png": "cannot be read",
        "pipe.png": "not a regular file",
        "missing.png": "not found in",
        "a\0b.png": "cannot be read",
        ".": "cannot be read|not a regular file",
        "x" * 300: "cannot be read",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=rf"^row 1: image .*({message})"):
            read_image_file(name, folder, "row 1")
    (folder / "own.png").write_bytes(encoded())
    (folder / "inside.png").symlink_to(folder / "own.png")
    assert read_image_file("inside.png", folder, "row 1")[0] == encoded()
    assert read_image_file(str(folder / "own.png"), folder, "row 1")[0] == encoded()


def test_data_urls() -> None:
    assert decode_data_url("data:image/png;base64,aGk=", "here") == b"hi"
    assert decode_data_url("data:,a%20b", "here") == b"a b"
    for bad in ("data:image/png;base64", "data:image/png;base64,a!b"):
        with pytest.raises(DataError, match=r"^here: .*data: URL"):
            decode_data_url(bad, "here")
