"""The second turn of a conversation, with the templates of families of models as TRL brings them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CALCULATOR, byte_tokenizer
from fakes import ScriptedEnvironment, ScriptedTasks

from posttrain.data.chat import ChatFormat, shared_length
from posttrain.data.errors import DataError
from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_prompts import ToolChat
from posttrain.environments.turns import ToolEnvironment, Turn
from posttrain.environments.turns.interface import Response, TurnItem
from posttrain.environments.turns.pool import TurnOutcome
from posttrain.files.json_files import JsonMapping
from posttrain.rollouts.call_tree import CallTree, PromptWriter
from posttrain.rollouts.multi_turn import MultiTurnRollouts
from posttrain.rollouts.turn_prompts import Exchange, NextTurn, ToolWriter
from posttrain.types import Completion, Message, Sampling, Score, Task

# Calls, results and ends as new templates of Mistral have them.
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].tool_calls[0].id != m.tool_call_id %}{{ raise_exception('no such call') }}{% endif"
    " %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
# By name: the tokens that end an answer, and one with a call; the first is the tokenizer's EOS.
ENDS = {
    "gptoss": ("<|return|>", "<|call|>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "deepseekv3": ("<｜end▁of▁sentence｜>",) * 2,
    "qwen2_5": ("<|im_end|>",) * 2,
    "qwen3": ("<|im_end|>",) * 2,
    "qwen3_5_nothink": ("<|im_end|>",) * 2,
    "nemotron_3_nano": ("<|im_end|>",) * 2,
    "llama3_1": ("<|eot_id|>",) * 2,
    "mistral": ("</s>",) * 2,
}
_SPECIAL = r"<\|\w+\|>|<｜[^｜]+｜>|\[(?:/?INST|TOOL_CALLS|ARGS)\]|</?s>"
ASKED: Message = {"role": "user", "content": "What?"}
CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
RESULT: Message = {"role": "tool", "tool_call_id": "abcdefghi", "content": "It is 7."}
SAID: Message = {"role": "assistant", "content": "Hm."}
MORE: Message = {"role": "user", "content": "Go on."}


@cache
def chat_of(name: str) -> ChatFormat:
    template = MISTRAL
    if name != "mistral":
        folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
        template = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    special = sorted({*re.findall(_SPECIAL, template), *ENDS[name], "<s>", "<|endoftext|>"})
    end = "<|endoftext|>" if name == "glm4moe" else ENDS[name][0]
    return ChatFormat(byte_tokenizer(template, special_tokens=tuple(special), eos_token=end, bos_token="<s>"))


def ids_of(chat: ChatFormat, text: str) -> tuple[int, ...]:
    return tuple(chat.encode_prompts([text])[0])


def answered(chat: ChatFormat, answer: Message, text: str, following: Message) -> str:
    """What follows the sampled text in the prompt of an agent's second request."""
    tree, tools = CallTree(PromptWriter(chat)), [CALCULATOR] if answer is CALL else []
    first = tree.call([ASKED], tools, Sampling(5))
    tree.add(first, Completion(ids_of(chat, text), (0.0,) * len(text), "", "stop"), answer)
    second = tree.call([ASKED, answer, following], tools, Sampling(5))
    assert second.parent is first
    assert second.prompt_ids[: len(first.token_ids)] == first.token_ids
    return str(chat.tokenizer.decode(second.context_ids))


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("answer", "following"), [(SAID, MORE), (CALL, RESULT)], ids=["text", "call"])
def test_the_second_prompt_is_the_whole_conversation(name: str, answer: Message, following: Message) -> None:
    chat = chat_of(name)
    tools = [CALCULATOR] if answer is CALL else []
    whole = ToolChat(chat).render([ASKED, answer, following], tools)
    stop = ENDS[name][answer is CALL]
    if stop == "<|return|>":  # what such a model is trained to end with; in the conversation stands <|end|>
        assert answered(chat, answer, f"Hm.{stop}", following) == whole.partition("Hm.<|end|>")[2]
        return
    end = whole.rindex(stop, 0, whole.index(following["content"])) + len(stop)
    assert answered(chat, answer, whole[whole.index("What?") : end], following) == whole[end:]


