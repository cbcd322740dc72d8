"""From the body of a request to a job for the engine: prompt tokens, limits, sampling settings.

Cheap checks come first, and long texts are tokenised in a thread, so that they do not block the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from posttrain.apps.serve.protocol import ChatBody, CompletionBody, bad_request
from posttrain.apps.serve.responses import ResponseChoice
from posttrain.apps.serve.service import Job, Service, Version, new_id
from posttrain.data.errors import DataError
from posttrain.engines.native.session import SessionRequest
from posttrain.errors import InputError

Ids = tuple[int, ...]

# Tokenising less text takes less time than a step of the engine: a thread would only delay it.
_SHORT_TEXT_CHARACTERS = 4096


async def chat_job(service: Service, body: ChatBody, key: str | None) -> Job:
    """`key` identifies the client: it selects the version when there are two."""
    job_id = new_id("chatcmpl")
    version = service.version_for(body.model, body.user or key or job_id)
    _check_number(service, body, 1)
    try:
        text = version.chat.render([message.plain() for message in body.messages])
        prompts = await _tokens(version, [text], version.chat.encode_prompts, "messages")
    except DataError as error:
        raise bad_request(str(error), "messages") from error
    return _job(service, job_id, body, version, prompts, version.end_of_turn_ids)


async def completion_job(service: Service, body: CompletionBody, key: str | None) -> Job:
    job_id = new_id("cmpl")
    version = service.version_for(body.model, body.user or key or job_id)
    _check_number(service, body, len(body.prompts))
    texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
    given = [tuple(prompt) for prompt in body.prompts if not isinstance(prompt, str)]  # all, or none

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [version.tokenizer(text, verbose=False)["input_ids"] for text in texts]

    try:
        prompts = given or await _tokens(version, texts, encode, "prompt")
    except TypeError as error:  # a lone surrogate, which JSON allows
        raise bad_request(f"prompt is not valid Unicode: {error}", "prompt") from error
    return _job(service, job_id, body, version, prompts, (version.tokenizer.eos_token_id,))


async def _tokens(
    version: Version, texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]], where: str
) -> list[Ids]:
    """Tokenizers release the interpreter lock, so a thread does not block the event loop."""
    if sum(map(len, texts)) <= _SHORT_TEXT_CHARACTERS:
        return [tuple(ids) for ids in encode(texts)]
    context = version.max_total_tokens
    for text in texts:
        if (least := len(text) // version.longest_token) >= context:
            raise bad_request(
                f"This model's maximum context length is {context} tokens. However, {len(text)} characters in the "
                f"{where} are at least {least} tokens. Please reduce the length of the {where}.",
                where,
                "context_length_exceeded",
            )
    return [tuple(ids) for ids in await asyncio.to_thread(encode, texts)]


def _job(
    service: Service,
    job_id: str,
    body: ChatBody | CompletionBody,
    version: Version,
    prompts: Sequence[Ids],
    end_of_turn_ids: Ids,
) -> Job:
    requests = []
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
                # Without a seed every prompt gets a random one.
                seed=secrets.randbits(63) if body.seed is None else body.seed,
                num_samples=body.num_samples,
                adapter=version.adapter,
                num_top_logprobs=body.num_top_logprobs,
            )
        )
    return Job(job_id, body.model, version, requests)


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
                len(choices), job.version.tokenizer, request.sampling.stop_strings, stop_ids
            )
    return choices
