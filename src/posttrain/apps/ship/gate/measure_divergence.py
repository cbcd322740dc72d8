"""KL(model || base) on the answers of an evaluation, by reading them with both models (teacher forcing).

At every token of an answer both models give a distribution over the whole vocabulary; their KL divergence is computed
exactly and averaged over the tokens of a problem's answers. It is not estimated from the sampled tokens, so greedy
answers can be measured too. Answers are stored as text and tokenised again, so that token boundaries may differ from
the sampler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from posttrain.apps.evaluate.problems import load_problems
from posttrain.apps.evaluate.results import (
    CONFIG_FILE,
    Evaluation,
    EvaluationError,
    ProblemResult,
    hash_of_tasks,
    read_evaluation,
)
from posttrain.apps.ship.gate.divergence import Divergence, answers_digest, write_divergence
from posttrain.config import load_config
from posttrain.data.chat import ChatFormat
from posttrain.errors import InputError
from posttrain.models.accepted_names import ResolvedModel, model_fingerprint, resolve_registered_model
from posttrain.models.attention_interface import attention_context
from posttrain.models.loading import load_tokenizer, resolve_device, sampling_dtype
from posttrain.models.lora import load_with_adapter
from posttrain.policy.head import OutputHead
from posttrain.policy.packed import PackedRow
from posttrain.roles import ShowProgress
from posttrain.types import Message, TokenBatch

_CHUNK_ELEMENTS = 2**24  # logits of one model that exist at once: 64 MiB in fp32
_ROW_TOKENS = 8192


def measure_divergence(
    folder: str | Path,
    base: str,
    *,
    model: str | None = None,
    precision: str = "auto",
    device: str = "auto",
    show_progress: ShowProgress,
) -> tuple[Divergence, Path]:
    """Measure, and write `kl.json` into the evaluation's folder. `model` None: the one that the evaluation names."""
    evaluation = read_evaluation(folder)
    named = model or evaluation.summary.model
    if "://" in named:
        raise InputError(f"{evaluation.folder}: its model is {named}, a server; name its weights with --model")
    ours, theirs = resolve_registered_model(named), resolve_registered_model(base)
    if model is None and model_fingerprint(ours) != evaluation.summary.model_fingerprint:
        raise InputError(
            f"{evaluation.folder}: {named} has other weights now than the model that gave the answers; name that one "
            "with --model"
        )
    if any(sample.turns for problem in evaluation.problems for sample in problem.samples):
        raise InputError(
            f"{evaluation.folder}: its answers are conversations of several turns; the KL from a base model is "
            "measured on single answers"
        )
    messages, chat = _prompts(evaluation, ours)
    where = resolve_device(device)
    dtype = sampling_dtype(precision, where)
    heads = [OutputHead(load_with_adapter(reference, dtype, where)) for reference in (ours, theirs)]
    if heads[0].vocab_size != heads[1].vocab_size:
        raise InputError(
            f"--base {base}: its vocabulary has {heads[1].vocab_size} entries, that of {named} {heads[0].vocab_size}; "
            "only models with the same tokenizer can be compared token by token"
        )
    values: dict[str, float | None] = {}
    with show_progress("KL from base", len(evaluation.problems)) as progress:
        for problem in evaluation.problems:
            values[problem.id] = _divergence_of_problem(problem, messages[problem.id], chat, heads[0], heads[1], where)
            progress(1)
    found = Divergence(named, base, answers_digest(evaluation.folder), values)
    return found, write_divergence(evaluation.folder, found)


def _prompts(evaluation: Evaluation, reference: ResolvedModel) -> tuple[dict[str, tuple[Message, ...]], ChatFormat]:
    """The prompt of each problem, built again from the evaluation's config and checked to be the same; its format."""
    config = load_config("eval", evaluation.folder / CONFIG_FILE).config
    problems = load_problems(config.data, seed=config.eval.seed, limit=config.eval.max_problems).problems
    if hash_of_tasks(problems) != evaluation.summary.problem_set_hash:
        raise EvaluationError(
            f"{evaluation.folder}: {config.data.data_path or config.data.dataset_name} no longer holds the problems of "
            "this evaluation, so its prompts cannot be built again"
        )
    own = config.tokenizer.name
    name = reference.tokenizer if own == config.generation.model_name else own
    tokenizer = load_tokenizer(name, "tokenizer.name")
    chat = ChatFormat(tokenizer, config.tokenizer.chat_template, config.tokenizer.chat_template_kwargs)
    return {problem.id: problem.messages for problem in problems}, chat


def _divergence_of_problem(
    problem: ProblemResult,
    messages: tuple[Message, ...],
    chat: ChatFormat,
    ours: OutputHead,
    theirs: OutputHead,
    device: torch.device,
) -> float | None:
    prompt = chat.render(messages)
    ends = {"stop": chat.end_of_turn, "length": ""}
    texts = [s.text + ends[s.finish_reason] for s in problem.samples if s.finish_reason is not None]
    encoded = chat.split_turns([(prompt, text) for text in texts if text])
    turns = [turn[:2] for turn in encoded if turn.response]
    total, count = 0.0, 0
    for batch in _batches(turns):
        divergences = token_divergences(batch, ours, theirs, device)
        total, count = total + float(divergences.double().sum()), count + len(divergences)
    return total / count if count else None


def _batches(turns: Sequence[tuple[list[int], list[int]]]) -> list[TokenBatch]:
    """The answers of one problem, sharing their prompt, in rows of bounded length."""
    batches: list[TokenBatch] = []
    rows: list[list[int]] = []
    for prompt, response in turns:
        if rows and len(prompt) + sum(map(len, rows)) + len(response) > _ROW_TOKENS:
            batches.append(_batch(turns[0][0], rows))
            rows = []
        rows.append(response)
    return [*batches, _batch(turns[0][0], rows)] if rows else batches


def _batch(prompt: list[int], responses: list[list[int]]) -> TokenBatch:
    mask = torch.ones(sum(map(len, responses)))
    return TokenBatch.build([prompt], responses, [0] * len(responses), {"mask": mask})


@torch.no_grad()
def token_divergences(batch: TokenBatch, ours: OutputHead, theirs: OutputHead, device: torch.device) -> Tensor:
    """KL(ours || theirs) over the vocabulary, at each response token of the batch."""
    row = PackedRow.build(batch, device)
    with attention_context(row.attention):
        hidden = [head.hidden(row.input_ids, row.position_ids).index_select(0, row.source) for head in (ours, theirs)]
    chunk = max(1, _CHUNK_ELEMENTS // ours.vocab_size)
    pieces = []
    for mine, other in zip(hidden[0].split(chunk), hidden[1].split(chunk), strict=True):
        log_p = ours.logits(mine).float().log_softmax(-1)
        log_q = theirs.logits(other).float().log_softmax(-1)
        pieces.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(pieces).clamp_min(0.0).cpu()
