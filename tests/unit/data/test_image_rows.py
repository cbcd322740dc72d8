"""Rows with images: the ways to write them, where they stand in the conversation, identity, and refusals."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from pyarrow import parquet
from test_images import BAD_IMAGES, encoded

from posttrain.data import image_urls
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import (
    load_example_dataset,
    load_judged_dataset,
    load_pair_dataset,
    load_task_dataset,
)
from posttrain.data.errors import DataError
from posttrain.data.image_urls import fetch_image, is_public
from posttrain.data.images import open_image
from posttrain.data.row_dataset import RowDataset, Stream
from posttrain.types import ImageRef

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '[]' if p.type == 'image' else p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RED, BLUE = encoded(), encoded((3, 5), colour="blue")
URL = "data:image/png;base64," + base64.b64encode(RED).decode()


def seeing() -> ChatFormat:
    """A format whose images take as many places as they are wide."""
    chat = ChatFormat(byte_tokenizer(PARTS))

    def image_tokens(text: str, images: Sequence[ImageRef]) -> str:
        assert text.count("[]") == len(images)
        for image in images:
            text = text.replace("[]", "#" * image.width, 1)
        return text

    chat.image_tokens = image_tokens
    return chat


CHAT, BLIND = seeing(), ChatFormat(byte_tokenizer(CHATML))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "pictures" / "blue.png").write_bytes(BLUE)
    return tmp_path


def write(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def tasks_of(path: str, chat: ChatFormat = CHAT, **settings: Any) -> RowDataset[Any]:
    entry = {"data_path": path, "output_key": "", **settings}
    return load_task_dataset(entry, None, chat, max_prompt_tokens=None, seed=0)


def the_task(folder: Path, row: dict[str, Any], **settings: Any) -> Any:
    return tasks_of(write(folder / "rows.jsonl", row), **settings)[0]


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT, MORE = {"type": "text", "text": "What?"}, {"type": "text", "text": "Why?"}
IMAGE = {"type": "image"}


@pytest.mark.parametrize(
    ("row", "content", "digests"),
    [
        ({"input": "What?", "images": ["pictures/red.png"]}, [IMAGE, TEXT], [RED]),
        ({"input": "What?", "image": "pictures/red.png"}, [IMAGE, TEXT], [RED]),
        ({"input": "What?", "image": URL}, [IMAGE, TEXT], [RED]),
        ({"input": "What?<image>Why?", "images": ["pictures/red.png"]}, [TEXT, IMAGE, MORE], [RED]),
        (
            {"input": "What?<image>Why?<image>", "images": ["pictures/blue.png", "pictures/red.png"]},
            [TEXT, IMAGE, MORE, IMAGE],
            [BLUE, RED],
        ),
        ({"input": asked(TEXT, {"type": "image", "image": "pictures/red.png"})}, [TEXT, IMAGE], [RED]),
        ({"input": asked({"type": "image", "path": "pictures/red.png"}, TEXT)}, [IMAGE, TEXT], [RED]),
        ({"input": asked({"type": "image_url", "image_url": {"url": URL}}, TEXT)}, [IMAGE, TEXT], [RED]),
        ({"input": asked({"type": "input_image", "image_url": URL}, TEXT)}, [IMAGE, TEXT], [RED]),
        ({"input": asked(TEXT, IMAGE, MORE), "images": ["pictures/red.png"]}, [TEXT, IMAGE, MORE], [RED]),
        ({"input": "<image> is a word here", "images": []}, "<image> is a word here", []),
        ({"input": "What?", "image": None}, "What?", []),
    ],
)
def test_images_stand_where_the_row_puts_them(
    row: dict[str, Any], content: Any, digests: list[bytes], folder: Path
) -> None:
    task = the_task(folder, row)
    assert task.messages == ({"role": "user", "content": content},)
    assert [image.data for image in task.images] == digests
    assert task.prompt.count("#") == sum(image.width for image in task.images)
    assert not task.images or not task.metadata


def test_a_prompt_file_wraps_a_question_with_images(folder: Path) -> None:
    (folder / "prompt.txt").write_text("Look. {} Answer:")
    task = the_task(folder, {"input": "A<image>B", "image": URL}, prompt_file=str(folder / "prompt.txt"))
    assert task.messages[0]["content"] == [
        {"type": "text", "text": "Look. A"},
        IMAGE,
        {"type": "text", "text": "B Answer:"},
    ]


def test_parquet_in_the_layout_of_datasets(folder: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    stored = [
        [{"bytes": RED, "path": "x.png"}, {"bytes": None, "path": "pictures/blue.png"}],
        [{"bytes": BLUE, "path": None}],
    ]
    table = pa.table({"input": ["<image>a<image>", "b"], "images": pa.array(stored, pa.list_(kind))})
    parquet.write_table(table, folder / "rows.parquet")
    first, second = tasks_of(str(folder / "rows.parquet"))
    assert [image.data for image in (*first.images, *second.images)] == [RED, BLUE, BLUE]
    assert open_image(second.images[0]).size == (3, 5)


def test_a_folder_that_datasets_saved(folder: Path) -> None:
    import datasets

    features = datasets.Features({"input": datasets.Value("string"), "image": datasets.Image()})
    rows = {"input": ["a"], "image": [{"bytes": RED, "path": None}]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder / "saved"))
    assert tasks_of(str(folder / "saved"))[0].images[0].data == RED


def test_supervised_examples_and_preferences_have_images(folder: Path) -> None:
    question = asked({"type": "image", "image": "pictures/red.png"}, TEXT)
    good, bad = ({"role": "assistant", "content": text} for text in ("yes", "no"))
    limits: Any = {"max_total_tokens": 1000, "seed": 0}
    path = {"data_path": write(folder / "sft.jsonl", {"messages": [*question, good, *question, bad]})}
    example = load_example_dataset(path, None, CHAT, only_unmask_final=False, **limits)[0]
    assert [image.data for image in example.images] == [RED, RED]
    assert sum(example.mask) < len(example.response_ids)
    path = {"data_path": write(folder / "dpo.jsonl", {"chosen": [*question, good], "rejected": [*question, bad]})}
    pair = load_pair_dataset(path, None, CHAT, **limits)[0]
    assert [image.data for image in pair.images] == [RED]
    assert CHAT.tokenizer.decode(pair.prompt_ids).count("#") == 6
    judged = load_judged_dataset(path, None, CHAT, **limits)
    assert [(one.desirable, len(one.images)) for one in judged] == [(True, 1), (False, 1)]
    other = [{"role": "user", "content": [{"type": "image", "image": "pictures/blue.png"}, TEXT]}]
    path = {"data_path": write(folder / "two.jsonl", {"chosen": [*question, good], "rejected": [*other, bad]})}
    with pytest.raises(DataError, match="do not follow the same conversation"):
        load_pair_dataset(path, None, CHAT, **limits)


@pytest.mark.invariant
def test_another_image_is_another_dataset(folder: Path) -> None:
    """Blue has another size than red, so the third image has other pixels only."""
    (folder / "pictures" / "red.png").write_bytes(RED)
    path = write(folder / "rows.jsonl", {"input": "What?", "image": "pictures/red.png"})
    before = Stream(tasks_of(path), seed=0)
    again = Stream(tasks_of(path), seed=0)
    again.load_state_dict(before.state_dict())
    (folder / "pictures" / "red.png").write_bytes(encoded(colour="green"))
    changed = tasks_of(path)
    assert changed[0].prompt_ids == tasks_of(path)[0].prompt_ids
    with pytest.raises(DataError, match="its content is another"):
        Stream(changed, seed=0).load_state_dict(before.state_dict())


def test_equal_questions_about_different_images_are_different_rows(folder: Path) -> None:
    rows = [{"input": "What?", "image": f"pictures/{name}.png"} for name in ("red", "blue", "red")]
    data = tasks_of(write(folder / "rows.jsonl", *rows), split_validation_size=1)
    training, validation = data.held_out()
    assert validation is not None
    assert {len(training), len(validation)} <= {1, 2}
    held = {task.images[0].digest for task in validation}
    assert held.isdisjoint(task.images[0].digest for task in training)


def test_a_model_without_a_vision_tower_refuses_images(folder: Path) -> None:
    path = write(folder / "rows.jsonl", {"input": "1?"}, {"input": "What?", "image": URL})
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: the prompt has images, and the model .*reads text only"):
        tasks_of(path, chat=BLIND)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "<image><image>", "image": URL}, "2 marks <image>, and the row has 1 images"),
        ({"input": asked(IMAGE, TEXT)}, "1 parts of type image without an image, and the row has 0 images"),
        ({"input": asked({"type": "image", "image": URL}, TEXT), "image": URL}, "parts and in a column"),
        ({"input": "?", "image": "missing.png"}, r"'image': image 'missing.png' not found in"),
        ({"input": "?", "images": ["pictures/red.png", "../a.png"]}, r"'images' 2: image '../a.png'"),
        ({"input": "?", "image": 7}, r"'image' must be a path, bytes or a data: URL, found 7; image_key"),
        ({"input": "?", "image": {"x": 1}}, r"must be a path, bytes or a data: URL"),
        ({"input": "?", "image": "data:image/png;base64,AAAA"}, "'image': no image, or its beginning is damaged"),
        ({"input": "?", "image": "ftp://example.org/a.png"}, "paths, data: URLs, http and https"),
        ({"input": "?", "image": "https://example.org/a.png"}, "is a URL; set `allow_image_urls: true`"),
        (
            {"input": [{"role": "system", "content": [{"type": "image", "image": URL}]}, *asked(TEXT)]},
            "an image in a message of the role 'system'",
        ),
        (
            {"input": [*asked(TEXT), {"role": "tool", "content": [{"type": "image", "image": URL}]}]},
            "an image in a message of the role 'tool'",
        ),
    ],
)
def test_what_does_not_fit_names_the_row(row: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2: .*{message}"):
        tasks_of(write(folder / "rows.jsonl", {"input": "1?"}, row))


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_names_the_row_and_the_file(kind: str, folder: Path) -> None:
    make, message = BAD_IMAGES[kind]
    (folder / "pictures" / "bad.png").write_bytes(make())
    path = write(folder / "rows.jsonl", {"input": "?", "image": URL}, {"input": "?", "image": "pictures/bad.png"})
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2: 'image': image 'pictures/bad\.png': .*({message})"):
        tasks_of(path)


def test_keys_of_the_config(folder: Path) -> None:
    row = {"input": "?", "photo": "red.png", "image": "nginx:latest"}
    task = the_task(folder, row, image_key="photo", image_dir=str(folder / "pictures"))
    assert [image.data for image in task.images] == [RED]
    assert task.metadata == {"image": "nginx:latest"}
    assert not the_task(folder, row, image_key="").images
    with pytest.raises(
        DataError, match=r"rows.jsonl: image_key: no row has the column 'photos' \(did you mean 'photo'"
    ):
        the_task(folder, row, image_key="photos")
    with pytest.raises(DataError, match="image_dir: no such folder"):
        the_task(folder, row, image_dir=str(folder / "nowhere"))


def test_an_image_in_an_answer_is_refused(folder: Path) -> None:
    answer = {"role": "assistant", "content": [{"type": "image", "image": URL}]}
    path = write(folder / "dpo.jsonl", {"prompt": "?", "chosen": [answer], "rejected": "no"})
    with pytest.raises(DataError, match="row 1: an image in an answer"):
        load_pair_dataset({"data_path": path}, None, CHAT, max_total_tokens=1000, seed=0)
    path = write(folder / "sft.jsonl", {"messages": [*asked(TEXT), answer]})
    with pytest.raises(DataError, match="row 1: an image in a message of the role 'assistant'"):
        load_example_dataset({"data_path": path}, None, CHAT, max_total_tokens=1000, seed=0, only_unmask_final=False)


# -- URLs --------------------------------------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/red.png":
            self._answer(200, RED)
        elif self.path == "/huge.png":
            self._answer(200, bytes(1 << 20))
        elif self.path == "/moved":
            self._answer(302, b"", Location="/red.png")
        elif self.path == "/inside":
            self._answer(302, b"", Location="http://10.0.0.1/red.png")
        elif self.path == "/file":
            self._answer(302, b"", Location="file:///etc/passwd")
        elif self.path == "/again":
            self._answer(302, b"", Location="/again")
        else:
            self._answer(404, b"")

    def _answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((address, False) for address in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0")),
        *((address, False) for address in ("100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "::1", "::")),
        *((address, False) for address in ("fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1")),
        *((address, False) for address in ("2002:7f00:1::", "2001:0:4136:e378::1", "ff02::1")),
        *((address, True) for address in ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8")),
    ],
)
def test_only_public_addresses_are_asked(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_urls_are_fetched_from_the_checked_address(server: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder / "rows.jsonl", {"input": "?", "image": f"{server}/red.png"})
    with pytest.raises(DataError, match=r"row 1: .*127\.0\.0\.1 has the address 127\.0\.0\.1, which is not public"):
        tasks_of(path, allow_image_urls=True)
    # Of private addresses, the test's own server counts as public.
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1")
    assert tasks_of(path, allow_image_urls=True)[0].images[0].data == RED
    assert fetch_image(f"{server}/moved", "here") == RED
    monkeypatch.setattr(image_urls, "MAX_IMAGE_BYTES", 1 << 19)
    port = server.rpartition(":")[2]
    for url, message in {
        f"{server}/huge.png": "is not fetched: it has more than",
        f"{server}/inside": "10.0.0.1 has the address 10.0.0.1, which is not public",
        f"{server}/file": "a redirect to 'file:",
        f"{server}/again": "more than 3 redirects",
        f"{server}/missing": "status 404",
        f"http://user:secret@127.0.0.1:{port}/red.png": "a user name or a password",
        "http://127.0.0.1:1/": "cannot be fetched",
        "http://127.0.0.1:99999/": "cannot be fetched",
        "http:///x.png": "is not fetched",
    }.items():
        with pytest.raises(DataError, match=f"^here: .*{message}"):
            fetch_image(url, "here")
