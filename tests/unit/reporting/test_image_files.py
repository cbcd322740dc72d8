"""Images of prompts in a run folder: kept once and small, in the report and the dashboard; nothing else is sent."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from made_runs import make_run
from PIL import Image

from posttrain.apps.watch.access import Access
from posttrain.apps.watch.app import create_app
from posttrain.apps.watch.catalogue import Catalogue
from posttrain.apps.watch.places import LocalPlace
from posttrain.data.images import image_of
from posttrain.reporting import image_files
from posttrain.reporting.image_files import embedded, image_rows, media_type, write_images
from posttrain.reporting.report import write_report
from posttrain.reporting.rows import group_row, write_rollouts
from posttrain.reporting.run_files import open_run
from posttrain.types import Group, ImageRef, Task


def picture(size: tuple[int, int] = (8, 6), colour: str = "red", kind: str = "PNG") -> ImageRef:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return image_of(file.getvalue(), "here")


def group(*images: ImageRef) -> Group:
    pads = "<|image_pad|>" * 12
    return Group(Task(0, "rows:0", f"<|start|>{pads}<|end|>What?", (), images=images), ())


def test_a_row_names_its_images_and_counts_their_tokens() -> None:
    image = picture()
    row = group_row(group(image))
    assert row["images"] == [{"file": f"{image.digest}.png", "width": 8, "height": 6}]
    assert row["prompt"] == "<|start|><|image_pad|> × 12<|end|>What?"
    assert "images" not in group_row(group())


def test_images_are_kept_once_and_large_ones_reduced(tmp_path: Path) -> None:
    small, large = picture(), picture((2000, 1000), "blue")
    write_images(tmp_path, [small, large, small])
    assert (tmp_path / "images" / f"{small.digest}.png").read_bytes() == small.data
    kept = tmp_path / "images" / f"{large.digest}.jpg"
    assert Image.open(kept).size == (512, 256)
    before = kept.stat().st_mtime_ns
    write_images(tmp_path, [large])
    assert kept.stat().st_mtime_ns == before
    assert len(list((tmp_path / "images").iterdir())) == 2


def test_a_run_keeps_a_limited_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MAX_FILES", 2)
    images = [picture((width, 4)) for width in (3, 4, 5)]
    for image in images:
        write_images(tmp_path, [image])
    assert [embedded(tmp_path, row) is not None for row in image_rows(images)] == [True, True, False]


def test_a_fresh_run_puts_the_images_of_the_run_before_aside(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=2)
    write_images(tmp_path / "run", [picture()])
    open_run(tmp_path / "run", 0)
    assert not (tmp_path / "run" / "images").exists()
    assert len(list((tmp_path / "run" / "earlier_001" / "images").iterdir())) == 1


def test_the_report_shows_images_and_only_images(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, steps=2)
    kept, lost, false = picture(), picture((9, 9)), picture((7, 7))
    write_images(folder, [kept, false])
    (folder / "images" / f"{false.digest}.png").write_text("<svg onload='alert(1)'>")
    write_rollouts(folder / "rollouts" / "step_2.jsonl.gz", [group(kept, lost, false)])
    page = write_report(folder).read_text()
    assert page.count('<img src="data:image/png;base64,') == 1
    assert page.count("not kept") == 2
    assert "img-src data:" in page


@pytest.mark.parametrize("name", ["", "x.png", "../run.json", "a" * 64, "a" * 64 + ".svg", "A" * 64 + ".png"])
def test_other_names_are_no_images(name: str, tmp_path: Path) -> None:
    assert media_type(name, b"\x89PNG\r\n\x1a\n") is None
    assert embedded(tmp_path, {"file": name}) is None


def test_the_dashboard_sends_images_of_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    make_run(folder, steps=2)
    image, secret = picture(), picture((5, 5))
    write_images(folder, [image])
    (tmp_path / "secret").write_bytes(secret.data)
    os.symlink(tmp_path / "secret", folder / "images" / f"{'b' * 64}.png")
    (folder / "images" / f"{'c' * 64}.png").write_text("<html><script>alert(1)</script>")
    os.mkfifo(folder / "images" / f"{'d' * 64}.png")
    app = create_app(Catalogue([LocalPlace(tmp_path / "runs")]), Access(None))
    client = TestClient(app, base_url="http://127.0.0.1")
    [run] = client.get("/api/runs").json()["runs"]
    found = client.get(f"/api/runs/{run['id']}/images/{image.digest}.png")
    assert (found.status_code, found.headers["content-type"]) == (200, "image/png")
    assert found.content == image.data
    assert found.headers["x-content-type-options"] == "nosniff"
    for name in (
        "run.json",
        "..%2Frun.json",
        "b" * 64 + ".png",
        "c" * 64 + ".png",
        "d" * 64 + ".png",
        "e" * 64 + ".png",
    ):
        assert client.get(f"/api/runs/{run['id']}/images/{name}").status_code in (404, 422), name


def test_a_reduced_image_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (1200, 600)).save(file, "JPEG", exif=exif)
    image = image_of(file.getvalue(), "here")
    reduced = Image.open(io.BytesIO(image_files.reduced(image, 512)))
    assert reduced.size == (256, 512)
    assert image_rows([replace(image, num_bytes=9)])[0]["file"].endswith(".jpg")
