"""Tools, schemas and token ids on the wire, with OpenAI's own client. A random model calls tools for certain, because
its answers are constrained; without a constraint its tokens are forced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tiny_models import byte_tokenizer
from tiny_server import ENGINE as TINY_ENGINE
from tiny_server import RunningServer, options_for, running, save_model

from posttrain.data.chat import ChatFormat
from posttrain.data.tool_prompts import ToolChat
from posttrain.engines.native.noise import prompt_seed
from posttrain.engines.native.session import GenerationSession, SessionRequest, TokenEvent
from posttrain.types import Sampling

# As Qwen's: tools in a system turn, calls in tags.
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools><|im_end|>\n{%- endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{%- for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{%- endfor %}'
    "<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- if style is defined %}"
    "({{ style }}) {%- endif %}{%- endif %}"
)
THINKING = TEMPLATE.replace(
    "{{ m.content }}", "{%- if m.reasoning_content %}<think></think>{%- endif %}{{ m.content }}"
)
ENGINE = replace(TINY_ENGINE, max_model_len=1024, kv_cache_gib=0.05)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {
    "zone": {"enum": ["utc", "local"]}}, "required": ["zone"], "additionalProperties": False}}}  # fmt: skip
ASKED = [{"role": "user", "content": "?"}]
SCHEMA = WEATHER["function"]["parameters"]
CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": "utc"}}\n</tool_call>'


def tokenizer_with(template: str) -> Any:
    found = byte_tokenizer()
    found.chat_template = template
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(TEMPLATE)


def saved(folder: Path, template: str) -> Path:
    tokenizer_with(template).save_pretrained(save_model(folder))
    return folder


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(options_for(saved(tmp_path_factory.mktemp("tiny"), TEMPLATE), engine=ENGINE)) as found:
        yield found


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    yield shared_server
    shared_server.wait_until_empty()


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, **settings: Any) -> Any:
    request = {"model": "tiny", "messages": ASKED, "max_tokens": 90, "seed": 1, **settings}
    return client.chat.completions.create(**request)  # type: ignore[call-overload]


def refused(client: openai.OpenAI, **settings: Any) -> tuple[str | None, str]:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **settings)
    return raised.value.param, raised.value.message


def force(server: RunningServer, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, text: str) -> None:
    """Whatever is sampled, the answer is this text and the end of the turn."""
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    [session] = server.sessions
    step, places = session.step, dict[tuple[str, int], int]()

    def forced() -> list[Any]:
        events = []
        for event in step():
            assert isinstance(event, TokenEvent)
            place = places[event.request_id, event.sample] = places.get((event.request_id, event.sample), -1) + 1
            if place < len(ids):
                reason = "stop" if place == len(ids) - 1 else None
                events.append(event._replace(token_id=ids[place], finish_reason=reason))
        return events

    monkeypatch.setattr(session, "step", forced)


def together(chunks: Any) -> tuple[dict[str, Any], str | None]:
    """A message put together from the deltas of a stream, as clients do it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    reason = None
    for chunk in chunks:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            for call in choice.delta.tool_calls or ():
                found = message["tool_calls"].setdefault(call.index, ["", ""])
                found[0] += call.function.name or ""
                found[1] += call.function.arguments or ""
                assert call.id
                assert call.type == "function"
    return message, reason


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_required_call_comes_with_arguments_of_its_schema(client: openai.OpenAI, stream: bool) -> None:
    for choice, names in (
        ("required", {"weather", "time"}),
        ({"type": "function", "function": {"name": "time"}}, {"time"}),
    ):
        for seed in range(3):
            answer = ask(client, tools=[WEATHER, TIME], tool_choice=choice, seed=seed, stream=stream,
                         parallel_tool_calls=False)  # fmt: skip
            if stream:
                message, reason = together(answer)
                [(name, arguments)] = message["tool_calls"].values()
                assert message["content"] == ""
            else:
                [call] = answer.choices[0].message.tool_calls
                name, arguments, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
                assert answer.choices[0].message.content is None
            assert reason == "tool_calls"
            assert name in names
            value = json.loads(arguments)
            assert value["zone"] in ("utc", "local") if name == "time" else value["days"] in range(1, 10)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_calls_reasoning_and_text_are_told_apart(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with (
        running(options_for(saved(tmp_path, THINKING), engine=ENGINE)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        _calls_reasoning_and_text(server, client, tokenizer, monkeypatch, stream)
        server.wait_until_empty()


def _calls_reasoning_and_text(
    server: RunningServer, client: openai.OpenAI, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    force(server, monkeypatch, tokenizer, f"<think>\nHm.\n</think>\n\nI ask.\n{CALL}\n{CALL.replace('utc', 'local')}")
    unending: Any = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}  # the sampled end is not the forced one
    settings = {"tools": [WEATHER, TIME], "stream": stream, **unending}
    answer = ask(client, **settings)
    if stream:
        message, reason = together(answer)
        calls = [message["tool_calls"][index] for index in range(2)]
        content, reasoning = message["content"], message["reasoning_content"]
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls]
        content, reasoning = message.content, message.model_extra["reasoning_content"]
        assert len({call.id for call in message.tool_calls}) == 2
    assert (content, reasoning, reason) == ("I ask.", "Hm.", "tool_calls")
    assert calls == [["time", '{"zone": "utc"}'], ["time", '{"zone": "local"}']]
    free = ask(client, tools=[TIME], tool_choice="none", **unending)
    assert free.choices[0].message.tool_calls is None, "calls are not read"
    assert CALL in free.choices[0].message.content
    assert ask(client, **unending).choices[0].finish_reason == "stop"


def test_a_conversation_with_tools_goes_on(client: openai.OpenAI, server: RunningServer, tokenizer: Any) -> None:
    """The loop of every agent: the answer and the result go back, and the prompt is what the template writes."""
    messages: list[Any] = list(ASKED)
    required: Any = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}
    for turn in range(2):
        answer = ask(client, messages=messages, seed=turn, **required).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": c.id, "content": f"{turn}"} for c in answer.tool_calls]
    last = ask(client, messages=messages, tools=[WEATHER, TIME], max_tokens=1, extra_body={"return_token_ids": True})
    prompt = tokenizer.decode(last.model_extra["prompt_token_ids"])
    assert prompt.count("<tool_call>\n{") == sum(len(m["tool_calls"]) for m in messages if "tool_calls" in m) == 2
    assert prompt == ToolChat(ChatFormat(tokenizer)).render(messages, [WEATHER, TIME])
    assert ask(client, messages=[*ASKED, {"role": "assistant", "content": None}, *ASKED], tools=[], max_tokens=1)


def test_strict_tools_and_one_call_at_most(client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**TIME["function"], "strict": True}}
    for settings in ({"tools": [strict]}, {"tools": [TIME], "parallel_tool_calls": False}):
        answer = ask(client, **settings, max_tokens=20).choices[0]
        assert answer.finish_reason in ("stop", "length", "tool_calls")
        assert len(answer.message.tool_calls or ()) <= 1


