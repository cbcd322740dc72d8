"""Converts conversations to tokens. The only place that does.

The text a model trains on must be the text it is sampled from: a prompt always ends with what the template prints
before an assistant's turn, and a response always ends with the end of that turn. Independent of datasets.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.data.errors import DataError, refuse_half_pairs
from posttrain.data.template_process import RENDERER, TemplateRefused
from posttrain.files.digests import sha256_of
from posttrain.files.json_files import JsonMapping
from posttrain.types import ImageRef, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = list[int]

DEFAULT_TEMPLATE = "default"
TEMPLATES_BY_NAME = {"extra_id": Path(__file__).parent / "chat_templates" / "extra_id.jinja"}

# Placeholder for a turn's content, to find where a template prints it. Letters and digits: none trims or escapes it.
_PLACEHOLDER = "posttrain7f3a91c4e2turn"
_SET_BY_US = ("messages", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")
_SHOWN_ROLES = 20

# Texts that distinguish two tokenizers with one vocabulary: words, numbers, spaces, line breaks, accents, code.
_PROBES = (
    "The quick brown fox jumps over 12345 lazy dogs, doesn't it?",
    "  def f(x):\n\treturn x ** 2  # \u00e4\u00f6\u00fc \u4f60\u597d \U0001f642\r\n\n",
    "Question: what is 7*8? Answer: \\boxed{56}",
)


@dataclass(frozen=True)
class TrainedSpan:
    """Characters [start, stop) of a rendered conversation that belong to an assistant's turn, its end included."""

    start: int
    stop: int


class EncodedTurn(NamedTuple):
    """A prompt and an answer in tokens. `crossed`: the tokenizer would have merged the end of one with the other."""

    prompt: Ids
    response: Ids
    crossed: bool


