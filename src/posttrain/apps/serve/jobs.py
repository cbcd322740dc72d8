"""From the body of a request to a job for the engine: prompt tokens, limits, sampling settings.

Cheap checks come first, and long texts are tokenised in a thread, so that they do not block the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from posttrain.apps.serve.protocol import (
    ChatBody,
    CompletionBody,
    PromptFields,
    TokenizeChatBody,
    TokenizeTextBody,
    bad_request,
)
from posttrain.apps.serve.responses import ResponseChoice
from posttrain.apps.serve.service import Job, Service, Version, new_id
from posttrain.data.answer_grammars import AnswerGrammar
from posttrain.data.errors import DataError
from posttrain.data.images import MAX_IMAGE_PIXELS, decode_data_url, image_of
from posttrain.data.tool_calls import AnswerReader
from posttrain.engines.native.constraints import check_grammar
from posttrain.engines.native.noise import prompt_seed
from posttrain.engines.native.session import SessionRequest
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.types import ImageRef

Ids = tuple[int, ...]
Images = Mapping[int, Mapping[int, ImageRef]]  # by message, then by place in its content

# Tokenising less text takes less time than a step of the engine: a thread would only delay it.
_SHORT_TEXT_CHARACTERS = 4096


async def chat_job(service: Service, body: ChatBody, key: str | None) -> Job:
    """`key` identifies the client: it selects the version when there are two."""
    job_id = new_id("chatcmpl")
    version = service.version_for(body.model, body.user or key or job_id)
    _check_number(service, body, 1)
    tools = body.usable_tools
    images = await read_images(body)
    text = chat_prompt(version, body, tools, images, body.reasoning_effort)
    prompts = await _tokens(version, [text], version.chat.encode_prompts, "messages")
    answers, new_reader = version.tool_chat.answers, None
    if tools or answers.reasoning is not None or answers.has_channels:
        new_reader = partial(answers.reader, tools, prompt=text, reads_calls=bool(tools))
    grammar = await _grammar(version, body, tools, text)
    seen = tuple(image for of_message in images.values() for image in of_message.values())
    return _job(service, job_id, body, version, prompts, version.end_of_turn_ids, grammar, new_reader, seen)


async def read_images(body: PromptFields) -> Images:
    """Of all messages. Decoding them in a thread does not block the event loop."""
    urls = {place: urls for place, message in enumerate(body.messages) if (urls := message.image_urls)}
    return await asyncio.to_thread(_decode, urls) if urls else {}


def _decode(urls: Mapping[int, Mapping[int, str]]) -> Images:
    images: dict[int, dict[int, ImageRef]] = {at: {} for at in urls}
    left = MAX_IMAGE_PIXELS
    for at, place, url in ((at, place, url) for at, those in urls.items() for place, url in those.items()):
        field = f"messages.{at}.content.{place}.image_url.url"
        if url[:5].lower() != "data:":
            raise bad_request(f"{field}: only data: URLs are read, data:image/png;base64,…", field)
        try:
            found = images[at][place] = image_of(decode_data_url(url, field), field, max_pixels=left)
        except DataError as error:
            raise bad_request(str(error), field) from error
        left -= found.width * found.height
    return images


def chat_prompt(
    version: Version,
    body: PromptFields,
    tools: Sequence[JsonObject],
    images: Images,
    reasoning_effort: str | None = None,
) -> str:
    """The text of a chat's prompt."""
    chat = version.tool_chat
    if tools and not chat.answers.name:
        raise bad_request(
            "the chat template of this model writes tools in a format that this server cannot read in answers", "tools"
        )
    given = {**(body.chat_template_kwargs or {})}
    if reasoning_effort is not None:
        if "reasoning_effort" not in str(version.chat.template):
            raise bad_request("the chat template of this model has no reasoning_effort", "reasoning_effort")
        given["reasoning_effort"] = reasoning_effort
    for name in given.keys() & {"tools", "messages", "add_generation_prompt", "tokenize", "chat_template"}:
        raise bad_request(f"chat_template_kwargs.{name} is set by the server", "chat_template_kwargs")
    try:
        messages = [message.plain(images.get(at, {})) for at, message in enumerate(body.messages)]
        return chat.render(messages, tools, **given)
    except DataError as error:
        raise bad_request(str(error), "messages") from error


async def _grammar(version: Version, body: ChatBody, tools: Sequence[JsonObject], prompt: str) -> str:
    """The grammar that the answer obeys; empty if it is free."""
    schema = None if body.response_format is None else body.response_format.schema_of_answer
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if schema is None and not (tools and (body.must_call or is_strict or body.parallel_tool_calls is False)):
        return ""
    field = "tools" if schema is None else "response_format"
    if body.ignore_eos:
        raise bad_request(f"ignore_eos and {field}: an answer that obeys a schema must end", "ignore_eos")
    writer = AnswerGrammar(version.tool_chat.answers, version.tokenizer, prompt)
    try:
        if tools:
            may_repeat = body.parallel_tool_calls is not False
            grammar = writer.of_calls(tools, schema, must_call=body.must_call, may_repeat=may_repeat)
        else:
            assert schema is not None
            grammar = writer.of_schema(schema)
        await asyncio.to_thread(check_grammar, version.tokenizer, grammar)
    except (DataError, InputError) as error:
        raise bad_request(f"{field}: {error}", field) from error
    return grammar


