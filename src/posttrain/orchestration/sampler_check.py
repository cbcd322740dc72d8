"""Compares a separate engine with the trainer: at the start, and every `period` steps.

The trainer computes the log-probabilities of some answers that the engine has just sampled. A large difference means
wrong weights, another number format or another model, and training on such answers would fail silently.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from posttrain.algorithms.batches import with_routes
from posttrain.errors import HardwareError
from posttrain.roles import KeepsPrefixes, Progress, RoundEngine, Trainer
from posttrain.types import Completion, NoiseKey, OpenGroup, PrefillTokens, Quota, Sampling, Task, TokenBatch

_NUM_ANSWERS = 8
_NUM_SHORT_TOKENS = 64


@dataclass
class CheckedEngine:
    """A `RoundEngine` over another one."""

    engine: RoundEngine
    trainer: Trainer
    period: int  # steps
    max_error: float  # mean of exp(|difference|) over the tokens compared
    temperature: float  # the trainer's temperature; answers sampled at another one are not compared
    _last_step: int | None = None

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        sampled = self.engine.generate(tasks, num_samples, sampling, key, progress)
        pairs = [(task, samples[0]) for task, samples in zip(tasks, sampled, strict=True) if samples]
        self._compare(pairs, sampling, key.step)
        return sampled

    def sample_round(
        self,
        groups: Sequence[OpenGroup],
        sampling: Sampling,
        seed: int,
        quota: Quota | None = None,
        progress: Progress | None = None,
    ) -> list[OpenGroup]:
        after = self.engine.sample_round(groups, sampling, seed, quota, progress)
        # Answers that this round sampled from their first token; others were started with earlier weights.
        pairs = [
            (new.task, now)
            for old, new in zip(groups, after, strict=True)
            for then, now in zip(old.answers, new.answers, strict=True)
            if isinstance(now, Completion) and not then.token_ids
        ]
        self._compare(pairs, sampling, max((group.born for group in groups), default=0))
        return after

    def compare_short_answers(self, tasks: Sequence[Task], sampling: Sampling, key: NoiseKey) -> None:
        """Between rounds beside which the trainer changes weights: sample a few short answers to compare alone."""
        if self._is_due(key.step):
            short = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, _NUM_SHORT_TOKENS))
            self.generate(tasks[:_NUM_ANSWERS], 1, short, key)

    def keep_prefixes(self, wanted: bool) -> PrefillTokens | None:
        return self.engine.keep_prefixes(wanted) if isinstance(self.engine, KeepsPrefixes) else None

    def release(self) -> None:
        self.engine.release()

    def _is_due(self, step: int) -> bool:
        return self._last_step is None or step >= self._last_step + self.period

    def _compare(self, pairs: Sequence[tuple[Task, Completion]], sampling: Sampling, step: int) -> None:
        plain = sampling.temperature == self.temperature and sampling.top_p == 1 and sampling.top_k == 0
        if threading.current_thread() is not threading.main_thread():
            return  # a round sampled while the trainer updates the weights
        pairs = [(task, answer) for task, answer in pairs if answer.token_ids][:_NUM_ANSWERS]
        if not (plain and self._is_due(step) and pairs):
            return
        self._last_step = step
        logprobs = self.trainer.logprobs(_batch(pairs))
        theirs = torch.tensor([value for _, answer in pairs for value in answer.logprobs])
        differences = (logprobs.double() - theirs.double()).abs()
        error = float(differences.exp().mean())
        if math.isnan(error) or error > self.max_error:
            raise HardwareError(
                f"step {step}: the sampler's log-probabilities are not the trainer's. Over {differences.numel()} "
                f"tokens of {len(pairs)} answers the mean of exp(|difference|) is {error:.4g}, more than "
                f"policy.generation.vllm_cfg.max_prob_error = {self.max_error:g}; the largest difference is "
                f"{float(differences.max()):.3g}. The sampler may have other weights, another number format or another "
                "model. The same command continues from what was saved"
            )


def _batch(pairs: Sequence[tuple[Task, Completion]]) -> TokenBatch:
    batch = TokenBatch.build(
        [task.prompt_ids for task, _ in pairs],
        [answer.token_ids for _, answer in pairs],
        range(len(pairs)),
        images=[task.images for task, _ in pairs],
    )
    return with_routes(batch, [answer for _, answer in pairs])
