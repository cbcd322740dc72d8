"""A chat in the terminal: what is remembered, what commands do, what happens when it grows too long."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_server import save_model

from posttrain.apps.serve.terminal import DamagedModelError, TerminalChat, converse
from posttrain.cli.main import main
from posttrain.config.policy import NativeConfig
from posttrain.data.chat import ChatFormat
from posttrain.engines.choose_engine import load_for_sampling
from posttrain.engines.native.session import GenerationSession
from posttrain.types import NoiseKey, Sampling, Task


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> GenerationSession:
    folder = save_model(tmp_path_factory.mktemp("tiny"))
    engine, _ = load_for_sampling(
        str(folder), device="cpu", max_total_tokens=200, native=NativeConfig(max_batch_size=1)
    )
    return GenerationSession(engine)


@pytest.fixture
def conversation(session: GenerationSession) -> TerminalChat:
    return TerminalChat(session, ChatFormat(session.tokenizer), Sampling(12), seed=5)


def play(
    conversation: TerminalChat,
    lines: list[str | BaseException],
    *,
    all_answered: bool = True,
    has_commands: bool = True,
) -> tuple[str, str]:
    """The answers and the other messages."""
    written: list[str] = []
    messages: list[str] = []
    waiting = iter(lines)

    def read() -> str:
        line = next(waiting, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    assert converse(conversation, read, written.append, messages.append, has_commands=has_commands) == all_answered
    return "".join(written), "".join(messages)


def test_answers_equal_the_engine_over_several_turns(
    conversation: TerminalChat, session: GenerationSession, tmp_path: Path
) -> None:
    written, _ = play(conversation, ["hello", "again"])
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert written == "".join(message["content"] + "\n" for message in conversation.messages[1::2])
    engine, _ = load_for_sampling(str(save_model(tmp_path / "m")), device="cpu", max_total_tokens=200)
    for turn, seed in ((1, 5), (3, 6)):
        _, ids = conversation.chat.prompt(conversation.messages[:turn])
        sampling = Sampling(12, end_of_turn_ids=conversation.chat.stop_token_ids)
        [[expected]] = engine.generate([Task(0, "t", "", tuple(ids))], 1, sampling, NoiseKey(seed, 0))
        assert conversation.messages[turn]["content"] == expected.text


def test_an_image_that_the_model_cannot_see_fails_one_message(conversation: TerminalChat, tmp_path: Path) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    written, messages = play(conversation, [f"/image {tmp_path / 'a.png'}", "what?", "hello"], all_answered=False)
    assert "reads text only" in messages
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert written


def test_commands(conversation: TerminalChat) -> None:
    _, messages = play(conversation, ["hi", "/history", "/system Be kind.", "/history", "/nonsense", "/help", "", "yo"])
    assert "user: hi" in messages
    assert "system: Be kind." in messages
    assert "unknown command /nonsense" in messages
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    play(conversation, ["/reset"])
    assert [message["role"] for message in conversation.messages] == ["system"]
    play(conversation, ["/system", "/exit", "never read"])
    assert conversation.messages == []


def test_lines_of_a_pipe_are_never_commands(conversation: TerminalChat) -> None:
    _, messages = play(conversation, ["/exit", "/etc/hosts is a file"], has_commands=False)
    assert messages == ""
    assert [message["content"] for message in conversation.messages[::2]] == ["/exit", "/etc/hosts is a file"]


def test_seed_reproduces_the_chat(session: GenerationSession) -> None:
    def texts(seed: int | None) -> str:
        made = TerminalChat(session, ChatFormat(session.tokenizer), Sampling(12), seed)
        return play(made, ["one", "two"])[0]

    assert texts(3) == texts(3)
    assert texts(3) != texts(4)
    assert texts(None) != texts(None)


def test_oldest_turns_are_dropped_when_the_context_is_full(conversation: TerminalChat) -> None:
    _, messages = play(conversation, ["x" * 40, "y" * 40, "z" * 40])
    assert "oldest messages are forgotten" in messages
    assert conversation.messages[-2]["content"] == "z" * 40
    assert len(conversation.messages) < 6


def test_message_that_cannot_fit_is_refused_and_dropped(conversation: TerminalChat) -> None:
    written, messages = play(conversation, ["ok", "w" * 500, "fine"], all_answered=False)
    assert "at most 200 together" in messages
    assert messages.endswith("\n")
    assert written == "".join(message["content"] + "\n" for message in conversation.messages[1::2])
    assert [message["content"] for message in conversation.messages if message["role"] == "user"] == ["ok", "fine"]


def test_dropped_turns_are_reported_once(conversation: TerminalChat) -> None:
    _, messages = play(conversation, ["x" * 40, "y" * 40, "z" * 40, "w" * 500], all_answered=False)
    assert messages.count("oldest messages are forgotten") == 1
    assert conversation.num_forgotten == 0


def test_ctrl_c_stops_the_answer_and_keeps_its_text(conversation: TerminalChat) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    lines = iter(["hello"])

    def read() -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    writes: list[Callable[[str], None]] = [interrupt]
    messages: list[str] = []
    converse(conversation, read, lambda text: writes.pop()(text) if writes else None, messages.append)
    assert messages == [" (stopped)"]
    assert conversation.messages[-1]["role"] == "assistant"
    assert not conversation.session.unfinished
    _, said_later = play(conversation, [KeyboardInterrupt(), "still there?"])
    assert "Ctrl-D" in said_later


def test_tiny_temperature_is_greedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(save_model(tmp_path / "m"))
    written = []
    for temperature in ("0", "1e-300"):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main(["chat", folder, "--device", "cpu", "--max-tokens", "8", "--temperature", temperature]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] != ""


def test_an_option_out_of_range_is_named_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "any", "--top-p", "3"]) == 64
    assert "--top-p is 3.0: more than 0 and at most 1" in capsys.readouterr().err


def test_input_that_is_not_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert main(["chat", str(save_model(tmp_path / "m")), "--device", "cpu"]) == 64
    assert "standard input is no utf-8 text: invalid continuation byte at byte 3" in capsys.readouterr().err


@pytest.mark.parametrize("template", ["{{ '{:>2000000000}'.format(1) }}", "{{ [1] | tojson(indent=9999999999) }}"])
def test_a_template_that_would_take_all_memory_is_refused(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(template + "{{ messages[0]['content'] }}")
    assert main(["chat", str(folder), "--device", "cpu"]) == 64
    assert "the chat template refuses a conversation" in capsys.readouterr().err


def test_nan_logits_end_the_chat(tmp_path: Path) -> None:
    engine, _ = load_for_sampling(str(save_model(tmp_path / "m")), device="cpu", max_total_tokens=200)
    with torch.no_grad():
        engine.forward.base.model.norm.weight[0] = float("nan")
    session = GenerationSession(engine)
    with pytest.raises(DamagedModelError, match="weights are damaged"):
        play(TerminalChat(session, ChatFormat(session.tokenizer), Sampling(12), seed=5), ["hello"])