async def completion_job(service: Service, body: CompletionBody, key: str | None) -> Job:
    job_id = new_id("cmpl")
    version = service.version_for(body.model, body.user or key or job_id)
    _check_number(service, body, len(body.prompts))
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    given = [tuple(prompt) for prompt in body.prompts if not isinstance(prompt, str)]  # all, or none

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [version.tokenizer(text, verbose=False)["input_ids"] for text in texts]

    prompts = given or await _tokens(version, texts, encode, "prompt")
    return _job(service, job_id, body, version, prompts, (version.tokenizer.eos_token_id,))


async def tokenized(version: Version, body: TokenizeTextBody | TokenizeChatBody) -> list[int]:
    """The tokens of a text, or of the prompt of a chat."""
    if isinstance(body, TokenizeChatBody):
        text = chat_prompt(version, body, body.tool_schemas(), await read_images(body))
        return list((await _tokens(version, [text], version.chat.encode_prompts, "messages"))[0])

    def encode(texts: Sequence[str]) -> list[list[int]]:
        special = body.add_special_tokens
        return [version.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"] for text in texts]

    return list((await _tokens(version, [body.prompt], encode, "prompt"))[0])


async def _tokens(
    version: Version, texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]], where: str
) -> list[Ids]:
    """Tokenizers release the interpreter lock, so a thread does not block the event loop."""
    context = version.max_total_tokens
    for text in texts:
        if (least := len(text) // version.longest_token) >= context:
            raise bad_request(
                f"This model's maximum context length is {context} tokens. However, {len(text)} characters in the "
                f"{where} are at least {least} tokens. Please reduce the length of the {where}.",
                where,
                "context_length_exceeded",
            )
    is_short = sum(map(len, texts)) <= _SHORT_TEXT_CHARACTERS
    try:
        return [tuple(ids) for ids in (encode(texts) if is_short else await asyncio.to_thread(encode, texts))]
    except (TypeError, DataError) as error:  # a lone surrogate, which JSON allows
        raise bad_request(f"{where} is not valid Unicode: {error}", where) from error


def _job(
    service: Service,
    job_id: str,
    body: ChatBody | CompletionBody,
    version: Version,
    prompts: Sequence[Ids],
    end_of_turn_ids: Ids,
    grammar: str = "",
    new_reader: Callable[[], AnswerReader] | None = None,
    images: tuple[ImageRef, ...] = (),
) -> Job:
    requests = []
    size = version.session.limits.vocab_size
    if not all(0 <= token < size for token in body.stop_token_ids or ()):
        raise bad_request(f"stop_token_ids: the model's vocabulary has {size} tokens", "stop_token_ids")
    for index, prompt in enumerate(prompts):
        sampling = body.sampling(_num_new_tokens(service, body, version, len(prompt)), end_of_turn_ids)
        try:
            version.session.limits.check(prompt, sampling.max_new_tokens)
        except InputError as error:
            raise bad_request(str(error), "messages" if isinstance(body, ChatBody) else "prompt") from error
        requests.append(
            SessionRequest(
                id=f"{job_id}-{index}",
                prompt_ids=prompt,
                sampling=sampling,
                # Without a seed every prompt gets a random one. A constant one gives each prompt its own noise.
                seed=secrets.randbits(63) if body.seed is None else prompt_seed(body.seed, prompt),
                num_samples=body.num_samples,
                adapter=version.adapter,
                num_top_logprobs=body.num_top_logprobs,
                grammar=grammar,
                images=images,
            )
        )
    return Job(
        job_id,
        body.model,
        version,
        requests,
        new_reader,
        lists_logprobs=body.lists_logprobs,
        returns_ids=bool(body.return_token_ids),
        writes_ids=bool(body.return_tokens_as_token_ids),
    )


def _check_number(service: Service, body: ChatBody | CompletionBody, num_prompts: int) -> None:
    wanted, limit = num_prompts * body.num_samples, service.limits.max_samples
    if wanted > limit:
        what = f"{num_prompts} prompts with n = {body.num_samples}" if num_prompts > 1 else f"n is {wanted}"
        raise bad_request(f"{what}: this server gives at most {limit} samples to a request", "n")


def _num_new_tokens(service: Service, body: ChatBody | CompletionBody, version: Version, prompt_length: int) -> int:
    """The number that the client requests, or the default; ApiError if it does not fit."""
    context = version.max_total_tokens
    limit = service.limits.max_completion_tokens or context
    field = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
    asked: int | None = getattr(body, field)
    wanted = asked or (min(body.usual_new_tokens, limit) if body.usual_new_tokens else None)
    where = "messages" if isinstance(body, ChatBody) else "prompt"
    if prompt_length + (wanted or 1) > context:
        completion = f" ({prompt_length} in the {where}, {wanted} in the completion)" if wanted else f" in the {where}"
        raise bad_request(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt_length + (wanted or 0)} tokens{completion}. Please reduce the length of the {where} or "
            "completion.",
            where,
            "context_length_exceeded",
        )
    if asked is not None and asked > limit:
        raise bad_request(f"{field} is {asked}: this server gives at most {limit}", field)
    return wanted or min(context - prompt_length, limit)


def choices_of(job: Job) -> dict[tuple[str, int], ResponseChoice]:
    """The choices of the response in order, by (engine request, sample)."""
    choices: dict[tuple[str, int], ResponseChoice] = {}
    for request in job.requests:
        stop_ids = job.version.stop_ids(request.sampling)
        for sample in range(request.num_samples):
            choices[request.id, sample] = ResponseChoice(
                len(choices),
                job.version.tokenizer,
                request.sampling.stop_strings,
                stop_ids,
                lists_logprobs=job.lists_logprobs,
                lists_ids=job.returns_ids,
                reader=job.new_reader() if job.new_reader else None,
                hidden=job.version.hidden_ids if job.new_reader else None,
            )
    return choices