# -- schemas -----------------------------------------------------------------------------------------------------------


def test_answers_obey_the_response_format(client: openai.OpenAI) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}
    for stream in (False, True):
        answer = ask(client, response_format=given, stream=stream)
        text = together(answer)[0]["content"] if stream else answer.choices[0].message.content
        assert set(json.loads(text)) == {"unit", "days"}
    assert ask(client, response_format={"type": "json_object"}, max_tokens=5).choices[0].message.content.startswith("{")
    both = ask(client, response_format=given, tools=[TIME]).choices[0]
    assert both.message.tool_calls or set(json.loads(both.message.content)) == {"unit", "days"}


def test_free_and_constrained_answers_at_once(server: RunningServer) -> None:
    """Each is what it is alone."""
    given = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
    kinds: list[dict[str, Any]] = [
        {},
        {"response_format": given},
        {"tools": [WEATHER, TIME], "tool_choice": "required"},
        {"tools": [TIME]},
        {"logprobs": True, "top_logprobs": 2},
    ]

    async def one(client: openai.AsyncOpenAI, number: int) -> Any:
        body: Any = {"model": "tiny", "messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 60}
        answer = await client.chat.completions.create(**body, seed=number, **kinds[number % len(kinds)])
        message = answer.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return message.content, calls, answer.choices[0].finish_reason

    async def everybody(numbers: list[int]) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, number) for number in numbers))

    at_once = asyncio.run(everybody(list(range(10))))
    assert at_once == [asyncio.run(everybody([number]))[0] for number in range(10)]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "texts"}, "Invalid type"),
        ({"type": "integer", "multipleOf": 9999991}, "multipleOf"),
        ({"properties": {f"p{n}": {} for n in range(1000)}}, "properties"),
    ],
)
def test_bad_schemas_are_refused_with_the_field_and_the_reason(client: openai.OpenAI, schema: Any, words: str) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    param, message = refused(client, response_format=given)
    assert param == "response_format"
    assert words in message
    if len(json.dumps(schema)) > 500:
        return  # it would not fit into the prompt
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    param, message = refused(client, tools=[tool], tool_choice="required")
    assert param == "tools"
    assert words in message


def test_what_cannot_be_done_is_refused_by_name(client: openai.OpenAI) -> None:
    given = {"type": "json_object"}
    assert refused(client, response_format=given, extra_body={"ignore_eos": True})[0] == "ignore_eos"
    assert refused(client, reasoning_effort="low")[0] == "reasoning_effort"
    assert refused(client, extra_body={"chat_template_kwargs": {"tools": []}})[0] == "chat_template_kwargs"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
    history = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    assert refused(client, messages=history) == ("messages", refused(client, messages=history)[1])


# -- tokens ------------------------------------------------------------------------------------------------------------


