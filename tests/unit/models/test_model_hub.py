"""Errors for model names that are no folder, without the retries of the hub's client."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from huggingface_hub import constants

from posttrain.apps.export.conversion_input import open_input
from posttrain.cli.main import main
from posttrain.data import hub_requests
from posttrain.engines.choose_engine import load_for_sampling
from posttrain.errors import InputError
from posttrain.models.hub import looks_like_hub_name, why_unavailable
from posttrain.models.loading import check_model_exists, load_model, load_tokenizer
from posttrain.policy.memory.model_shape import find_shape
from posttrain.policy.reward_head import load_reward_model

NAME = "results/run1"
CPU = torch.device("cpu")


class Hub:
    """A local hub without models that counts requests."""

    def __init__(self, status: int, error_code: str, may_answer: Event) -> None:
        self.asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                self.asked.append(handler.path)
                may_answer.wait()
                handler.send_response(status)
                handler.send_header("X-Error-Code", error_code)
                handler.send_header("Content-Length", "0")
                handler.end_headers()

            do_HEAD = do_GET

            def log_message(handler, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def asked_for(self, name: str) -> int:
        return sum(name in path for path in self.asked)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, an empty cache, and a hub's client that may not pause before it tries again."""

    def refuse_to_wait(seconds: float) -> None:
        raise AssertionError(f"the hub's client waits {seconds} s")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", refuse_to_wait)
    monkeypatch.delenv(hub_requests.PATIENCE_SETTING, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def start_hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hub]]:
    started: list[tuple[Hub, Event]] = []

    def start(status: int, error_code: str = "", *, answers: bool = True) -> Hub:
        may_answer = Event()
        if answers:
            may_answer.set()
        hub = Hub(status, error_code, may_answer)
        started.append((hub, may_answer))
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        return hub

    yield start
    for hub, may_answer in started:
        may_answer.set()
        hub.server.shutdown()
        hub.server.server_close()


@pytest.fixture
def no_hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with socket.socket() as deaf:  # it holds the address, or a server of another test might get it, and never listens
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield url


def put_into_cache(name: str) -> None:
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps({"model_type": "llama"}))


EVERY_WAY_IN: dict[str, Callable[[], object]] = {
    "config": lambda: check_model_exists(NAME),
    "tokenizer": lambda: load_tokenizer(NAME),
    "model": lambda: load_model(NAME, torch.float32, CPU),
    "reward_model": lambda: load_reward_model(NAME, torch.float32, CPU, seed=0, pad_token_id=None),
    "eval_and_serve": lambda: load_for_sampling(NAME, device="cpu"),
    "convert": lambda: open_input(NAME),
    "plan": lambda: find_shape(NAME),
}


@pytest.mark.parametrize("way_in", EVERY_WAY_IN)
def test_unreachable_hub_is_tried_once(way_in: str, no_hub: str) -> None:
    with pytest.raises(InputError) as error:
        EVERY_WAY_IN[way_in]()
    for words in (f"no folder {NAME!r}", f"the hub ({no_hub}) cannot be reached", f"hf download {NAME}"):
        assert words in str(error.value)


def test_tokenizer_option_is_checked_too(no_hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("traces.jsonl").write_text('{"prompt": "a", "response": "b", "score": 1}\n')
    assert main(["data", "inspect", "traces.jsonl", "--tokenizer", NAME]) == 64
    assert f"--tokenizer: no folder {NAME!r}, and the hub" in capsys.readouterr().err


def test_evaluation_checks_its_model_before_loading_data(no_hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", f"generation.model_name={NAME}", "data.dataset_name=math500"]) == 64
    assert f"generation.model_name: no folder {NAME!r}, and the hub" in capsys.readouterr().err


@pytest.mark.parametrize("status", [404, 401])
def test_unknown_hub_model_is_requested_once(start_hub: Callable[..., Hub], status: int) -> None:
    hub = start_hub(status, "RepoNotFound")
    with pytest.raises(InputError, match=rf"no folder '{NAME}', and the hub \({hub.url}\) .*auth login"):
        check_model_exists(NAME)
    assert hub.asked_for(NAME) == 1


def test_silent_hub_times_out(start_hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    start_hub(200, answers=False)
    monkeypatch.setattr(hub_requests, "PATIENCE_S", 0.3)
    reason = why_unavailable(NAME)
    assert reason is not None
    assert "has not answered within 0.3 s" in reason
    assert hub_requests.PATIENCE_SETTING in reason


def test_time_limits_of_the_http_client_and_of_its_caller_are_reported_alike(
    start_hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the test above either of them may expire first. Here each one does."""
    start_hub(200, answers=False)
    assert hub_requests._request("models", NAME, 0.1) == hub_requests._silent(0.1)
    answers_late = Event()
    monkeypatch.setattr(hub_requests, "_request", lambda *_: answers_late.wait() and hub_requests.HubAnswer())
    monkeypatch.setattr(hub_requests, "PATIENCE_S", 0.1)
    reason = why_unavailable(NAME)
    answers_late.set()
    assert reason is not None
    assert "has not answered within 0.1 s" in reason


def test_timeout_follows_the_hubs_setting(start_hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    start_hub(200)
    monkeypatch.setattr(hub_requests, "PATIENCE_S", 0.0)
    monkeypatch.setenv(hub_requests.PATIENCE_SETTING, "60")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 60)
    assert why_unavailable(NAME) is None


@pytest.mark.parametrize(("status", "code"), [(200, ""), (503, ""), (429, ""), (403, "GatedRepo")])
def test_existing_model_and_busy_hub_are_left_to_the_client(
    start_hub: Callable[..., Hub], status: int, code: str
) -> None:
    start_hub(status, code)
    assert why_unavailable(NAME) is None


@pytest.mark.parametrize("parent", ["models", "elsewhere"])
def test_a_model_of_the_catalogue_is_fetched_by_its_name(
    parent: str, here: Path, start_hub: Callable[..., Hub]
) -> None:
    hub = start_hub(200)
    (here / "models").mkdir()
    name = f"{parent}/smollm2-135m-instruct"
    to = "" if parent == "models" else f" --to {name}"
    with pytest.raises(InputError, match=f"posttrain models fetch smollm2{to}$"):
        check_model_exists(name)
    assert not hub.asked


def test_path_with_existing_parent_is_not_looked_up_on_the_hub(here: Path, start_hub: Callable[..., Hub]) -> None:
    hub = start_hub(200)
    (here / "results").mkdir()
    with pytest.raises(InputError, match=f"no folder '{NAME}', though there is 'results'.*hf download {NAME}"):
        check_model_exists(NAME)
    assert not hub.asked
    assert not looks_like_hub_name(NAME)


def test_cached_hub_model_wins_over_existing_parent_folder(here: Path, no_hub: str) -> None:
    (here / "results").mkdir()
    put_into_cache(NAME)
    assert why_unavailable(NAME) is None
    assert looks_like_hub_name(NAME)


def test_offline_mode_is_named(no_hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"not in the hub's cache .*cache, while HF_HUB_OFFLINE forbids"):
        check_model_exists(NAME)


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "a/b/c", "a--b/c"])
def test_what_cannot_be_a_hub_name_is_a_path(name: str, here: Path, start_hub: Callable[..., Hub]) -> None:
    hub = start_hub(200)
    with pytest.raises(InputError, match=f"no folder '{name}'. Give a folder"):
        check_model_exists(name)
    assert not hub.asked


def test_a_nemo_archive_is_refused_by_name() -> None:
    assert ".nemo archive, which is not read" in (why_unavailable("nvidia/sft.nemo") or "")