class ChatFormat:
    """A tokenizer with one way of writing conversations.

    `chat_template`: "default" is the model's own template (contents one after another when it has none), None writes
    the contents one after another, a name that ends in `.jinja` is a file, anything with `{{` or `{%` is a template,
    and "extra_id" is that of NeMo-Aligner.
    `kwargs` are passed to the template, for instance `{"enable_thinking": False}`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = DEFAULT_TEMPLATE,
        kwargs: JsonMapping | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        for reserved in _SET_BY_US:
            if reserved in self.kwargs:
                raise DataError(f"tokenizer.chat_template_kwargs: {reserved!r} is set by posttrain; remove it")
        self.template = _resolve_template(chat_template, tokenizer)
        named = tokenizer.name_or_path if chat_template == DEFAULT_TEMPLATE else str(chat_template)
        is_named = named and (chat_template == DEFAULT_TEMPLATE or named.endswith(".jinja"))
        self._origin = f" (the template of {named})" if is_named else ""
        self._start = _opening_token(tokenizer)
        self._opening = self._start if self.template is None else ""
        # Set for a model with a vision tower: writes the placeholder tokens of each image into the text of a template.
        self.image_tokens: Callable[[str, Sequence[ImageRef]], str] | None = None
        self._writes_parts = False  # the template leaves out a content that is no list of parts
        self._after_answer = self._find_after_answer()
        self._end_of_turn = self._find_end_of_turn()

    @property
    def end_of_turn(self) -> str:
        """The text that closes an assistant's turn, such as "<|im_end|>"; empty if the template has none."""
        return self._end_of_turn or self.tokenizer.eos_token or ""

    @property
    def closes_answers(self) -> bool:
        """Whether the template writes an end of its own after an assistant's turn."""
        return bool(self._end_of_turn)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of special and of added tokens."""
        return frozenset({*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()})

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens after which the assistant has finished: EOS, and the end of a turn when that is another token."""
        end = self.encode_prompts([self.end_of_turn])[0] if self.end_of_turn else []
        eos = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        return tuple(dict.fromkeys([*eos, *(end if len(end) == 1 else [])]))

    @property
    def last_token_ids(self) -> tuple[int, ...]:
        """Tokens that a conversation may end with, where whole conversations are read; empty where they are not."""
        return ()

    @property
    def recorded_template(self) -> Any:
        """The template as it is saved with a model: with `kwargs` written into it, so that it needs no settings."""
        if self.template is None or not self.kwargs:
            return self.template
        # transformers itself defines `tools` and `documents`, as none where the caller gives none.
        given = "".join(
            f"{{%- if {name} is not defined or {name} is none %}}{{%- set {name} = {_jinja_literal(value, name)} %}}"
            "{%- endif %}"
            for name, value in self.kwargs.items()
        )
        return given + self.template

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Digests of what turns a conversation into tokens: `tokenizer` and `template`."""
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
        # A vocabulary does not determine merges and normalisation. What a few texts become does, and is the same for
        # every version of the tokenizer library.
        probes = self.encode_prompts(_PROBES)
        template = {"template": self.template, "kwargs": self.kwargs, "end_of_turn": self.end_of_turn}
        return {
            "tokenizer": sha256_of(json.dumps([vocabulary, probes])),
            "template": sha256_of(json.dumps(template, sort_keys=True, default=str)),
        }

    def prompt(self, messages: Sequence[Message]) -> tuple[str, Ids]:
        """The prompt of a conversation, as text and as tokens."""
        text = self.render(messages)
        return text, self.encode_prompts([text])[0]

    def turn(self, prompt_messages: Sequence[Message], response: str) -> tuple[Ids, Ids]:
        """Tokens of the prompt and of the answer with its end of turn."""
        return self.split_turns([self.render_turn(prompt_messages, response)])[0][:2]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonMapping] = (),
        *,
        opens_answer: bool = True,
        **kwargs: object,
    ) -> str:
        """The text of `prompt`. `tools` and `kwargs` are passed to the template; see `tool_prompts.py`."""
        return self._write(messages, opens_answer=opens_answer, tools=tools, **kwargs)

    def render_all(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """`render` of each, together."""
        return list(self._write_all([(messages, True) for messages in conversations]))

    def render_turn(self, prompt_messages: Sequence[Message], response: str) -> tuple[str, str]:
        """The two texts of `turn`."""
        return self.render_turns([(prompt_messages, response)])[0]

    def render_turns(self, turns: Sequence[tuple[Sequence[Message], str]]) -> list[tuple[str, str]]:
        """`render_turn` of each, together."""
        conversations: list[tuple[Sequence[Message], bool]] = []
        for messages, response in turns:
            conversations += [(messages, True), ([*messages, {"role": "assistant", "content": response}], False)]
        texts = list(self._write_all(conversations))
        return [self._cut(*turn, *texts[2 * index : 2 * index + 2]) for index, turn in enumerate(turns)]

    def _cut(self, prompt_messages: Sequence[Message], response: str, before: str, whole: str) -> tuple[str, str]:
        if whole.startswith(before):
            return before, self._close(whole[len(before) :])
        # Some templates write a finished turn differently than an open one. Use the form that sampling sees.
        return before, response + self.end_of_turn

    def templated_turn(self, prompt: str, response: str) -> tuple[str, str]:
        """The two texts of `turn` where the row holds them as the model sees them. What would be missing is added: the
        token that starts a text, and the end of the turn."""
        before = prompt if prompt.startswith(self._start) else self._start + prompt
        ends = [self.tokenizer.eos_token, self.end_of_turn]
        closed = any(end and response.endswith(end) for end in ends)
        return before, response if closed else self._close(response)

    def render_conversation(self, messages: Sequence[Message]) -> tuple[str, list[TrainedSpan]]:
        """The text of a conversation that ends with an assistant's turn, and where each such turn stands in it."""
        assert is_answer(messages[-1]), "the caller cuts the conversation after its last answer"
        answers = [index for index, message in enumerate(messages) if is_answer(message)]
        marked = [
            [*messages[:index], {**messages[index], "content": _PLACEHOLDER}, *messages[index + 1 :]]
            for index in answers
        ]
        text, *written = self._write_all([(turns, False) for turns in (messages, *marked)])
        spans: list[TrainedSpan] = []
        for index, whole in zip(answers, written, strict=True):
            before, found, after = whole.partition(_PLACEHOLDER)
            # What stands between the usual opening and the content (an empty chain of thought, say) is the assistant's
            # as well: when sampling, the assistant writes it.
            opened = before.rfind(self._answer_header, spans[-1].stop if spans else 0) if self._answer_header else -1
            if opened >= 0:
                before = before[: opened + len(self._answer_header)]
            if not found or not text.startswith(before) or not text.endswith(after):
                raise DataError(
                    f"the chat template does not write turn {index + 1} (assistant) as it is, so its tokens cannot be "
                    "told from the prompt's; train on the last turn only, or use another template"
                )
            stop = len(text) - len(after)
            if self._end_of_turn and text.startswith(self._end_of_turn, stop):
                stop += len(self._end_of_turn)
            spans.append(TrainedSpan(len(before), stop))
        closed = self._close(text[: spans[-1].stop])
        spans[-1] = TrainedSpan(spans[-1].start, len(closed))
        return closed, spans

    def split_turns(self, turns: Sequence[tuple[str, str]]) -> list[EncodedTurn]:
        """Tokens of (prompt text, response text), and where the tokenizer would have merged across the boundary. A
        prompt has the same tokens here as on its own.

        Such an answer is tokenised separately: a sampler cannot merge tokens with the prompt, so these are the tokens
        that it would produce. The prompt is unchanged, because the two answers of a pair share it.
        """
        distinct = list(dict.fromkeys(before for before, _ in turns))  # the two answers of a pair share one
        prompts = dict(zip(distinct, self.encode_prompts(distinct), strict=True))
        wholes = self.encode_prompts([before + answer for before, answer in turns])
        split: list[EncodedTurn] = []
        for (before, answer), whole in zip(turns, wholes, strict=True):
            prompt = prompts[before]
            joined = whole[: len(prompt)] == prompt
            response = whole[len(prompt) :] if joined else self._continue(prompt, before, answer)
            split.append(EncodedTurn(prompt, response, not joined))
        return split

    def _continue(self, prompt: Ids, before: str, answer: str) -> Ids:
        """Tokens of an answer that a tokenizer would merge with its prompt."""
        alone = self.encode_prompts([answer])[0]
        end = self.tokenizer.eos_token or ""
        if not end or self._decode([*prompt, *alone]) == before + answer:
            return alone
        # Some tokenizers put a space before the first word of a text. After a special token it is not the first.
        (fence, fenced) = self.encode_prompts([end, end + answer])
        inside = fenced[len(fence) :]
        return inside if self._decode([*prompt, *inside]) == before + answer else alone

    def _decode(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_conversation(self, text: str, spans: Sequence[TrainedSpan]) -> tuple[Ids, Ids, list[bool]]:
        """Tokens before the first trained one, tokens from there on, and which of the latter are trained."""
        edges = [0, *(edge for span in spans for edge in (span.start, span.stop))]  # prompt, answer, prompt, answer, …
        pieces = self._cut_whole(text, edges) or self._grow(text, edges)
        mask = [bool(index % 2) for index, piece in enumerate(pieces) for _ in piece]
        ids = [token for piece in pieces for token in piece]
        return pieces[0], ids[len(pieces[0]) :], mask[len(pieces[0]) :]

    def _cut_whole(self, text: str, edges: Sequence[int]) -> list[Ids] | None:
        """Tokenises once and splits at the boundaries; None if a token crosses one."""
        if not self.tokenizer.is_fast:
            return None
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]]
        cuts = [*(bisect_left(starts, edge) for edge in edges[:-1]), len(starts)]
        pieces: list[Ids] = [encoded["input_ids"][cut:end] for cut, end in pairwise(cuts)]
        # Offsets omit a token's leading spaces, so they are approximate. Decoding the pieces verifies them.
        written = self.tokenizer.batch_decode(pieces, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return pieces if written == [text[edge:end] for edge, end in pairwise(edges)] else None

    def _grow(self, text: str, edges: Sequence[int]) -> list[Ids]:
        """Tokenises piece by piece, as in sampling."""
        pieces: list[Ids] = []
        for edge, end in pairwise(edges):
            before = [token for piece in pieces for token in piece]
            whole, alone = self.encode_prompts([text[:end], text[edge:end]])
            pieces.append(whole[len(before) :] if whole[: len(before)] == before else alone)
        return pieces

    @cached_property
    def _answer_header(self) -> str:
        """What the template prints to open an assistant's turn."""
        question: list[Message] = [{"role": "user", "content": _PLACEHOLDER}]
        closed, opened = self._write_all([(question, False), (question, True)])
        return opened[len(closed) :] if opened.startswith(closed) else ""

    def _write(
        self, messages: Sequence[Message], *, opens_answer: bool, tools: Sequence[JsonMapping] = (), **kwargs: object
    ) -> str:
        return next(
            self._write_all([(messages, opens_answer)], {**kwargs, **({"tools": list(tools)} if tools else {})})
        )

    def _write_all(
        self, conversations: Sequence[tuple[Sequence[Message], bool]], kwargs: JsonMapping | None = None
    ) -> Iterator[str]:
        """The texts of conversations, each with whether it opens an answer."""
        images = [images_of(messages) for messages, _ in conversations]
        if any(images):
            if self.image_tokens is None or self.template is None:
                reason = "has no chat template" if self.image_tokens else "reads text only"
                raise DataError(f"the prompt has images, and the model {self.tokenizer.name_or_path} {reason}")
            conversations = [(without_images(messages), opens) for messages, opens in conversations]
            texts = self._render(conversations, kwargs)
            yield from (self.image_tokens(*one) if one[1] else one[0] for one in zip(texts, images, strict=True))
        elif self.template is None:
            yield from (self._opening + "".join(one["content"] for one in messages) for messages, _ in conversations)
        else:
            yield from self._render(conversations, kwargs)

    def _render(
        self, conversations: Sequence[tuple[Sequence[Message], bool]], kwargs: JsonMapping | None
    ) -> Iterator[str]:
        variables = {**self.tokenizer.special_tokens_map, **self.kwargs, **(kwargs or {})}
        if self._writes_parts:
            conversations = [(list(map(_with_parts, messages)), opens) for messages, opens in conversations]
        try:
            yield from RENDERER.render(str(self.template), variables, conversations)
        except TemplateRefused as error:
            if error.is_syntax:
                raise DataError(f"the chat template is not valid Jinja, {error}{self._origin}") from error
            roles = ", ".join(str(message.get("role")) for message in conversations[error.index][0][:_SHOWN_ROLES])
            raise DataError(
                f"the chat template refuses a conversation with the roles [{roles}]: {error}{self._origin}"
            ) from error

    def _close(self, answer: str) -> str:
        """`answer` up to and including its end of turn. Sampling never produces what a template prints after that."""
        if self._after_answer and answer.endswith(self._after_answer):
            answer = answer[: -len(self._after_answer)]
        return answer if answer.endswith(self.end_of_turn) else answer + self.end_of_turn

    def _find_after_answer(self) -> str:
        """What the template prints after an assistant's content, to the end of the text."""
        if self.template is None:
            return ""
        example: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
        text = self._write(example, opens_answer=False)
        if _PLACEHOLDER not in text and (in_parts := self._in_parts(example)) is not None:
            self._writes_parts, text = True, in_parts
        return text.partition(_PLACEHOLDER)[2]

    def _in_parts(self, example: Sequence[Message]) -> str | None:
        """What the template writes of a content in parts, as templates of some vision-language models need it; None if
        it leaves that out too.
        """
        try:
            text = self._write([_with_parts(message) for message in example], opens_answer=False)
        except DataError:
            return None
        return text if _PLACEHOLDER in text else None

    def _find_end_of_turn(self) -> str:
        """The part of it that closes the turn: up to the first special token, or all of it that is not white space."""
        after = self._after_answer
        ends = [after.index(token) + len(token) for token in self.special_texts if token in after]
        return after[: min(ends)] if ends else after.rstrip()

    def encode_prompts(self, texts: Sequence[str]) -> list[Ids]:
        """The text already contains special tokens, so none are added."""
        if not texts:
            return []
        try:
            encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        except TypeError:  # for half of a surrogate pair, among others
            for text in texts:
                refuse_half_pairs(text)
            raise
        return list(encoded["input_ids"])


class WholeChatFormat(ChatFormat):
    """Conversations as a reward model reads them: whole, exactly as the chat template writes them.

    A language model is trained up to the end of its turn, because sampling stops there. A reward model reads finished
    conversations, and its users (`transformers`, TRL, vLLM) pass it `apply_chat_template` of all messages, which
    often prints something after the last turn. The score is read at the last token, so this suffix must be present.
    The end of the prompt has no meaning here: it is the prefix shared by answers to the same prompt, computed once.
    """

    @property
    def last_token_ids(self) -> tuple[int, ...]:
        _, response = self.turn([{"role": "user", "content": "?"}], "!")
        return tuple(dict.fromkeys([*self.stop_token_ids, response[-1]]))

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        parent = super().fingerprints
        return {**parent, "template": sha256_of(f"whole {parent['template']}")}

    def _cut(self, prompt_messages: Sequence[Message], response: str, before: str, whole: str) -> tuple[str, str]:
        if self.template is None:
            return super()._cut(prompt_messages, response, before, whole)
        opened = before
        if not whole.startswith(opened):  # a template that writes a finished turn in another way than an open one
            finished = self._write([*prompt_messages, {"role": "assistant", "content": "x"}], opens_answer=False)
            opened = opened[: shared_length(opened, finished)]
        if not opened or not whole.startswith(opened) or whole == opened:
            raise DataError("the chat template writes nothing that the answers to one prompt share")
        return opened, whole[len(opened) :]

    def split_turns(self, turns: Sequence[tuple[str, str]]) -> list[EncodedTurn]:
        """Tokens of the whole text, cut after the last token that all answers to one prompt share with the prompt."""
        wholes = self.encode_prompts([before + answer for before, answer in turns])
        distinct = list(dict.fromkeys(before for before, _ in turns))
        shared = dict(zip(distinct, self.encode_prompts(distinct), strict=True))
        for (before, _), whole in zip(turns, wholes, strict=True):
            shared[before] = shared[before][: shared_length(shared[before], whole[:-1])]
        return [
            EncodedTurn(shared[before], whole[len(shared[before]) :], crossed=False)
            for (before, _), whole in zip(turns, wholes, strict=True)
        ]


def shared_length(left: Sequence[object], right: Sequence[object]) -> int:
    """How many items, or characters, both start with."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def images_of(messages: Sequence[Message]) -> list[ImageRef]:
    """The images of the parts {"type": "image", "image": ImageRef}, in their order."""
    parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
    found = [part.get("image") for part in parts if part.get("type") == "image"]
    if not all(isinstance(image, ImageRef) for image in found):
        raise DataError("a conversation with images can be written only when its row is read, not continued by turns")
    return found


def without_images(messages: Sequence[Message]) -> list[Message]:
    """The same with parts {"type": "image"}, as templates expect them."""
    bare = []
    for one in messages:
        parts = one.get("content")
        if isinstance(parts, list):
            one = {**one, "content": [{key: part[key] for key in part if key != "image"} for part in parts]}
        bare.append(one)
    return bare


def attached(messages: Sequence[Message], images: Sequence[ImageRef]) -> list[Message]:
    """Undoes `without_images`: the parts {"type": "image"} get the images in their order."""
    left = iter(images)

    def part_of(part: JsonMapping) -> JsonMapping:
        return {**part, "image": next(left)} if part["type"] == "image" else part

    if not images:
        return list(messages)
    return [
        {**one, "content": [part_of(part) for part in one["content"]]} if isinstance(one["content"], list) else one
        for one in messages
    ]


def _with_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def is_answer(message: Message) -> bool:
    """Whether a turn is to be learnt. One without text (a bare tool call) would train on an empty answer."""
    return message["role"] == "assistant" and bool(message["content"].strip())


def _resolve_template(chat_template: str | None, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The template to write with; None writes contents one after another."""
    if chat_template is None:
        return None
    if chat_template == DEFAULT_TEMPLATE:
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    if chat_template in TEMPLATES_BY_NAME:
        return TEMPLATES_BY_NAME[chat_template].read_text(encoding="utf-8")
    if chat_template.endswith(".jinja"):
        file = Path(chat_template).expanduser()
        if not file.is_file():
            raise DataError(f"tokenizer.chat_template: file not found: {chat_template} (looked in {Path.cwd()})")
        chat_template = file.read_text(encoding="utf-8")
    elif "{{" not in chat_template and "{%" not in chat_template:
        raise DataError(
            f"tokenizer.chat_template: {chat_template!r} is neither 'default', null, {', '.join(TEMPLATES_BY_NAME)}, a "
            "*.jinja file nor a Jinja template"
        )
    return chat_template


def _opening_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """The BOS token where the tokenizer puts one before plain text by itself."""
    if tokenizer.bos_token_id is None:
        return ""
    alone = tokenizer("", add_special_tokens=True)["input_ids"]
    return str(tokenizer.bos_token) if alone[:1] == [tokenizer.bos_token_id] else ""


def _jinja_literal(value: object, name: str) -> str:
    """A value of a config file as Jinja writes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return json.dumps(value, ensure_ascii=False)  # Jinja would read JSON's pair of surrogates as two characters
    if isinstance(value, Mapping):
        keys = (json.dumps(str(key), ensure_ascii=False) for key in value)
        values = (_jinja_literal(item, name) for item in value.values())
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(keys, values, strict=True)) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_jinja_literal(item, name) for item in value) + "]"
    raise DataError(
        f"tokenizer.chat_template_kwargs: {name!r} is {value!r}; texts, numbers, lists and maps can be recorded"
    )
