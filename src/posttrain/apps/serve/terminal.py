"""A chat in the terminal: reads lines, streams answers, keeps the conversation."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.apps.serve.options import ChatOptions, EngineOptions
from posttrain.apps.serve.responses import ResponseChoice
from posttrain.apps.serve.sessions import load_engine
from posttrain.data.chat import ChatFormat, images_of
from posttrain.data.errors import DataError
from posttrain.data.images import image_of, read_image_file
from posttrain.engines.native.session import FailureEvent, GenerationSession, SessionRequest
from posttrain.engines.native.stopping import stop_token_ids
from posttrain.errors import InputError
from posttrain.models.accepted_names import resolve_registered_model
from posttrain.models.loading import expand_images_for
from posttrain.types import SMALLEST_TEMPERATURE, ImageRef, Message, Sampling

HELP = """\
/reset          forget the conversation (the system message stays)
/system TEXT    set the system message and start again; without TEXT, remove it
/image PATH     show the model an image, with the next message
/history        show the conversation so far
/help           this
/exit           end (so does Ctrl-D)
Ctrl-C stops an answer."""

Write = Callable[[str], None]


class DamagedModelError(InputError):
    """The model's output is NaN."""


@dataclass
class TerminalChat:
    """A conversation and the model that answers. `sampling.max_new_tokens` is for one answer."""

    session: GenerationSession
    chat: ChatFormat
    sampling: Sampling
    seed: int | None = None  # None: random
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    name: str = ""  # of the model; of a registered one, with its version
    images: list[ImageRef] = field(default_factory=list)  # of the next message
    num_forgotten: int = 0  # turns that did not fit into the context of the last answer
    _num_answers: int = 0

    @property
    def messages(self) -> list[Message]:
        return [*self._system, *self.turns]

    @property
    def _system(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def reset(self) -> None:
        self.turns.clear()
        self.images.clear()
        self._num_answers = 0

    def answer(self, text: str) -> Iterator[str]:
        """The pieces of the answer. Closing the iterator stops it and keeps the text so far."""
        seen: list[Any] = [{"type": "image", "image": image} for image in self.images]
        self.images = []  # also where the model cannot see them: the next message does without
        content = [*seen, {"type": "text", "text": text}] if seen else text
        turns: list[Message] = [*self.turns, {"role": "user", "content": content}]
        self.num_forgotten = 0  # also where the message does not fit
        self.num_forgotten, prompt_ids = self._fitting_prompt(turns)
        self.turns = turns[self.num_forgotten :]
        room = self.session.settings.max_total_tokens - len(prompt_ids)
        sampling = replace(
            self.sampling,
            max_new_tokens=min(self.sampling.max_new_tokens, room),
            end_of_turn_ids=self.chat.stop_token_ids,
        )
        seed = secrets.randbits(63) if self.seed is None else self.seed + self._num_answers
        tokenizer = self.session.tokenizer
        choice = ResponseChoice(0, tokenizer, (), stop_token_ids(self.session.limits.model_ends, tokenizer, sampling))
        answer_text = ""
        images = tuple(images_of(self.messages))
        self.session.add(SessionRequest("turn", prompt_ids, sampling, seed, images=images))
        try:
            while self.session.unfinished:
                for event in self.session.step():
                    if isinstance(event, FailureEvent):
                        raise DamagedModelError(event.message)
                    piece = choice.push(event).text
                    answer_text += piece
                    if piece:
                        yield piece
        finally:
            self.session.reset()  # not `cancel`: Ctrl-C may have come in the middle of a step
            self.turns.append({"role": "assistant", "content": answer_text})
            self._num_answers += 1

    def _fitting_prompt(self, turns: Sequence[Message]) -> tuple[int, tuple[int, ...]]:
        """How many of the oldest turns are dropped to leave room for an answer, and the prompt of the rest."""
        limit = self.session.settings.max_total_tokens
        wanted = min(self.sampling.max_new_tokens, limit // 4)
        for forgotten in range(0, len(turns), 2):
            _, ids = self.chat.prompt([*self._system, *turns[forgotten:]])
            if len(ids) + wanted <= limit:
                break
        self.session.limits.check(ids, 1)  # raises for a single message that is too long
        return forgotten, tuple(ids)


def open_chat(model: str, options: ChatOptions) -> TerminalChat:
    found = resolve_registered_model(model, registry=options.registry)
    engine = EngineOptions(options.precision, options.device, options.max_model_len, max_batch_size=1)
    session = GenerationSession(load_engine(found, engine))
    temperature = options.temperature if options.temperature >= SMALLEST_TEMPERATURE else 0.0
    sampling = Sampling(options.max_tokens, temperature=temperature, top_p=options.top_p)
    chat = ChatFormat(session.tokenizer)
    chat.image_tokens = expand_images_for(found.model, session.tokenizer, f"model {found.text!r}")
    return TerminalChat(session, chat, sampling, options.seed, options.system, name=found.text)


def converse(
    conversation: TerminalChat, read: Callable[[], str], write: Write, say: Write, *, has_commands: bool = True
) -> bool:
    """Chat until the input ends. `write` is for answers, `say` for everything else; `read` raises EOFError at the end.

    Without commands every line is a message. Returns whether every message was answered.
    """
    all_answered = True
    while True:
        try:
            line = read().strip()
        except EOFError:
            return all_answered
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /exit ends the chat)\n")
            continue
        if not line:
            continue
        if has_commands and line.startswith("/"):
            if not run_command(conversation, line, say):
                return all_answered
            continue
        all_answered &= answer_line(conversation, line, write, say)


def answer_line(conversation: TerminalChat, line: str, write: Write, say: Write) -> bool:
    """Answer one message; False if that failed."""
    pieces = conversation.answer(line)
    try:
        for piece in pieces:
            write(piece)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        say(" (stopped)")
    except DamagedModelError:
        raise
    except ValueError as error:  # the message does not fit, or the template refuses it
        say(f"posttrain: {error}\n")
        return False
    write("\n")
    if conversation.num_forgotten:
        say(
            f"(the conversation is too long for the model: its {conversation.num_forgotten} oldest messages are "
            f"forgotten)\n"
        )
    return True


def run_command(conversation: TerminalChat, line: str, say: Write) -> bool:
    """Run a command; False if the chat should end."""
    command, _, rest = line.partition(" ")
    if command in ("/exit", "/quit"):
        return False
    if command == "/reset":
        conversation.reset()
        say("(new conversation)\n")
    elif command == "/system":
        conversation.reset()
        conversation.system = rest.strip() or None
        say(f"(new conversation, {'system message set' if conversation.system else 'no system message'})\n")
    elif command == "/history":
        say(
            "".join(f"{message['role']}: {_shown(message['content'])}\n" for message in conversation.messages)
            or "(nothing yet)\n"
        )
    elif command == "/image":
        try:
            data, _ = read_image_file(str(Path(rest.strip()).expanduser().absolute()), Path("/"), "/image")
            conversation.images.append(image_of(data, "/image"))
            found = conversation.images[-1]
            say(f"(an image of {found.width} x {found.height} pixels goes with the next message)\n")
        except DataError as error:
            say(f"posttrain: {error}\n")
    elif command == "/help":
        say(HELP + "\n")
    else:
        say(f"unknown command {command}\n{HELP}\n")
    return True


def _shown(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "[image] ") for part in content)
