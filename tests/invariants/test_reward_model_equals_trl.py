"""The same pairs and the same weights through TRL's RewardTrainer: the same loss and the same gradients.

TRL pads and runs each prompt twice; we pack and share it. The trainer is a real one and its own `compute_loss` is
called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import approx, assert_same_gradients, float64
from tiny_models import byte_tokenizer, gradients
from tiny_reward_models import PAD, random_pairs, score_tokens, tiny_reward_model
from torch import Tensor

from posttrain.data.packing import MicroBatching, plan_micro_batches
from posttrain.policy.objectives import BradleyTerry
from posttrain.policy.objectives.reduce import combine_metrics
from posttrain.types import TokenBatch

pytest.importorskip("trl", reason="the bench extra is not installed")
from datasets import Dataset
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

pytestmark = pytest.mark.usefixtures("in_float64")
with float64():
    PAIRS = random_pairs([5, 9, 1, 7, 4, 6, 3, 8], [7, 3, 12, 1])
MARGINS = [0.5, 0.0, 2.0, -0.25]


def with_margins(batch: TokenBatch) -> TokenBatch:
    lengths = torch.tensor(batch.response_lengths)
    rewards = torch.tensor([reward for margin in MARGINS for reward in (margin + 1.0, 1.0)])
    return batch.with_columns(given_rewards=rewards.repeat_interleave(lengths))


def trl(folder: Path, family: str, margins: bool, **options: Any) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    args = RewardConfig(
        output_dir=str(folder),
        max_length=None,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = RewardTrainer(
        model=tiny_reward_model(family, attention="eager"),
        args=args,
        train_dataset=Dataset.from_list([{"chosen": "b", "rejected": "c"}]),
        processing_class=byte_tokenizer(),
    )
    trainer.model.config.pad_token_id = PAD  # the trainer has put the tokenizer's there
    rows = [PAIRS.prompts[p].tolist() + r.tolist() for p, r in zip(PAIRS.prompt_of, PAIRS.responses, strict=True)]
    examples = [
        {"chosen_ids": rows[2 * i], "rejected_ids": rows[2 * i + 1], **({"margin": MARGINS[i]} if margins else {})}
        for i in range(len(PAIRS.prompts))
    ]
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, DataCollatorForPreference(PAD)(examples))
    loss.backward()
    return float(loss.detach()), gradients(trainer.model), {k: v[-1] for k, v in trainer._metrics["train"].items()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize(("coefficient", "margins"), [(None, False), (0.05, False), (0.05, True)])
def test_reward_model_loss_and_gradients_equal_trl(
    tmp_path: Path, family: str, coefficient: float | None, margins: bool
) -> None:
    loss, expected, theirs = trl(tmp_path, family, margins, center_rewards_coefficient=coefficient)
    batch = with_margins(PAIRS) if margins else PAIRS
    model = tiny_reward_model(family)
    actual, metrics = BradleyTerry(coefficient or 0.0, margins)(score_tokens(model, batch), batch)
    actual.backward()
    assert float(actual.detach()) == approx(loss)
    assert_same_gradients(gradients(model), expected)
    assert float(metrics["num_ranked_right"]) / (len(batch.responses) / 2) == approx(theirs["accuracy"])
    assert float(metrics["rewards_margin_mean"]) == approx(theirs["margin"])
    assert float(metrics["rewards_min"]) == approx(theirs["min_reward"])
    assert float(metrics["rewards_max"]) == approx(theirs["max_reward"])


@pytest.mark.parametrize(
    ("batching", "ranks"),
    [
        (MicroBatching(num_responses=2), 1),
        (MicroBatching(num_responses=6), 1),
        (MicroBatching(max_tokens=30), 1),
        (MicroBatching(max_tokens=45, algorithm="first_fit_shuffle"), 1),
        (MicroBatching(num_responses=2), 3),
    ],
    ids=str,
)
def test_reward_model_loss_is_independent_of_micro_batching(batching: MicroBatching, ranks: int) -> None:
    batch, objective = with_margins(PAIRS), BradleyTerry(0.05, margin_from_rewards=True)
    whole = tiny_reward_model()
    loss, metrics = objective(score_tokens(whole, batch), batch)
    loss.backward()

    plan = plan_micro_batches(batch, batching, ranks, keep_groups_whole=objective.keeps_groups_whole)
    parts = [batch.select(rows) for rank in plan for rows in rank if rows]
    assert len(parts) > 1
    pieces = tiny_reward_model()
    measured = []
    for part in parts:
        share, numbers = objective(score_tokens(pieces, part), part)
        share.backward()
        measured.append({name: float(value) for name, value in numbers.items()})
    combined = combine_metrics(measured)
    assert combined.keys() == metrics.keys()
    for name, value in metrics.items():
        assert combined[name] == approx(float(value)), name
    assert_same_gradients(gradients(pieces), gradients(whole))
