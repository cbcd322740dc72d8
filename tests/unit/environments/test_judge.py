"""A judge is asked until it gives a verdict that can be read, within its time; else the answer is unscored, never
bad."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tiny_runs import wait_until

from posttrain.config.rewards import parse_reward
from posttrain.environments import build_environments, check_environments
from posttrain.environments.item import BadSetup, ScoringItem, Unscored
from posttrain.environments.judge import NoVerdict, Usage, UsageFile, VerdictCache, filled, judge_scorer, read_score
from posttrain.errors import InputError
from posttrain.types import Completion, Task

Reply = Callable[[http.server.BaseHTTPRequestHandler], None]


def says(text: Any, status: int = 200, tokens: tuple[int, int] = (100, 10), **headers: str) -> Reply:
    """A reply as an OpenAI-compatible endpoint writes it."""
    message = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return raw(json.dumps({**message, "usage": usage}).encode(), status, **headers)


def raw(body: bytes, status: int = 200, **headers: str) -> Reply:
    def send(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return send


@dataclass
class Endpoint:
    """A judge on this machine. Each request gets the next of `replies`; the last one serves for all that follow."""

    replies: list[Reply] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def keeps_silent(self) -> Reply:
        return lambda handler: self.over.wait(60) and None

    def drips(self, start: bytes) -> Reply:
        """Sends a byte now and then, for ever: no single read ever takes long."""

        def send(handler: http.server.BaseHTTPRequestHandler) -> None:
            handler.wfile.write(start)
            while not self.over.wait(0.02):
                handler.wfile.write(b" ")

        return send


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.times.append(time.monotonic())
            found.requests.append(json.loads(body))
            found.headers.append(dict(self.headers))
            reply = found.replies.pop(0) if len(found.replies) > 1 else found.replies[0]
            try:
                reply(self)
            except OSError:
                self.close_connection = True

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        found.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield found
        found.over.set()
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def setup_for(endpoint: Endpoint, folder: Path, **keys: Any) -> dict[str, Any]:
    keys = {"retry_base_s": 0.01, "cache_path": "cache.sqlite", **keys}
    config = parse_reward({"type": "judge", "base_url": endpoint.url, "model": "a-judge", **keys})
    return {**config.model_dump(mode="json"), "base_folder": str(folder)}


def usage_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "judge_usage.json").read_text()))


ITEM = ScoringItem(
    prompt="<user>2+2?<assistant>",
    response="It is {reference}.",
    reference=4,
    messages=[{"role": "user", "content": "2+2?"}],
    metadata={"source": "school"},
    noise_key="7",
)


# ── what is asked ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_verdict_becomes_a_reward_with_what_it_cost(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [says('Right, if terse. {"score": 7}', tokens=(1000, 50))]
    score = judge_scorer(setup_for(endpoint, folder, input_price=2.0, output_price=10.0))
    assert score(ITEM) == {"reward": 0.7, "judge_score": 7.0, "judge_tokens": 1050.0, "judge_cost": 0.0025}
    request = endpoint.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("a-judge", 0, 1024)
    assert [message["role"] for message in request["messages"]] == ["user"]
    assert "2+2?" in request["messages"][0]["content"]
    assert "It is {reference}." in request["messages"][0]["content"], "an answer cannot ask for the reference"


def test_settings_reach_the_request(endpoint: Endpoint, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-123")
    (folder / "ask.txt").write_text('{response} / {metadata.source} / {{response}} / {"score": 1}')
    endpoint.replies = [says('{"score": 1}')]
    keys = {
        "prompt_file": "ask.txt",
        "system": "Be strict about {reference}.",
        "api_key_env": "MY_JUDGE_KEY",
        "temperature": 0.5,
        "max_tokens": 9,
        "extra_body": {"seed": 3, "reasoning_effort": "low"},
        "extra_headers": {"X-Team": "rl"},
    }
    judge_scorer(setup_for(endpoint, folder, **keys))(ITEM)
    request, headers = endpoint.requests[0], endpoint.headers[0]
    assert request["messages"] == [
        {"role": "system", "content": "Be strict about 4."},
        {"role": "user", "content": 'It is {reference}. / school / {response} / {"score": 1}'},
    ]
    assert (request["temperature"], request["max_tokens"], request["seed"]) == (0.5, 9, 3)
    assert (headers["Authorization"], headers["X-Team"]) == ("Bearer sk-123", "rl")


def test_placeholders_are_filled_from_the_task() -> None:
    assert (
        filled("{prompt}|{conversation}", ITEM) == "<user>2+2?<assistant>|user: 2+2?\n\nassistant: It is {reference}."
    )
    assert filled("{question}", ScoringItem("only a prompt", "", None)) == "only a prompt"
    assert filled("[{reference}]", ScoringItem("", "", None)) == "[]"
    assert filled("{response}", ScoringItem("", "half \ud800 a character", None)) == "half ? a character"
    with pytest.raises(Unscored, match=r"\{metadata.age\}"):
        filled("{metadata.age}", ITEM)


# ── how a verdict is read ──────────────────────────────────────────────────────────────────────────────────────────


def read(text: str, **keys: Any) -> float:
    block = {"type": "judge", "base_url": "http://x/v1", "model": "m", **keys}
    return read_score(text, parse_reward(block).model_dump())


def test_the_last_score_of_a_verdict_counts() -> None:
    assert read('{"score": 3} no, rather {"why": "{}", "score": 4.5}') == 4.5
    assert read('```json\n{"score": "8"}\n```') == 8.0
    assert read('{"grade": 2}', score_key="grade") == 2.0
    assert read("Score: 3/10 … Score: 6/10", score_pattern=r"Score: (\d+)/10") == 6.0
    assert read("I say 9", score_pattern=r"\d+") == 9.0
    assert read("[[B]]", score_pattern=r"\[\[(\w)\]\]", labels={"A": 10, "B": 5}) == 5.0
    assert read('{"score": "YES"}', labels={"yes": 1, "no": 0}, score_range=[0, 1]) == 1.0
    assert read('{"score": -5}', score_range=[-5, 5]) == -5.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "good",
        '{"score": 11}',
        '{"score": -1}',
        '{"score": NaN}',
        '{"score": true}',
        '{"score": null}',
        '{"score": 7',
    ],
)
def test_anything_else_is_no_verdict(text: str) -> None:
    with pytest.raises(NoVerdict):
        read(text)
    with pytest.raises(NoVerdict):
        read("[[C]]", score_pattern=r"\[\[(\w)\]\]", labels={"A": 10, "B": 5})


def test_scores_are_mapped_to_the_range_of_rewards(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [says('{"score": 2}')]
    mapped = judge_scorer(setup_for(endpoint, folder, score_range=[1, 5], reward_range=[-1, 1]))
    assert mapped(ITEM)["reward"] == -0.5
    smaller_is_better = judge_scorer(setup_for(endpoint, folder, score_range=[5, 1]))
    assert smaller_is_better(ITEM)["reward"] == 0.75
    assert judge_scorer(setup_for(endpoint, folder, score_range=[0, 2]))(ITEM)["reward"] == 1.0, "the best"


# ── endpoints that misbehave ───────────────────────────────────────────────────────────────────────────────────────


def unscored(endpoint: Endpoint, folder: Path, **keys: Any) -> str:
    with pytest.raises(Unscored) as caught:
        judge_scorer(setup_for(endpoint, folder, **keys))(ITEM)
    return str(caught.value)


GARBAGE = {
    "no JSON": raw(b"<html>hello</html>"),
    "another shape": raw(b'{"error": "none"}'),
    "a list": raw(b"[1, 2]"),
    "beyond any float": says('{"score": 1' + "0" * 400 + "}"),
    "a number": raw(b"17"),
    "no choices": raw(b'{"choices": []}'),
    "no content": says(None),
    "empty content": says("  "),
    "no score": says("It is a fine answer."),
    "a score out of range": says('{"score": 1000000}'),
    "bytes": raw(bytes(range(256))),
    "nothing": raw(b""),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_asked_about_again_and_then_unscored(what: str, endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [GARBAGE[what]]
    assert "3 requests" in unscored(endpoint, folder, max_retries=2)
    assert len(endpoint.requests) == 3
    assert usage_of(folder)["unscored"] == 1
    endpoint.replies = [GARBAGE[what], says('{"score": 5}')]
    assert judge_scorer(setup_for(endpoint, folder, max_retries=2))(ITEM)["reward"] == 0.5


def test_half_a_character_in_a_verdict_does_not_cost_it(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [raw(b'{"choices": [{"message": {"content": "\\ud83d {\\"score\\": 4}"}}]}')]
    score = judge_scorer(setup_for(endpoint, folder))
    assert [score(ITEM)["reward"], score(ITEM)["reward"]] == [0.4, 0.4]
    assert len(endpoint.requests) == 1, "the second is from the cache"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_errors_that_may_pass_are_waited_out(status: int, endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [raw(b"busy", status), raw(b"busy", status), says('{"score": 5}')]
    assert judge_scorer(setup_for(endpoint, folder))(ITEM)["reward"] == 0.5
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_errors_that_stay_are_not_asked_about_again(status: int, endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [raw(b'{"error": "no such model: a-judge"}', status)]
    reason = unscored(endpoint, folder)
    assert f"HTTP {status}" in reason
    assert len(endpoint.requests) == 1


def test_retry_after_is_honoured_in_seconds_and_as_a_date(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [raw(b"", 429, Retry_After="0.7"), says('{"score": 5}')]
    judge_scorer(setup_for(endpoint, folder))(ITEM)
    assert endpoint.times[1] - endpoint.times[0] >= 0.7

    def in_two_seconds(handler: http.server.BaseHTTPRequestHandler) -> None:
        raw(b"", 429, Retry_After=formatdate(time.time() + 2, usegmt=True))(handler)

    endpoint.replies = [in_two_seconds, says('{"score": 5}')]
    judge_scorer(setup_for(endpoint, folder, cache=False))(ITEM)
    assert endpoint.times[3] - endpoint.times[2] >= 0.9  # dates have whole seconds


def test_a_pause_beyond_the_time_limit_is_not_waited_for(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [raw(b"slow down", 429, Retry_After="3600")]
    started_at = time.monotonic()
    assert "3600 s" in unscored(endpoint, folder)
    assert time.monotonic() - started_at < 30


def test_silent_endpoint_times_out(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [endpoint.keeps_silent()]
    assert "no reply within" in unscored(endpoint, folder, request_timeout_s=0.3, max_retries=1)
    wait_until(lambda: len(endpoint.requests) >= 2)  # the endpoint reads them in threads of its own
    assert len(endpoint.requests) == 2
    endpoint.replies = [endpoint.keeps_silent(), says('{"score": 5}')]
    assert judge_scorer(setup_for(endpoint, folder, request_timeout_s=2))(ITEM)["reward"] == 0.5


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nX-Header: ",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n",
    ],
)
def test_an_endpoint_that_streams_for_ever_is_given_up(start: bytes, endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [endpoint.drips(start)]
    reason = unscored(endpoint, folder, request_timeout_s=0.4, max_retries=0)
    assert "within 0 s" in reason or "within 1 s" in reason


def test_the_time_for_all_requests_together_is_kept(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [endpoint.keeps_silent()]
    started_at = time.monotonic()
    unscored(endpoint, folder, request_timeout_s=0.3, max_retries=1000, timeout_s=1.0)
    assert len(endpoint.requests) < 10
    assert time.monotonic() - started_at < 10


def test_a_reply_without_end_is_cut_off(endpoint: Endpoint, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.environments.judge_endpoint._MAX_REPLY_BYTES", 1 << 20)
    endpoint.replies = [raw(b"x" * (1 << 21))]
    assert "longer than 1 MiB" in unscored(endpoint, folder, max_retries=0)


def test_unreachable_judge_is_unscored_with_the_reason(endpoint: Endpoint, folder: Path) -> None:
    endpoint.url = "http://127.0.0.1:9/v1"
    assert "ConnectionRefusedError" in unscored(endpoint, folder, max_retries=1)


def test_pauses_grow_and_depend_on_the_question_alone(endpoint: Endpoint, folder: Path) -> None:
    pause = judge_scorer(setup_for(endpoint, folder, retry_base_s=1.0, retry_max_s=5.0)).__self__._pause_s
    for attempt, full in enumerate([1.0, 2.0, 4.0, 5.0, 5.0]):
        assert full / 2 <= pause(attempt, None, "a") <= full
        assert pause(attempt, None, "a") == pause(attempt, None, "a") != pause(attempt, None, "b")


# ── records ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_question_is_paid_for_once(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [says('{"score": 5}', tokens=(100, 10)), says('{"score": 9}')]
    keys: dict[str, Any] = {"input_price": 1.0, "output_price": 1.0}
    first = judge_scorer(setup_for(endpoint, folder, **keys))(ITEM)
    again = judge_scorer(setup_for(endpoint, folder, **keys))(ITEM)  # another process, or a resumed run
    assert (first["reward"], again["reward"]) == (0.5, 0.5)
    assert (first["judge_cost"], again["judge_cost"]) == (0.00011, 0.0)
    assert len(endpoint.requests) == 1
    assert judge_scorer(setup_for(endpoint, folder, cache=False))(ITEM)["reward"] == 0.9
    total = usage_of(folder)
    assert (total["completions"], total["cached"], total["requests"]) == (3, 1, 2)
    assert total["cost"] == pytest.approx(0.00011)


@pytest.mark.parametrize("change", [{"model": "b"}, {"temperature": 1}, {"system": "x"}, {"prompt": "{response}"}])
def test_another_question_is_asked(change: dict[str, Any], endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [says('{"score": 5}'), says('{"score": 9}')]
    judge_scorer(setup_for(endpoint, folder))(ITEM)
    assert judge_scorer({**setup_for(endpoint, folder), **change})(ITEM)["reward"] == 0.9


def test_a_kept_verdict_is_read_anew_and_asked_for_again_if_it_no_longer_fits(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [says('{"score": 5, "style": 2}'), says('{"score": 6, "tone": 3}')]
    assert judge_scorer(setup_for(endpoint, folder))(ITEM)["reward"] == 0.5
    assert judge_scorer(setup_for(endpoint, folder, score_key="style"))(ITEM)["reward"] == 0.2
    assert judge_scorer(setup_for(endpoint, folder, score_key="tone"))(ITEM)["reward"] == 0.3
    assert judge_scorer(setup_for(endpoint, folder, score_key="tone"))(ITEM)["reward"] == 0.3
    assert len(endpoint.requests) == 2


def test_requests_whose_verdict_was_useless_are_paid_for_too(endpoint: Endpoint, folder: Path) -> None:
    endpoint.replies = [says("hm", tokens=(100, 1)), raw(b"", 500), says('{"score": 5}', tokens=(100, 20))]
    found = judge_scorer(setup_for(endpoint, folder, usage_file="spent/usage.json", output_price=1e6))(ITEM)
    total = json.loads((folder / "spent" / "usage.json").read_text())
    assert found["judge_cost"] == total["cost"] == 21.0
    assert (total["requests"], total["prompt_tokens"], total["unscored"]) == (3, 200, 0)


@pytest.mark.parametrize(
    "tokens", ["1" + "0" * 300, "1" + "0" * 400, "1" + "0" * 5000, "1e300", "-5", '"many"', "true", "NaN", "[1]", "{}"]
)
def test_absurd_usage_costs_no_verdict_and_is_not_counted(tokens: str, endpoint: Endpoint, folder: Path) -> None:
    usage = f'{{"prompt_tokens": {tokens}, "completion_tokens": {tokens}}}'
    reply = f'{{"choices": [{{"message": {{"content": "{{\\"score\\": 5}}"}}}}], "usage": {usage}}}'
    endpoint.replies = [raw(reply.encode())]
    (folder / "judge_usage.json").write_text(f'{{"cost": 1{"0" * 400}, "requests": "many", "completions": 2}}')
    found = judge_scorer(setup_for(endpoint, folder, input_price=1.0, output_price=1.0, max_retries=0))(ITEM)
    assert found == {"reward": 0.5, "judge_score": 5.0, "judge_tokens": 0.0, "judge_cost": 0.0}
    total = usage_of(folder)
    assert (total["requests"], total["completions"], total["prompt_tokens"], total["cost"]) == (1, 3, 0, 0.0)


def test_of_two_verdicts_at_once_both_take_the_first(folder: Path) -> None:
    one, other = VerdictCache(folder / "c.sqlite"), VerdictCache(folder / "c.sqlite")
    assert one.put("key", "first") == "first"
    assert other.put("key", "second") == "first"


def test_a_damaged_cache_costs_no_verdict(endpoint: Endpoint, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cache.sqlite").write_bytes(b"this is no database" * 100)
    endpoint.replies = [says('{"score": 5}')]
    score = judge_scorer(setup_for(endpoint, folder))
    assert [score(ITEM)["reward"], score(ITEM)["reward"]] == [0.5, 0.5]
    assert "cache.sqlite" in capsys.readouterr().err


def test_usage_is_summed_over_everybody_who_adds_to_it(folder: Path) -> None:
    def add(_: int) -> None:
        UsageFile(folder / "u.json").add(Usage(completions=1, requests=2), 0.5)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(40)))
    total = json.loads((folder / "u.json").read_text())
    assert (total["completions"], total["requests"], total["cost"]) == (40, 80, 20.0)
    assert sorted(path.name for path in folder.iterdir()) == ["u.json", "u.json.lock"]


# ── settings ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"base_url": "localhost:8000"}, "http://host:port/v1"),
        ({"base_url": "http://localhost:eight/v1"}, "the port must be a number"),
        ({"prompt": "{respons}"}, "did you mean {response}"),
        ({"prompt": "{question}"}, "{response} is missing"),
        ({"prompt": "{response}", "prompt_file": "x"}, "both given"),
        ({"score_range": [1, 1]}, "two different numbers"),
        ({"score_range": [1]}, "at least 2"),
        ({"score_pattern": "("}, "not a regular expression"),
        ({"labels": {"yes": 11}}, "outside of score_range"),
        ({"max_retrys": 1}, "did you mean 'max_retries'"),
        ({"model": ""}, "at least 1 character"),
    ],
)
def test_wrong_settings_are_named(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_reward({"type": "judge", "base_url": "http://x/v1", "model": "m", **keys})
    assert reason in str(caught.value)


def test_a_missing_key_or_prompt_ends_the_run_before_it_starts(
    endpoint: Endpoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(BadSetup, match="NO_SUCH_KEY, which is not set"):
        judge_scorer(setup_for(endpoint, folder, api_key_env="NO_SUCH_KEY"))
    with pytest.raises(BadSetup, match="No such file"):
        judge_scorer(setup_for(endpoint, folder, prompt_file="missing.txt"))
    block = {"type": "judge", "base_url": endpoint.url, "model": "m", "api_key_env": "NO_SUCH_KEY"}
    with pytest.raises(InputError, match=r"env\.help cannot start: api_key_env names"):
        check_environments({"help": block}, folder)
    assert not endpoint.requests


def test_the_default_place_of_the_cache_is_the_users(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    judge_scorer(setup_for(endpoint, tmp_path / "run", cache_path=None))
    assert (tmp_path / "posttrain" / "judge.sqlite").is_file()


def test_in_a_pool_of_workers_good_answers_are_scored_and_bad_verdicts_are_not(
    endpoint: Endpoint, folder: Path
) -> None:
    def grade(handler: http.server.BaseHTTPRequestHandler) -> None:
        asked = endpoint.requests[-1]["messages"][0]["content"]
        verdict = "no idea" if "?" in asked.split("<answer>")[-1] else '{"score": 8}'
        says(verdict)(handler)

    endpoint.replies = [grade]
    block = {"type": "judge", "base_url": endpoint.url, "model": "m", "max_retries": 1, "retry_base_s": 0.01}
    block |= {"cache_path": "c.sqlite", "num_workers": 1}
    task = Task(0, "t", "what", (), reference="x", environment="help")
    completions = [Completion((), (), text, "stop") for text in ("an answer", "what?", "an answer")]
    address = f"{endpoint.url}/chat/completions"  # it may be given with its last part
    with build_environments({"help": {**block, "base_url": address}}, base_folder=folder) as environments:
        scores = environments.score([task, task, task], completions)
    assert [score.reward for score in scores] == [0.8, None, 0.8]
    assert "no verdict after 2 requests" in (scores[1].error or "")
    assert usage_of(folder)["cached"] == 1