def engine_record(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[TokenEvent]:
    """Every token of the engine, as it was sampled."""
    [session] = server.sessions
    step, kept = session.step, list[TokenEvent]()

    def recorded() -> list[Any]:
        events = step()
        kept.extend(event for event in events if isinstance(event, TokenEvent))
        return events

    monkeypatch.setattr(session, "step", recorded)
    return kept


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_ids_and_log_probabilities_are_the_engines_own(
    server: RunningServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, constrained: bool
) -> None:
    kept = engine_record(server, monkeypatch)
    settings: dict[str, Any] = {"temperature": 0.7, "logprobs": True, "top_logprobs": 0, "max_tokens": 60}
    settings |= {"tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False} if constrained else {}
    wanted = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    whole = ask(client, **settings, extra_body=wanted)
    ids = whole.choices[0].model_extra["token_ids"]
    content = whole.choices[0].logprobs.content
    assert ids == [event.token_id for event in kept]
    assert [entry.logprob for entry in content] == [event.logprob for event in kept], "bit for bit"
    assert [entry.token for entry in content] == [f"token_id:{token}" for token in ids]
    assert len(ids) == whole.usage.completion_tokens
    streamed_ids, prompts = [], []
    for chunk in ask(client, **settings, extra_body=wanted, stream=True):
        streamed_ids += chunk.choices[0].model_extra["token_ids"]
        prompts.append((chunk.model_extra or {}).get("prompt_token_ids"))
    assert streamed_ids == ids
    assert prompts[0] == whole.model_extra["prompt_token_ids"]
    assert not any(prompts[1:])


def test_prompts_of_ids_and_completions_with_ids(server: RunningServer, client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": [[5, 6, 7], [8]], "max_tokens": 4, "n": 2, "logprobs": 0}
    found = client.completions.create(**body, seed=1, extra_body={"return_token_ids": True, "ignore_eos": True})
    assert [choice.model_extra["prompt_token_ids"] for choice in found.choices] == [[5, 6, 7], [5, 6, 7], [8], [8]]
    for choice in found.choices:
        assert len(choice.model_extra["token_ids"]) == len(choice.logprobs.token_logprobs) == 4
    stopped = client.completions.create(
        model="tiny", prompt=[5], max_tokens=200, extra_body={"stop_token_ids": list(range(0, 250, 8))}
    )
    assert stopped.choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_temperature(server: RunningServer, client: openai.OpenAI) -> None:
    """The same tokens, of which a lower temperature is surer."""
    found = {}
    for temperature in (1.0, 0.1):
        answer = ask(client, temperature=temperature, logprobs=True, top_logprobs=20, max_tokens=1)
        found[temperature] = max(entry.logprob for entry in answer.choices[0].logprobs.content[0].top_logprobs)
    assert found[0.1] > found[1.0] + 0.1


def test_a_constant_seed_draws_other_noise_for_another_prompt(server: RunningServer, client: openai.OpenAI) -> None:
    """A model that does not read its prompt shows the noise itself."""
    [session] = server.sessions
    sampling = Sampling(6, ignore_eos=True)

    def sampled(live: GenerationSession, seed: int) -> list[int]:
        live.add(SessionRequest(f"s{seed}", (5, 6), sampling, seed))
        ids = []
        while live.unfinished:
            ids += [event.token_id for event in live.step() if isinstance(event, TokenEvent)]
        return ids

    server.wait_until_empty()
    seeds = [prompt_seed(7, prompt) for prompt in ((5, 6), (5, 6, 7), (5, 6))]
    assert seeds[0] == seeds[2] != seeds[1]
    assert sampled(session, seeds[0]) != sampled(session, seeds[1])
    settings = {"seed": 7, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    assert ask(client, **settings).choices[0].message == ask(client, **settings).choices[0].message


def test_tokenize_and_detokenize(server: RunningServer, tokenizer: Any) -> None:
    with httpx.Client(base_url=server.url) as http:
        text = http.post("/tokenize", json={"model": "tiny", "prompt": "hé"}).json()
        assert text == {"count": 3, "max_model_len": 1024, "tokens": tokenizer("hé")["input_ids"]}
        chat = http.post("/tokenize", json={"messages": ASKED, "tools": [TIME], "return_token_strs": True}).json()
        prompt = ToolChat(ChatFormat(tokenizer)).render(ASKED, [TIME])
        assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": prompt}
        assert len(chat["token_strs"]) == chat["count"]
        assert http.post("/tokenize", json={"prompt": "messages"}).json()["count"] == 8
        styled = {"messages": ASKED, "chat_template_kwargs": {"style": "calm"}}
        ids = http.post("/tokenize", json=styled).json()["tokens"]
        assert tokenizer.decode(ids).endswith("(calm)")
        for path, body, param in (
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"prompt": "a", "truncate": 1}, "truncate"),
            ("/tokenize", 5, None),
            ("/tokenize", {"messages": ASKED, "add_generation_prompt": False}, "add_generation_prompt"),
            ("/detokenize", {"tokens": [10**6]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ):
            refused = http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_the_parser_is_named_with_the_model(client: openai.OpenAI) -> None:
    assert client.models.retrieve("tiny").model_extra["tool_call_parser"] == "hermes"
