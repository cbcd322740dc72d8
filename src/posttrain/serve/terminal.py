"""A conversation in the terminal: reads a line, writes the answer as it comes, remembers both."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from posttrain.data.chat import ChatFormat
from posttrain.engines.native.session import FailureEvent, GenerationSession, SessionRequest
from posttrain.engines.native.stopping import stop_token_ids
from posttrain.errors import InputError
from posttrain.serve.responses import ResponseChoice
from posttrain.types import Message, Sampling

HELP = """\
/reset          forget the conversation (the system message stays)
/system TEXT    set the system message and begin again; without TEXT, take it away
/history        show the conversation so far
/help           this
/exit           end (so does Ctrl-D)
Ctrl-C stops an answer."""

Write = Callable[[str], None]


class DamagedModelError(InputError):
    """The model's weights give no numbers."""


@dataclass
class TerminalChat:
    """What was said, and the model that answers. `sampling.max_new_tokens` is for one answer."""

    session: GenerationSession
    chat: ChatFormat
    sampling: Sampling
    seed: int | None = None  # None: other answers every time
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    num_forgotten: int = 0  # turns that no longer fitted, in the last answer
    _num_answers: int = 0

    @property
    def messages(self) -> list[Message]:
        return [*self._system, *self.turns]

    @property
    def _system(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def reset(self) -> None:
        self.turns.clear()
        self._num_answers = 0

    def answer(self, text: str) -> Iterator[str]:
        """The pieces of the answer. Closing the iterator stops it; what was said until then is remembered."""
        turns: list[Message] = [*self.turns, {"role": "user", "content": text}]
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
        choice = ResponseChoice(0, tokenizer, (), stop_token_ids(self.session.forward.base, tokenizer, sampling))
        said = ""
        self.session.add(SessionRequest("turn", prompt_ids, sampling, seed))
        try:
            while self.session.unfinished:
                for event in self.session.step():
                    if isinstance(event, FailureEvent):
                        raise DamagedModelError(event.message)
                    piece = choice.push(event).text
                    said += piece
                    if piece:
                        yield piece
        finally:
            self.session.reset()  # not `cancel`: Ctrl-C may have come in the middle of a step
            self.turns.append({"role": "assistant", "content": said})
            self._num_answers += 1

    def _fitting_prompt(self, turns: Sequence[Message]) -> tuple[int, tuple[int, ...]]:
        """How many of the oldest turns must go to leave room for an answer, and the rest in tokens."""
        limit = self.session.settings.max_total_tokens
        wanted = min(self.sampling.max_new_tokens, limit // 4)
        for forgotten in range(0, len(turns), 2):
            _, ids = self.chat.prompt([*self._system, *turns[forgotten:]])
            if len(ids) + wanted <= limit:
                break
        self.session.check(ids, 1)  # a single message that is too long is an error that says so
        return forgotten, tuple(ids)


def converse(
    conversation: TerminalChat, read: Callable[[], str], write: Write, say: Write, *, has_commands: bool = True
) -> bool:
    """Until the input ends. `write` is for answers, `say` for everything else; `read` raises EOFError at the end.

    Without commands every line is a message, whatever it begins with. Whether every message had an answer.
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
            if not obey(conversation, line, say):
                return all_answered
            continue
        all_answered &= speak(conversation, line, write, say)


def speak(conversation: TerminalChat, line: str, write: Write, say: Write) -> bool:
    """False if the message could not be answered."""
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
            f"(the conversation is too long for the model: its {conversation.num_forgotten} oldest messages are forgotten)\n"
        )
    return True


def obey(conversation: TerminalChat, line: str, say: Write) -> bool:
    """Do what a command says; False if the chat is to end."""
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
            "".join(f"{message['role']}: {message['content']}\n" for message in conversation.messages)
            or "(nothing yet)\n"
        )
    elif command == "/help":
        say(HELP + "\n")
    else:
        say(f"unknown command {command}\n{HELP}\n")
    return True