@pytest.mark.parametrize("name", ENDS)
def test_any_stop_token_of_the_model_ends_a_turn_once(name: str) -> None:
    chat = chat_of(name)
    for other in ("<|endoftext|>", *ENDS[name]):
        after = answered(chat, SAID, f"Hm.{other}", MORE)
        assert not after.startswith((other, "<|end|>", "<|im_end|>", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>"))
        assert after.partition("Go on.")[0] in ToolChat(chat).render([ASKED, SAID, MORE])


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_that_was_cut_gets_the_end_of_the_template(name: str) -> None:
    chat = chat_of(name)
    whole = ToolChat(chat).render([ASKED, SAID, MORE])
    assert answered(chat, SAID, "Hm.", MORE) == whole.partition("Hm.")[2]
    called = ToolChat(chat).render([ASKED, CALL, RESULT], [CALCULATOR])
    after = answered(chat, CALL, "add", RESULT)
    assert called.endswith(after)
    assert after.lstrip().startswith(ENDS[name][1])


def test_a_marker_within_an_answer_is_no_end_of_it() -> None:
    chat = chat_of("gptoss")
    prompt = [ASKED]
    written = NextTurn(chat).ids(prompt, [Exchange((MORE,))], ids_of(chat, "x<|channel|>"))
    assert str(chat.tokenizer.decode(written)).startswith("<|end|><|start|>user")
    tree = CallTree(PromptWriter(chat))
    first = tree.call(prompt, [], Sampling(5))
    tree.add(first, Completion(ids_of(chat, "x<|end|>"), (0.0,) * 2, "", "length"), SAID)
    second = tree.call([ASKED, SAID, MORE], [], Sampling(5))
    assert str(chat.tokenizer.decode(second.context_ids)).startswith("<|end|>"), "cut off, so not ended"


def test_a_history_that_the_template_does_not_write_after_a_stand_in_is_a_new_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = chat_of("qwen3")
    writer = PromptWriter(chat)

    def refuses(*args: Any) -> Any:
        raise DataError("refused")

    monkeypatch.setattr(writer, "following", refuses)
    tree = CallTree(writer)
    first = tree.call([ASKED], [], Sampling(5))
    tree.add(first, Completion(ids_of(chat, "Hm.<|im_end|>"), (0.0,) * 4, "", "stop"), SAID)
    second = tree.call([ASKED, SAID, MORE], [], Sampling(5))
    assert second.parent is None
    assert second.prompt_ids == tuple(chat.prompt([ASKED, SAID, MORE])[1])
    assert second.said.role == "user"


def test_results_of_calls_that_the_template_refuses_are_plain_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("qwen3")
    turns = NextTurn(chat)
    calls = (ToolCall("add", {"a": 1}),)
    plain = Exchange(({"role": "", "content": "7"},))
    called = turns.exchange(calls, plain.messages)
    assert called.messages[0]["tool_call_id"] == called.turn["tool_calls"][0]["id"]
    assert turns.exchange((*calls, *calls), plain.messages) == plain, "one result for two calls is of neither"
    sampled = ids_of(chat, "x<|im_end|>")
    written = turns.ids([ASKED], [called, plain], sampled)

    def refuses(*args: Any) -> Any:
        raise DataError("refused")

    monkeypatch.setattr(turns.tools, "render", refuses)
    assert turns.ids([ASKED], [called, plain], sampled) == written == turns.ids([ASKED], [plain, plain], sampled)


class Adder(ToolEnvironment):
    tools = (CALCULATOR,)

    def call(self, state: Any, name: str, arguments: JsonMapping) -> str:
        return f"It is {arguments['a'] + 6}."


class Written:
    """An engine whose model says one thing after the other."""

    def __init__(self, chat: ChatFormat, *texts: str) -> None:
        self.chat, self.texts = chat, list(texts)
        self.prompts: list[tuple[int, ...]] = []

    def generate(self, tasks: Any, *rest: Any) -> list[list[Completion]]:
        text = self.texts.pop(0)
        ids = ids_of(self.chat, text)
        self.prompts.append(tasks[0].prompt_ids)
        shown = str(self.chat.tokenizer.decode(ids, skip_special_tokens=True))
        return [[Completion(ids, (0.0,) * len(ids), shown, "stop")]]


class Router:
    """The environment in this process."""

    names = frozenset({"add"})

    def __init__(self) -> None:
        self.steps: list[Turn] = []

    def tools(self, name: str) -> Any:
        return Adder.tools

    def ask(self, calls: Any) -> list[Score]:
        return [self._answer(item) for _, item in calls]

    def _answer(self, item: TurnItem) -> Score:
        if item.request != "step":
            return TurnOutcome(None, state=b"")
        response = Response(item.response)
        response.calls = item.calls or ()
        turn = Adder().step(None, response)
        self.steps.append(turn)
        seen = turn.observation if isinstance(turn.observation, list) else []
        said = tuple({"role": "", "content": str(one)} for one in seen)
        return TurnOutcome(1.0 if turn.done else None, state=b"", observation=said, done=turn.done)


@pytest.mark.parametrize("name", ENDS)
def test_an_environment_gets_the_calls_and_the_model_their_results_in_the_format_of_the_family(name: str) -> None:
    chat = chat_of(name)
    writer = ToolWriter(chat, [CALCULATOR])
    messages = writer.messages([ASKED])
    text, ids = writer.chat.prompt(messages)
    whole = ToolChat(chat).render([ASKED, CALL, RESULT], [CALCULATOR])
    end = whole.rindex(ENDS[name][1], 0, whole.index(RESULT["content"])) + len(ENDS[name][1])
    opened = ToolChat(chat).render([ASKED], [CALCULATOR])
    said = "</think>" * opened.endswith("<think>\n") + whole[shared_length(opened, whole) : end]
    router, engine = Router(), Written(chat, said, "Seven." + ENDS[name][0])
    task = Task(0, "t", text, tuple(ids), environment="add", messages=tuple(messages))
    source = MultiTurnRollouts(
        ScriptedTasks([task]),
        engine,
        ScriptedEnvironment(),
        1,
        Sampling(99),
        seed=5,
        turns=router,  # type: ignore[arg-type]
        renderer=NextTurn(chat),
        max_turns=3,
        max_total_tokens=9999,
        judged=frozenset(),
    )
    (group,) = source.take(1, step=1).groups
    assert [turn.counts.get("tool_calls") for turn in router.steps] == [1, 0]
    assert group.rollouts[0].score.reward == 1.0
    assert str(chat.tokenizer.decode(engine.prompts[1])) == text + said + whole[end:]
