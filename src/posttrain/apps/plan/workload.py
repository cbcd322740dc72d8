"""What one step computes: how many samples of which length, in how many micro-batches.

MeanLengths of real data are not in a config, so the mean lengths are assumptions, which the plan names. Micro-batches
follow `data/packing.py`: a prompt is computed once for the samples that share a micro-batch with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from posttrain.config import GrpoRunConfig, PolicyConfig, RunConfig
from posttrain.config.placement import REFERENCE
from posttrain.errors import InputError
from posttrain.policy.memory.layer_bytes import Pass

_ASSUMED_PROMPT_SHARE = 0.25  # of the longest sequence, where a config leaves prompts no room of their own


@dataclass(frozen=True)
class MeanLengths:
    """Mean tokens of prompts and answers, and their source."""

    prompt: float
    answer: float
    source: str


@dataclass(frozen=True)
class MicroBatch:
    """How large one pass may be: a number of tokens (packing), or else of responses."""

    max_tokens: int | None
    num_responses: int
    keeps_groups_whole: bool = False  # the loss needs both answers of a pair in one pass


@dataclass(frozen=True)
class SharedPrompt:
    """One prompt with `size` of its answers; with size 1 they are one sequence."""

    prompt: float
    answer: float
    size: int

    @property
    def cost(self) -> float:
        """Tokens that count towards a budget."""
        return self.prompt + self.size * self.answer

    @property
    def fed(self) -> float:
        """Tokens that pass through the model: the last of an answer predicts nothing."""
        return self.prompt + self.size * max(self.answer - 1, 0)

    @property
    def gathered(self) -> float:
        """Keys that attention is given: shared ones are repeated in front of every answer; else none is copied."""
        return self.prompt + self.size * (self.prompt + self.answer - 1) if self.size > 1 else 0.0

    def pairs(self, window: int | None) -> float:
        """Number of (token, attended token) pairs."""
        p, a = self.prompt, max(self.answer - 1, 0)
        seen = p * (p + 1) / 2 + self.size * (a * p + a * (a + 1) / 2)
        return seen if window is None else min(seen, self.fed * window)

    def in_one_pass(self, count: float, window: int | None) -> Pass:
        """`count` of these bundles in one packed row."""
        return Pass(
            count * self.fed, count * self.size * self.answer, count * self.gathered, count * self.pairs(window),
            count * self.prompt,
        )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A step, per rank. Groups are prompts with their samples, pairs, or single examples."""

    kind: str
    num_groups: float
    group_size: int
    lengths: MeanLengths
    max_total_tokens: int
    max_new_tokens: int
    fixed_length: bool  # every answer has max_new_tokens
    num_updates: int
    num_sampled: int  # per group, in this step; 0: nothing is sampled
    num_scorings: int  # passes over all samples without gradients: reference, policy
    train: MicroBatch
    score: MicroBatch
    budget_section: str = "policy.sequence_packing"  # of the config, which says how many tokens a micro-batch may have
    num_engine_groups: float | None = None  # by one engine on a GPU of its own; None: a rank samples what it trains
    in_flight: float = 1.0  # groups sampled at once, as a multiple of those of a step

    @property
    def num_samples(self) -> float:
        return self.num_groups * self.group_size

    @property
    def num_sampled_groups(self) -> float:
        """Of a step, by one rank or engine that samples."""
        return self.num_groups if self.num_engine_groups is None else self.num_engine_groups

    @property
    def num_in_flight(self) -> float:
        return self.num_sampled_groups * self.in_flight

    @property
    def num_tokens(self) -> float:
        """Of full sequences, as throughput counts them."""
        return self.num_samples * (self.lengths.prompt + self.lengths.answer)

    def bundle(self, micro: MicroBatch, *, longest: bool = False) -> SharedPrompt:
        """What a micro-batch is made of. `longest`: with answers as long as they may be."""
        prompt, answer = self.lengths.prompt, self.lengths.answer
        if longest:
            answer = max(answer, min(self.max_new_tokens, self.max_total_tokens - prompt))
        if micro.max_tokens is None:
            size = min(self.group_size, max(1, micro.num_responses))
        else:
            size = min(self.group_size, max(1, int((micro.max_tokens - prompt) // max(answer, 1))))
        return SharedPrompt(prompt, answer, self.group_size if micro.keeps_groups_whole else size)

    def passes(self, micro: MicroBatch, window: int | None) -> tuple[Pass, float]:
        """A mean pass, and how many of them a step takes."""
        bundle = self.bundle(micro)
        bundles = self.num_groups * self.group_size / bundle.size
        if micro.max_tokens is None:
            count = math.ceil(self.num_samples / max(micro.num_responses, bundle.size))
        else:
            count = math.ceil(bundles / self._bundles_per_bin(bundle, micro.max_tokens))
        count = max(count, self.num_updates, 1)
        return bundle.in_one_pass(bundles / count, window), count

    def largest_pass(self, micro: MicroBatch, window: int | None) -> Pass:
        """The one that decides memory. Answers differ in length, so a budget of tokens is filled to the last."""
        if micro.max_tokens is None:
            bundle = self.bundle(micro, longest=True)
            return bundle.in_one_pass(max(1, micro.num_responses // bundle.size), window)
        bundle = self.bundle(micro)
        together = self.group_size if micro.keeps_groups_whole else 1  # answers that are never split
        longest = self.lengths.prompt + together * (self.max_total_tokens - self.lengths.prompt)
        whole = max(micro.max_tokens, bundle.cost, longest)
        if self.fixed_length:
            whole = max(self._bundles_per_bin(bundle, micro.max_tokens), 1) * bundle.cost
        whole = min(whole, self.num_groups / self.num_updates * self.group_size / bundle.size * bundle.cost)
        return bundle.in_one_pass(max(whole / bundle.cost, 1 / bundle.size), window)

    def _bundles_per_bin(self, bundle: SharedPrompt, max_tokens: int) -> float:
        """Whole bundles where all are alike, as fractions where lengths differ and small ones fill the gaps."""
        fitting = max_tokens / bundle.cost
        return max(math.floor(fitting), 1) if self.fixed_length else max(fitting * 0.97, 1)

    def with_train_tokens(self, max_tokens: int) -> Workload:
        return replace(self, train=replace(self.train, max_tokens=max_tokens))


def workload_of(
    config: RunConfig,
    lengths: MeanLengths | None = None,
    *,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
) -> Workload:
    """The step of a config. `lengths` are measured; the two numbers are the user's and take precedence."""
    policy = config.policy
    step = config.step_sizes()
    ranks = config.num_ranks
    max_new = policy.generation.max_new_tokens if policy.generation else policy.max_total_sequence_length
    known = _lengths(policy, lengths, prompt_tokens, answer_tokens)
    fixed = bool(policy.generation and policy.generation.ignore_eos) or known.answer >= 0.98 * max_new
    per_unit = step.num_answers_per_unit
    in_flight = 1.0
    if isinstance(config, GrpoRunConfig) and config.grpo.async_grpo.enabled:
        in_flight = config.num_groups_in_flight / config.grpo.num_prompts_per_step
    return Workload(
        kind=config.called,
        num_groups=step.num_rows / ranks,
        group_size=step.num_answers_per_row,
        lengths=known,
        max_total_tokens=policy.max_total_sequence_length,
        max_new_tokens=max_new,
        fixed_length=fixed,
        num_updates=step.num_updates,
        num_sampled=step.num_sampled_per_row,
        num_scorings=step.num_scorings - (step.num_scorings > 0 and config.placement.group(REFERENCE) is not None),
        train=replace(_micro_batch(policy, "train", per_unit), keeps_groups_whole=per_unit == 2),
        score=_micro_batch(policy, "logprob", per_unit),
        num_engine_groups=step.num_rows / config.num_engine_gpus if config.num_engines else None,
        in_flight=in_flight,
        budget_section=f"policy.{'dynamic_batching' if policy.dynamic_batching.enabled else 'sequence_packing'}",
    )


def _micro_batch(policy: PolicyConfig, which: str, per_sample: int) -> MicroBatch:
    """As build.py decides it."""
    size = policy.train_micro_batch_size if which == "train" else policy.logprob_batch_size
    budget = None
    for section in (policy.sequence_packing, policy.dynamic_batching):
        if section.enabled:
            budget = section.train_mb_tokens if which == "train" else section.logprob_mb_tokens
    return MicroBatch(budget, size * per_sample)


def _lengths(
    policy: PolicyConfig, known: MeanLengths | None, prompt: float | None, answer: float | None
) -> MeanLengths:
    total = policy.max_total_sequence_length
    new = min(policy.generation.max_new_tokens, total) if policy.generation else total
    if known is None:
        room = total - new
        assumed = room if room > 0 else _ASSUMED_PROMPT_SHARE * total
        known = MeanLengths(
            assumed, min(new, total - assumed), "assumed: every sequence is as long as the config allows"
        )
    if prompt is None and answer is None:
        return known
    prompt = known.prompt if prompt is None else prompt
    if answer is None and prompt != known.prompt:
        answer = max(min(new, total - prompt), 0)
    found = MeanLengths(prompt, known.answer if answer is None else answer, "as given on the command line")
    if found.prompt < 1 or found.answer < 1 or found.prompt + found.answer > total:
        raise InputError(
            f"prompts of {found.prompt:g} and answers of {found.answer:g} tokens do not fit "
            f"policy.max_total_sequence_length = {total}: both need at least 1 token"
        )
    return found
