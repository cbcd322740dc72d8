"""A reward function of one's own. Use it for every row of a run:

posttrain grpo --config grpo.yaml reward=rewards.py:right_and_brief

The file is imported once in each worker process, so what is expensive to make (a client, a word list, a model) belongs
at the top. docs/rewards.md says which arguments a function may ask for, what it may return, and what happens when it
fails.
"""

import re

MAX_WORDS = 100
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right_and_brief(prompt: str, response: str, reference_answer: str) -> dict[str, float]:
    """At most 1: mostly for the right number, a little for not talking too long.

    `prompt` is what the model saw, `response` what it wrote, `reference_answer` the row's `output`. A function asks for
    what it needs by name; this one could leave `prompt` out.
    """
    # The named parts add up to the reward, and each is recorded: metrics.jsonl has their means (train/reward/right, …),
    # rollouts/step_N.jsonl.gz the parts of every answer. A plain number would do as well.
    return {
        "right": 0.9 if last_number(response) == as_number(reference_answer) else 0.0,
        "brief": 0.1 if len(response.split()) <= MAX_WORDS else 0.0,
    }


def last_number(text: str) -> float | None:
    """The last number in the text: where models tend to put their result."""
    found = NUMBER.findall(text)
    return as_number(found[-1]) if found else None


def as_number(text: str) -> float:
    # A reference that is no number raises ValueError here. That is as it should be: the answer is then *unscored*,
    # counted and shown, which is not the same as wrong.
    return float(text.replace(",", ""))
