"""`posttrain data inspect` of rows with images, and images in rows of a Python program."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from posttrain.apps.api.inputs import Inputs
from posttrain.cli.main import main
from posttrain.data.entries import Entry


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    for name, size in {"a": (40, 20), "b": (900, 300)}.items():
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    lines = [
        {"input": "<b>1?</b>", "image": "a.png"},
        {"input": "2?", "image": "b.png"},
        {"input": "3?", "image": "a.png"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "rows.jsonl"


def test_inspect_counts_images_and_writes_thumbnails(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = rows.with_name("page.html")
    assert main(["data", "inspect", str(rows), "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["images"], found["distinct_images"], found["formats"]) == (3, 3, 2, {"PNG": 2})
    assert found["width"] == {"min": 40, "median": 900, "max": 900}
    text = page.read_text()
    assert text.count('<img src="data:image/jpeg;base64,') == 3
    assert "&lt;b&gt;1?" in text
    assert len(text) < 60_000
    assert main(["data", "inspect", str(rows)]) == 0
    assert "distinct images" in capsys.readouterr().out


def test_inspect_without_the_column_that_is_named(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(rows), "--image-key", "photo"]) == 64
    assert "--image-key: the first rows of" in capsys.readouterr().err


def test_inspect_names_a_bad_image(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows.with_name("b.png").write_bytes(rows.with_name("b.png").read_bytes()[:60])
    assert main(["data", "inspect", str(rows)]) == 64
    assert "rows.jsonl, row 2: 'image': image 'b.png': the image is damaged or cut off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "page", "message"),
    [
        ({"input": "?", "output": "!", "final_reward": 1}, "p.html", "have no images"),
        (None, "no/p.html", "does not exist"),
    ],
)
def test_a_page_that_cannot_be_written(
    line: Any, page: str, message: str, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if line is not None:
        rows.write_text(json.dumps(line) + "\n")
    assert main(["data", "inspect", str(rows), "--html", str(rows.parent / page)]) == 64
    assert message in capsys.readouterr().err


def test_rows_of_a_program_may_hold_images(tmp_path: Path) -> None:
    inputs, picture = Inputs(str(tmp_path)), Image.new("RGB", (3, 2), "blue")
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP")
    path = inputs.add_rows("train", [{"input": "?", "images": [picture, buffer.getvalue()]}])
    inputs.write(tmp_path)
    inputs.close()
    [row] = Entry(data_path=path).rows(None)
    assert [(image.format, image.width) for image in row.image_column] == [("PNG", 3), ("WEBP", 3)]
