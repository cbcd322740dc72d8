"""What is sampled: a workload by name, and its prompts as random tokens.

512x128+256        512 prompts of 128 tokens, 256 new tokens each
64x512+512-g16     64 samples of 512 new tokens: 4 prompts of 512 tokens with 16 samples each
512x128+50..2000   as many new tokens as a seeded draw says, between 50 and 2,000: a long tail
long-tail          another name of the one above
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from shapes import FIRST_WORD

from posttrain.errors import InputError

ALIASES = {"long-tail": "512x128+50..2000"}
_FORM = re.compile(r"(\d+)x(\d+)\+(\d+)(?:\.\.(\d+))?(?:-g(\d+))?")


@dataclass(frozen=True)
class Workload:
    name: str
    num_prompts: int
    prompt_tokens: int
    num_samples: int  # of each prompt
    limits: tuple[int, ...]  # new tokens of each sample, by prompt

    @property
    def is_uniform(self) -> bool:
        return len(set(self.limits)) == 1

    @property
    def longest(self) -> int:
        return max(self.limits)

    @property
    def num_new_tokens(self) -> int:
        return sum(self.limits) * self.num_samples

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_samples

    def cut_to(self, num_tokens: int) -> Workload:
        """The same prompts, with at most so many new tokens: to warm up, and to time the prompts alone."""
        limits = tuple(min(limit, num_tokens) for limit in self.limits)
        return Workload(self.name, self.num_prompts, self.prompt_tokens, self.num_samples, limits)

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)
        return [
            [rng.randrange(FIRST_WORD, vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.num_prompts)
        ]


def workload(name: str, seed: int = 0) -> Workload:
    match = _FORM.fullmatch(ALIASES.get(name, name))
    if match is None:
        raise InputError(
            f"workload {name!r}: give SAMPLESxPROMPT+NEW, SAMPLESxPROMPT+MIN..MAX, either with -gSAMPLES_PER_PROMPT, "
            f"or {', '.join(ALIASES)}"
        )
    samples, prompt, least = (int(part) for part in match.groups()[:3])
    most, group = (int(part) if part else usual for part, usual in zip(match.groups()[3:], (least, 1), strict=True))
    if not (samples and prompt and least and group and least <= most and samples % group == 0):
        raise InputError(
            f"workload {name!r}: every number is at least 1, a range goes up, and the samples are a multiple of the "
            "group"
        )
    rng = random.Random(seed)
    limits = tuple(_log_uniform(rng, least, most) for _ in range(samples // group))
    return Workload(name, samples // group, prompt, group, limits)


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    """Many short ones and a few long ones, as answers of a model that reasons have them."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))
