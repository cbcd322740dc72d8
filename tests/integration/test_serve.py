"""The server as its clients see it: OpenAI's own client, plain HTTP, many at once, and those who leave."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file
from tiny_server import ENGINE, RunningServer, options_for, running, save_adapter, save_model

from posttrain.apps.serve import server as serve_server
from posttrain.apps.serve.canary import CanaryRules
from posttrain.apps.serve.listener import listen
from posttrain.apps.serve.loading import build_service
from posttrain.apps.serve.options import ServerLimits
from posttrain.apps.serve.server import DrainingServer
from posttrain.cli.serve_command import _keys
from posttrain.engines.choose_engine import load_for_sampling
from posttrain.engines.native.noise import prompt_seed
from posttrain.errors import InputError
from posttrain.types import NoiseKey, Sampling, Task

HELLO = [{"role": "user", "content": "hello"}]
# Long enough to be there while others come and go.
LONG: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 150, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared_server(model: Path) -> Iterator[RunningServer]:
    with running(options_for(model)) as found:
        yield found


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """Empty after each test: its engine is in this process, where one forward pass may run at a time."""
    yield shared_server
    shared_server.wait_until_empty()


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, **settings: Any) -> Any:
    request = {"model": "tiny", "messages": HELLO, "max_tokens": 20, **settings}
    return client.chat.completions.create(**request)  # type: ignore[call-overload]


def streamed_logprobs(chunks: Any) -> list[Any]:
    return [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)


# -- the API -----------------------------------------------------------------------------------------------------------


def test_the_openai_client_gets_models_and_answers(client: openai.OpenAI) -> None:
    assert [found.id for found in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    answer = ask(client, seed=4, n=3)
    assert answer.object == "chat.completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert all(choice.message.role == "assistant" for choice in answer.choices)
    assert answer.usage.prompt_tokens > 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = ask(client, seed=4, n=3)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]
    assert ask(client, seed=5).choices[0].message.content != answer.choices[0].message.content


def test_streamed_answer_equals_whole_answer(client: openai.OpenAI) -> None:
    for settings in ({"seed": 7, "n": 2}, {"seed": 8, "temperature": 0.0}, {"seed": 9, "max_tokens": 1}):
        whole = ask(client, **settings)
        texts, reasons, usage = {}, {}, None
        for chunk in ask(client, **settings, stream=True, stream_options={"include_usage": True}):
            assert chunk.object == "chat.completion.chunk"
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.index not in texts:
                    assert choice.delta.role == "assistant"
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                reasons[choice.index] = choice.finish_reason
        assert texts == {choice.index: choice.message.content for choice in whole.choices}
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        assert usage == whole.usage
    assert all(chunk.usage is None for chunk in ask(client, stream=True)), "not unless it is asked for"


def test_stop_strings_end_the_answer_and_are_not_part_of_it(client: openai.OpenAI) -> None:
    whole = ask(client, seed=2, max_tokens=60, extra_body={"ignore_eos": False}).choices[0].message.content
    stop = whole[4:6]
    expected = whole[: whole.index(stop)]
    for settings in ({"stop": stop}, {"stop": ["never there", stop]}):
        answer = ask(client, seed=2, max_tokens=60, **settings)
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 60
    chunks = list(ask(client, seed=2, max_tokens=60, stop=stop, logprobs=True, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    listed = ask(client, seed=2, max_tokens=60, stop=stop, logprobs=True)
    content = listed.choices[0].logprobs.content
    listed_text = bytes(byte for entry in content for byte in entry.bytes).decode(errors="replace")
    assert listed_text.startswith(expected)
    assert len(content) == listed.usage.completion_tokens, "those of the stop string included"
    assert streamed_logprobs(chunks) == content


def test_logprobs_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"seed": 3, "temperature": 0.0, "logprobs": True, "top_logprobs": 3}
    settings["extra_body"] = {"ignore_eos": True}
    answer = ask(client, **settings)
    content = answer.choices[0].logprobs.content
    assert len(content) == 20 == answer.usage.completion_tokens
    for entry in content:
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the most probable"
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)
    said = bytes(byte for entry in content for byte in entry.bytes)
    assert said.decode(errors="replace") == answer.choices[0].message.content
    found = streamed_logprobs(ask(client, **settings, stream=True))
    assert [entry.bytes for entry in found] == [entry.bytes for entry in content]
    assert ask(client).choices[0].logprobs is None


def test_completions_of_texts_and_tokens(client: openai.OpenAI, model: Path) -> None:
    _, tokenizer = load_for_sampling(str(model), device="cpu")
    ids = tokenizer("two words")["input_ids"]
    settings: dict[str, Any] = {"model": "tiny", "seed": 6, "max_tokens": 9, "n": 2}
    both = client.completions.create(prompt=["other", "two words"], **settings)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    of_text = client.completions.create(prompt="two words", **settings)
    of_tokens = client.completions.create(prompt=ids, **settings, logprobs=2)
    texts = [[c.text for c in choices] for choices in (of_text.choices, of_tokens.choices, both.choices[2:])]
    assert texts[0] == texts[1] == texts[2]
    whole = of_tokens.choices[0].logprobs
    assert len(whole.tokens) == len(whole.top_logprobs) > 0
    streamed = list(client.completions.create(prompt="two words", **{**settings, "n": 1}, logprobs=2, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == of_text.choices[0].text
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        found, expected = [entry for part in parts for entry in getattr(part, name)], getattr(whole, name)
        if name == "top_logprobs":  # another batch, so other rounding
            assert [set(entry) for entry in found] == [set(entry) for entry in expected]
        else:
            assert found == (pytest.approx(expected, abs=1e-5) if name == "token_logprobs" else expected)


def test_curl_gets_events_as_they_are(server: RunningServer) -> None:
    body = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 3, "stream": True})
    ended = subprocess.run(
        ["curl", "-sN", f"{server.url}/v1/chat/completions", "-d", body], capture_output=True, timeout=30, check=True
    )
    events = ended.stdout.decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-1])


# -- many at once ------------------------------------------------------------------------------------------------------


def test_answers_are_not_mixed_up_under_load(server: RunningServer, model: Path) -> None:
    """Forty at once, with eight places: each gets what the engine gives to it alone."""
    engine, tokenizer = load_for_sampling(str(model), device="cpu", max_total_tokens=256)
    prompts = [f"request {number} " + "x" * (number % 7) for number in range(40)]
    settings = [
        {"temperature": (0.0, 0.8, 1.0)[n % 3], "top_p": (1.0, 0.9)[n % 2], "seed": n, "max_tokens": 5 + n % 17}
        for n in range(40)
    ]

    async def one(client: openai.AsyncOpenAI, prompt: str, chosen: dict[str, Any]) -> str:
        if chosen["seed"] % 2:
            answer = await client.completions.create(model="tiny", prompt=prompt, **chosen)
            return answer.choices[0].text
        stream = await client.completions.create(model="tiny", prompt=prompt, stream=True, **chosen)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everybody() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, p, s) for p, s in zip(prompts, settings, strict=True)))

    answers = asyncio.run(everybody())
    server.wait_until_empty()  # before the other engine runs
    for prompt, chosen, answer in zip(prompts, settings, answers, strict=True):
        task = Task(0, "t", "", tuple(tokenizer(prompt)["input_ids"]))
        sampling = Sampling(chosen["max_tokens"], chosen["temperature"], chosen["top_p"])
        [[expected]] = engine.generate([task], 1, sampling, NoiseKey(prompt_seed(chosen["seed"], task.prompt_ids), 0))
        assert answer == expected.text


def test_full_queue_answers_429_until_there_is_room(model: Path) -> None:
    engine = replace(ENGINE, max_batch_size=2)
    with running(options_for(model, engine=engine, limits=ServerLimits(max_queue=1))) as server:
        url = f"{server.url}/v1/chat/completions"
        with httpx.Client(timeout=30) as client:
            streams = [client.stream("POST", url, json={**LONG, "max_tokens": 80, "stream": True}) for _ in range(3)]
            with server.paused():
                opened = [stream.__enter__() for stream in streams]
                assert [response.status_code for response in opened] == [200, 200, 200]
                refused = client.post(url, json=LONG)
                assert refused.status_code == 429
                assert int(refused.headers["Retry-After"]) >= 1
                assert refused.json()["error"]["code"] == "rate_limit_exceeded"
                assert client.post(url, json={**LONG, "n": 3}).status_code == 400, "more than can ever run together"
            said = ["".join(response.iter_text()) for response in opened]
            for stream in streams:
                stream.__exit__(None, None, None)
            assert all(text.endswith("data: [DONE]\n\n") for text in said)
            server.wait_until_empty()
            assert client.post(url, json={**LONG, "max_tokens": 3}).status_code == 200
        assert server.metric("posttrain_refused_requests_total", status="429") == 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_conversation_that_continues_is_not_computed_again_unless_the_cache_is_off(
    model: Path, prefix_cache: bool
) -> None:
    body = {"model": "tiny", "prompt": "a beginning of many tokens " * 3, "max_tokens": 40, "temperature": 0}
    with running(options_for(model, engine=replace(ENGINE, prefix_cache=prefix_cache))) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            first, again = (client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2))
        assert first == again
        reused = server.metric("posttrain_reused_prompt_tokens", version="production")
        assert (reused > 40) == prefix_cache
        server.wait_until_empty()


# -- those who leave ---------------------------------------------------------------------------------------------------


def disconnected(server: RunningServer) -> float:
    return server.metric("posttrain_requests_total", model="tiny", version="production", outcome="disconnected")


def test_closed_stream_frees_its_slot(model: Path) -> None:
    with running(options_for(model)) as server:
        server.slow_down(0.3)  # most of a minute for the whole answer: it is not over by itself on a busy machine
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()  # kept: an iterator that nobody holds any more closes the connection
            next(lines)
            assert server.service.num_inside == 1
        server.wait_until_empty()
        assert disconnected(server) == 1


def test_closed_connection_frees_the_slots_of_a_request_that_does_not_stream(model: Path) -> None:
    with running(options_for(model)) as server:
        server.slow_down(0.3)  # the client leaves in the first step, before the engine has reported anything
        body = json.dumps({**LONG, "n": 6}).encode()
        with connect(server) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            server.wait_until(lambda: server.service.num_inside)
        server.wait_until_empty()
        assert not any(session.unfinished for session in server.sessions)
        assert disconnected(server) == 1


def test_request_timeout_is_reported_to_the_client(model: Path) -> None:
    limits = ServerLimits(request_timeout_s=0.15, body_timeout_s=1.0)
    with running(options_for(model, limits=limits)) as server, httpx.Client(timeout=30) as client:
        server.slow_down(0.005)
        url = f"{server.url}/v1/chat/completions"
        late = client.post(url, json=LONG)
        assert late.status_code == 504
        assert late.json()["error"]["type"] == "timeout_error"
        streamed = client.post(url, json={**LONG, "stream": True}).text
        assert '"error":{' in streamed
        assert "[DONE]" not in streamed
        strict = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with strict, pytest.raises(openai.APIError, match="no complete answer"):
            list(ask(strict, max_tokens=150, seed=1, extra_body={"ignore_eos": True}, stream=True))
        server.wait_until_empty()
        assert server.metric("posttrain_requests_total", model="tiny", version="production", outcome="timeout") == 3
        with connect(server) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in slow.recv(4096)


# -- who may come in, and with what ------------------------------------------------------------------------------------


def test_a_key_is_needed_where_one_is_set(model: Path) -> None:
    keys = ("sk-one", "sk-two")
    with running(options_for(model, api_keys=keys)) as server, httpx.Client(base_url=server.url) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        rated = {"id": "a", "score": 1.0}
        requests = [("GET", "/v1/models", None), ("POST", "/v1/completions", body), ("POST", "/v1/feedback", rated)]
        for method, path, send in requests:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sk-one"}):
                response = client.request(method, path, json=send, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/health").status_code == 200
        assert client.head("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
        for key in keys:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as allowed:
                assert allowed.completions.create(**body).choices


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Origin": "http://evil.example"}, "foreign_origin"),
        ({"Origin": "null"}, "foreign_origin"),
        ({"Host": "evil.example"}, "foreign_host"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "foreign_host"),
        ({"Host": "["}, "foreign_host"),
        ({"Host": "[::1"}, "foreign_host"),
    ],
)
def test_a_web_page_cannot_use_a_server_without_a_key(
    server: RunningServer, headers: dict[str, str], code: str
) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1})
    sent = {"Content-Type": "text/plain", **headers}
    with httpx.Client(base_url=server.url) as client:
        refused = client.post("/v1/completions", content=body, headers=sent)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
        for path in ("/v1/models", "/health", "/metrics"):
            assert client.get(path, headers=headers).status_code == 403
        own = {"Origin": server.url} if "Origin" in headers else {"Host": "localhost"}
        assert client.post("/v1/completions", content=body, headers=own).status_code == 200


def test_probes_reach_the_server_by_ip_address(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        for host in ("10.42.0.7:8000", "[fd00::7]:8000", "127.0.0.1", "localhost:8000"):
            for path in ("/health", "/metrics"):
                assert client.get(path, headers={"Host": host}).status_code == 200
        assert client.get("/v1/models", headers={"Host": "10.42.0.7:8000"}).status_code == 403


def test_host_that_is_no_host_is_no_error_of_the_server(model: Path) -> None:
    with running(options_for(model, api_keys=["sk-one"])) as server, httpx.Client(base_url=server.url) as client:
        for host in ("[", "[::1", "]", "a:b:c", ""):
            for path, status in (("/health", 200), ("/health/", 307), ("/nothing", 404), ("/v1/models", 401)):
                assert client.get(path, headers={"Host": host}).status_code == status


def test_no_auth_serves_every_host_but_no_foreign_page(model: Path) -> None:
    with running(options_for(model, no_auth=True)) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/models", headers={"Host": "models.internal"}).status_code == 200
        foreign = {"Host": "models.internal", "Origin": "http://evil.example"}
        assert client.get("/v1/models", headers=foreign).status_code == 403


def test_bodies_and_prompts_over_the_limits(model: Path) -> None:
    limits = ServerLimits(max_body_bytes=2000, max_completion_tokens=30)
    with running(options_for(model, limits=limits)) as server, httpx.Client(base_url=server.url) as client:
        large = json.dumps({"model": "tiny", "prompt": "x" * 3000}).encode()
        for content in (large, iter([large[:1500], large[1500:]])):  # announced, and in chunks of unknown number
            response = client.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        with connect(server) as announced:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            announced.sendall(head + b"Content-Length: 999999999999\r\n\r\n")
            assert announced.recv(100).startswith(b"HTTP/1.1 413"), "the body never comes"
        cases = [
            ({"prompt": "x" * 250}, "context_length_exceeded"),
            ({"prompt": "x", "max_tokens": 31}, None),
            ({"prompt": [260]}, None),
            ({"prompt": ""}, None),
            ({"prompt": "\ud800"}, None),
            ({"prompt": ["a"] * 9}, None),
        ]
        for extra, code in cases:
            response = client.post("/v1/completions", content=json.dumps({"model": "tiny", **extra}))
            assert response.status_code == 400, (extra, response.text)
            assert response.json()["error"]["code"] == code
        chat = client.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
        assert chat.json()["usage"]["completion_tokens"] <= 30, "what the server allows, where nothing is asked"
        assert client.post("/v1/chat/completions", json={"model": "no", "messages": HELLO}).status_code == 404
        for path in ("/v1/nothing", "/v1/models/nothing"):
            assert client.get(path).status_code == 404
            assert "message" in client.get(path).json()["error"]
        refused = client.get("/v1/completions")
        assert (refused.status_code, refused.headers["Allow"]) == (405, "POST")
        server.wait_until_empty()


# -- adapters and versions ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(save_adapter(folder / name, model, seed)) for seed, name in enumerate(("polite.v1", "maths"))}


def test_adapters_are_models(model: Path, adapters: dict[str, str]) -> None:
    names = ["tiny", "polite.v1", "maths"]
    expected = {}
    for name, source in zip(names, [str(model), *adapters.values()], strict=True):
        engine, tokenizer = load_for_sampling(source, device="cpu", max_total_tokens=256)
        task = Task(0, "t", "", tuple(tokenizer("hello")["input_ids"]))
        key = NoiseKey(prompt_seed(3, task.prompt_ids), 0)
        [[completion]] = engine.generate([task], 1, Sampling(25, ignore_eos=True), key)
        expected[name] = completion.text
    assert len(set(expected.values())) == 3
    settings: dict[str, Any] = {"seed": 3, "max_tokens": 25, "extra_body": {"ignore_eos": True}}
    with running(options_for(model, adapters=adapters)) as server:

        async def everybody() -> list[tuple[str, str]]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                assert [found.id async for found in client.models.list()] == names
                asked = [names[number % 3] for number in range(12)]
                answers = await asyncio.gather(
                    *(client.completions.create(model=name, prompt="hello", **settings) for name in asked)
                )
                return [(name, answer.choices[0].text) for name, answer in zip(asked, answers, strict=True)]

        for name, answer in asyncio.run(everybody()):
            assert answer == expected[name]


def versions_of(server: RunningServer, users: list[str]) -> list[str]:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "seed": 0}
    with httpx.Client(base_url=server.url) as client:
        responses = [client.post("/v1/completions", json={**body, "user": user}) for user in users]
    return [response.headers.get("x-posttrain-version", "") for response in responses]


def test_a_canary_shares_the_traffic_and_its_errors_send_everybody_back(model: Path, tmp_path: Path) -> None:
    rules = CanaryRules(share=0.5, max_error_rate=0.2, min_requests=5, window=10)
    said: list[str] = []
    options = options_for(model, canary=str(save_model(tmp_path / "other", seed=9)), canary_rules=rules)
    with running(options, said) as server:
        users = [f"user{number}" for number in range(30)]
        first = versions_of(server, users)
        assert {"production", "canary"} == set(first)
        assert versions_of(server, users) == first, "a user stays with one version"
        answered = server.metric("posttrain_requests_total", model="tiny", version="canary", outcome="ok")
        assert answered == 2 * first.count("canary")
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "seed": 0, "temperature": 0}
        one, other = (users[first.index(name)] for name in ("production", "canary"))
        with httpx.Client(base_url=server.url) as client:
            texts = [client.post("/v1/completions", json={**body, "user": user}).json() for user in (one, other)]
        assert texts[0]["choices"][0]["text"] != texts[1]["choices"][0]["text"]

        _, broken = server.sessions
        steps = iter([False, True] * 50)
        work = broken.step

        def fails_often() -> Any:
            if next(steps):
                raise RuntimeError("out of luck")
            return work()

        broken.step = fails_often  # type: ignore[method-assign]
        later = versions_of(server, users * 2)
        assert "canary" in later[:20]
        assert set(later[-15:]) == {"production"}
        with httpx.Client(base_url=server.url) as client:
            health = client.get("/health")
        assert health.status_code == 200
        assert "failed" in health.json()["canary"]["rolled_back"]
        assert server.metric("posttrain_canary_share", version="canary") == 0
        assert any("rolled back" in line for line in said)


def test_feedback_is_the_kpi_of_a_canary(model: Path, adapters: dict[str, str]) -> None:
    """The canary is an adapter here: one base model in memory, two versions."""
    rules = CanaryRules(share=0.5, max_kpi_drop=0.1, min_feedback=8)
    with running(options_for(model, adapters=adapters, canary="maths", canary_rules=rules)) as server:
        with httpx.Client(base_url=server.url) as client:
            assert client.post("/v1/feedback", json={"id": "nobody", "score": 1}).status_code == 404
            for number in range(60):
                body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "user": f"user{number}"}
                answer = client.post("/v1/completions", json=body)
                score = 0.2 if answer.headers["x-posttrain-version"] == "canary" else 0.8
                rated = client.post("/v1/feedback", json={"id": answer.json()["id"], "score": score + number % 2 / 10})
                assert rated.json()["version"] == answer.headers["x-posttrain-version"]
                again = client.post("/v1/feedback", json={"id": answer.json()["id"], "score": 1})
                assert again.status_code == 404, "an answer is rated once"
            health = client.get("/health").json()["canary"]
            assert "mean score" in health["rolled_back"]
            assert health["scores"]["canary"]["mean"] < 0.4 < health["scores"]["production"]["mean"]
            assert set(versions_of(server, [f"user{number}" for number in range(20)])) == {"production"}
        assert server.metric("posttrain_kpi_mean", version="production") > 0.7


# -- when things go wrong ----------------------------------------------------------------------------------------------


def test_a_step_that_fails_costs_its_requests_and_a_third_in_a_row_the_server(model: Path) -> None:
    with running(options_for(model)) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "ignore_eos": True}
        [session] = server.sessions
        work, failures = session.step, 1

        def fails() -> Any:
            nonlocal failures
            if failures:
                failures -= 1
                raise RuntimeError("CUDA error: something\nmore lines")
            return work()

        session.step = fails  # type: ignore[method-assign]
        failed = client.post("/v1/completions", json=body)
        assert failed.status_code == 500
        assert "RuntimeError: CUDA error: something" in failed.json()["error"]["message"]
        assert client.post("/v1/completions", json=body).status_code == 200
        failures = 3
        assert [client.post("/v1/completions", json=body).status_code for _ in range(4)] == [500, 500, 500, 503]
        assert client.get("/health").status_code == 503
        server.wait_until_empty()


def test_a_model_whose_weights_are_damaged_is_not_healthy_for_long(model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    with running(options_for(damaged)) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
        codes = [client.post("/v1/completions", json=body).status_code for _ in range(4)]
        assert codes == [500, 500, 500, 503]
        assert client.get("/health").json()["status"] == "failed"


def test_a_damaged_adapter_ends_itself_alone(model: Path, tmp_path: Path) -> None:
    damaged = save_adapter(tmp_path / "damaged", model, seed=1)
    weights = load_file(damaged / "adapter_model.safetensors")
    for weight in weights.values():
        weight.fill_(float("nan"))
    save_file(weights, damaged / "adapter_model.safetensors", metadata={"format": "pt"})
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
    options = options_for(model, adapters={"damaged": str(damaged)})
    with running(options) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        codes = [client.post("/v1/completions", json={**body, "model": "damaged"}).status_code for _ in range(4)]
        assert codes == [500, 500, 500, 503]
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/health").status_code == 200
    rules = CanaryRules(share=0.5)
    with running(replace(options, canary="damaged", canary_rules=rules)) as server:
        versions_of(server, [f"user{number}" for number in range(20)])
        with httpx.Client(base_url=server.url, timeout=30) as client:
            health = client.get("/health")
            assert health.status_code == 200
            assert "has failed" in health.json()["canary"]["rolled_back"]
            codes = [client.post("/v1/completions", json={**body, "user": f"u{n}"}).status_code for n in range(10)]
        assert codes == [200] * 10


def test_clients_get_an_error_when_draining_times_out(model: Path) -> None:
    service = build_service(options_for(model), lambda _: None)
    with listen("127.0.0.1", 0) as door:
        port = door.getsockname()[1]
        server = DrainingServer(service, "127.0.0.1", port, drain_timeout_s=0.0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
        thread.start()
        running_server = RunningServer(service, f"http://127.0.0.1:{port}")
        running_server.wait_until(lambda: server.started)
        running_server.slow_down(0.3)  # most of a minute for an answer: none is over by itself
        url, whole = f"{running_server.url}/v1/chat/completions", []
        asking = threading.Thread(target=lambda: whole.append(httpx.post(url, json=LONG, timeout=60)))
        asking.start()
        with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=60) as response:
            parts = response.iter_lines()
            next(parts)
            running_server.wait_until(lambda: service.num_inside == 2)
            server.handle_exit(signal.SIGTERM, None)
            last = [part for part in parts if part][-1]
        asking.join(30)
        thread.join(30)
        assert not thread.is_alive()
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
    assert whole[0].status_code == 503
    assert "shut down" in whole[0].json()["error"]["message"]
    assert server.num_cut == 2
    cut = {"model": "tiny", "version": "production", "outcome": "shutdown"}
    assert running_server.metric("posttrain_requests_total", **cut) == 2


def test_signal_handlers_are_installed_before_the_ready_message(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("ready"):
            signal.raise_signal(signal.SIGTERM)

    def nobody_listens(sig: int, frame: Any) -> None:
        raise AssertionError("it says that it is ready and does not hear")

    monkeypatch.setattr(serve_server, "say", say)
    usual = signal.signal(signal.SIGTERM, nobody_listens)
    try:
        assert serve_server.run(build_service(options_for(model), said.append), "127.0.0.1", 0, 5.0) == 0
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert said[-1] == "ended; every request was answered"


def test_connections_that_never_ask_are_closed_and_long_answers_are_not(model: Path) -> None:
    with running(options_for(model, limits=ServerLimits(body_timeout_s=1.0))) as server:
        server.slow_down(0.05)
        body = {**LONG, "max_tokens": 40, "stream": True}  # takes twice as long as a connection may be silent
        with connect(server) as silent, connect(server) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
                assert "data: [DONE]" in list(response.iter_lines())
            assert (silent.recv(10), half.recv(10)) == (b"", b"")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-model-len", "9999"], "made for 1024 tokens"),
        (["--adapter", "nonsense"], "NAME=ADAPTER"),
        (["--adapter", "tiny={model}", "--served-model-name", "tiny"], "both called 'tiny'"),
        (["--adapter", "other={model}"], "an adapter is needed"),
        (["--canary", "nowhere", "--canary-share", "2"], "--canary-share is 2.0"),
        (["--canary", "./nowhere"], "no folder './nowhere'"),
        (["--canary-share", "0.2"], "--canary-share needs --canary MODEL"),
        (["--canary-max-kpi-drop", "0"], "--canary-max-kpi-drop needs --canary MODEL"),
        (["--kv-cache-gib", "0.0000001"], "raise kv_cache_gib"),
        (["--max-model-len", "9999", "--processes", "2"], "made for 1024 tokens"),
        (["--backend", "vllm", "--no-prefix-cache"], "no counterpart for --no-prefix-cache"),
        (["--max-batch-size", "0"], "--max-batch-size is 0"),
        (["--backend", "vllm", "--max-queue", "256"], "no counterpart for --max-queue"),  # also where it is our default
        (["--drain-timeout-s", "-1"], "--drain-timeout-s is -1.0: at least 0"),
        (["--body-timeout-s", "0"], "--body-timeout-s is 0.0: more than 0"),
        (["another"], "unexpected: 'another'"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: everyone who can reach it could use the server"),
        (["--host", "0.0.0.0", "--backend", "vllm"], "--host 0.0.0.0: everyone who can reach it could use the server"),
        (["--no-auth", "--api-key", "sk"], "--no-auth and a key"),
        (["--api-key-file", "/does/not/exist"], "cannot be read"),
        (["--api-key-file", "/dev/zero"], "cannot be read: more than 1 MiB"),
        (["--api-key-file", "{model}/model.safetensors"], "cannot be read: it is no UTF-8 text"),
        (["--kv-cache-gib", "nan"], "--kv-cache-gib is nan: more than 0 is accepted"),
        (["--gpu-memory-utilization", "90"], "--gpu-memory-utilization is 90.0: more than 0 and at most 1 is accepted"),
    ],
)
def test_bad_command_lines_say_what_is_wrong(
    model: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.apps.serve import vllm_backend
    from posttrain.cli.main import main

    monkeypatch.setattr(vllm_backend.shutil, "which", lambda name: "/bin/false")
    filled = [argument.format(model=model) for argument in arguments]
    assert main(["serve", str(model), "--device", "cpu", "--port", "0", *filled]) == 64
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("keys", ["", " ", ",\n , \n"])
@pytest.mark.parametrize("source", ["variable", "file", "argument"])
def test_keys_that_turn_out_to_be_none_do_not_open_the_server(
    keys: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.cli.main import main

    file = tmp_path / "keys"
    file.write_text(keys)
    if source == "variable":
        monkeypatch.setenv("POSTTRAIN_API_KEY", keys)
    given = {"variable": [], "file": ["--api-key-file", str(file)], "argument": ["--api-key", keys]}[source]
    assert main(["serve", "never-looked-at", *given]) == 64
    assert "holds no key: everyone could use the server" in capsys.readouterr().err


def test_port_in_use_is_reported_before_loading(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from posttrain.cli.main import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(model), "--port", port]) == 64
    error = capsys.readouterr().err
    assert f"port {port}" in error
    assert "loading" not in error


@pytest.mark.parametrize(
    ("request_bytes", "message"),
    [
        (b"nonsense\r\n\r\n", "Invalid HTTP request received."),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
         b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", "Content-Length and Transfer-Encoding exclude each other"),
    ],
)  # fmt: skip
def test_a_request_that_is_no_request_gets_an_error_of_the_api_and_the_connection_ends(
    server: RunningServer, request_bytes: bytes, message: str
) -> None:
    with connect(server) as connection:
        connection.sendall(request_bytes)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["message"] == message


def test_clients_are_not_told_where_the_model_is(server: RunningServer, model: Path) -> None:
    answer = httpx.get(f"{server.url}/v1/models").json()
    assert answer["data"][0]["root"] == model.name
    assert str(model.parent) not in json.dumps(answer)


def test_comments_in_a_file_of_keys_are_no_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the team, rotated monthly\nsk-one\n  # old: sk-two\nsk-three,sk-four\n")
    assert _keys(None, tmp_path / "keys") == ("sk-one", "sk-three", "sk-four")
    (tmp_path / "keys").write_text("# nothing\n")
    with pytest.raises(InputError, match="holds no key"):
        _keys(None, tmp_path / "keys")
