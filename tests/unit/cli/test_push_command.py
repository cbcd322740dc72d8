"""`posttrain push` against a local hub that speaks the API of the real one as far as an upload needs it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from posttrain.checkpointing.integrity import seal
from posttrain.cli.main import main

TOKEN = "hf_" + "abcdefghij" * 3
NAME = "me/mine"


class Hub:
    """One user's repositories: whether each is private, and the files of its newest commit."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, status: int, content: Any = None, error: str = "") -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "application/json")
                if error:
                    self.send_header("X-Error-Code", error)
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                hub.asked.append(f"GET {self.path}")
                name = self.path.removeprefix("/api/models/").partition("?")[0]
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.answer(401, {"error": "Invalid username or password."})
                elif name in hub.private:
                    self.answer(200, {"id": name, "private": hub.private[name], "siblings": []})
                else:
                    self.answer(404, {"error": "Repository not found"}, "RepoNotFound")

            def do_POST(self) -> None:
                hub.asked.append(f"POST {self.path}")
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self.answer(401, {"error": "Invalid username or password."})
                if self.path == "/api/repos/create":
                    wanted = json.loads(body)
                    is_private = bool(wanted.get("private", wanted.get("visibility") == "private"))
                    hub.private[f"me/{wanted['name']}"] = is_private
                    return self.answer(200, {"url": f"{hub.url}/{NAME}", "name": NAME})
                if "/preupload/" in self.path:
                    files = json.loads(body)["files"]
                    for one in files:
                        one["uploadMode"] = "lfs" if one["path"].endswith("safetensors") else "regular"
                        one["shouldIgnore"] = False
                    return self.answer(200, {"files": files})
                if self.path.endswith("/info/lfs/objects/batch"):
                    objects = json.loads(body)["objects"]
                    for one in objects:
                        one["actions"] = {"upload": {"href": f"{hub.url}/store/{one['oid']}"}}
                    return self.answer(200, {"transfer": "basic", "objects": objects})
                if "/commit/" in self.path:
                    for line in map(json.loads, body.splitlines()):
                        value = line["value"]
                        if line["key"] == "file":
                            hub.files[value["path"]] = base64.b64decode(value["content"])
                        elif line["key"] == "lfsFile":
                            hub.files[value["path"]] = hub.large[value["oid"]]
                    return self.answer(200, {"commitUrl": f"{hub.url}/{NAME}/commit/1", "commitOid": "1"})
                return self.answer(200, {"errors": [], "warnings": []})  # is the front matter of the card valid?

            def do_PUT(self) -> None:
                hub.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(200)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    started = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", started.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield started
    started.server.shutdown()
    started.server.server_close()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """What a conversion leaves, as far as `push` looks at it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# mine\n\n## Evaluation\n")
    (folder / "conversion.json").write_text(json.dumps({"verification": {"num_same_top": 24}}))
    seal(folder)
    return folder


def test_the_whole_export_arrives_in_a_private_repository(
    hub: Hub, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = {path.name: path.read_bytes() for path in export.iterdir()}
    (export / "notes.txt").write_text("mine, and not of the conversion")
    assert main(["push", str(export), NAME]) == 0
    assert hub.private == {NAME: True}
    assert hub.files == written
    shown = "".join(capsys.readouterr())
    assert f"{NAME}/commit/1" in shown
    assert TOKEN not in shown
    assert "licence" not in shown


def test_a_dry_run_lists_files_and_sends_nothing(hub: Hub, export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(export), NAME, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("7.0 kB  model.safetensors", "README.md", "checksums.json", "4 files"))
    assert hub.asked == []


def test_a_public_repository_needs_a_word(hub: Hub, export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.private[NAME] = False
    assert main(["push", str(export), NAME]) == 64
    assert "--public" in capsys.readouterr().err
    assert hub.files == {}
    assert main(["push", str(export), NAME, "--public"]) == 0
    assert "model.safetensors" in hub.files


def not_verified(folder: Path) -> None:
    (folder / "conversion.json").write_text('{"verification": null}')
    seal(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "conversion.json").unlink(), "no conversion.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"other" * 1400), "model.safetensors"),
        (lambda folder: not_verified(folder), "--no-verify"),
    ],
)
def test_what_is_no_verified_export_is_refused(
    damage: Any, words: str, hub: Hub, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(export)
    assert main(["push", str(export), NAME]) == 64
    assert words in capsys.readouterr().err
    assert hub.asked == []


def test_without_a_token_or_with_a_wrong_one_nothing_is_uploaded(
    hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = TOKEN[::-1]
    monkeypatch.setenv("HF_TOKEN", wrong)
    assert main(["push", str(export), NAME]) == 64
    shown = capsys.readouterr().err
    assert "the hub refused me/mine" in shown
    assert wrong not in shown
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    assert main(["push", str(export), NAME]) == 64
    assert "HF_TOKEN" in capsys.readouterr().err
    assert hub.files == {}


@pytest.mark.parametrize("name", ["mine", "me/mine/more", "me/mi ne"])
def test_a_wrong_name_of_a_repository_is_refused(name: str, export: Path) -> None:
    assert main(["push", str(export), name, "--dry-run"]) == 64


def test_a_card_without_a_licence_is_warned_about(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (export / "README.md").write_text("---\ntags: [x]\n---\n# mine\n---\nlicense: none of the card\n")
    seal(export)
    assert main(["push", str(export), NAME, "--dry-run"]) == 0
    assert "licence" in capsys.readouterr().err
