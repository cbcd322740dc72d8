"""`preset=trl-*` against TRL itself: its trainers sample, score, give advantages and compute the loss; so do we.

TRL samples eight answers from a small model and scores them with fixed rewards. The very same answers go through what
`preset=NAME` builds here. Compared are the advantages, and the loss and gradients of an update, on policy and after an
update in between (old log-probabilities that differ from the current ones).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import TOLERANCE, approx, assert_same_gradients
from tiny_models import byte_tokenizer, gradients, packed_logprobs, tiny_model
from torch import Tensor, nn
from trl_options import TRL_OPTIONS

from posttrain.algorithms.batches import rollout_batch, scored_places
from posttrain.config import load_config
from posttrain.recipes.grpo import build_credit, build_objective
from posttrain.types import Completion, Group, Rollout, Score, Task, TokenBatch

pytest.importorskip("trl", reason="the bench extra is not installed")
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

pytestmark = pytest.mark.usefixtures("in_float64", "no_epsilon")

TOKENIZER = byte_tokenizer()
REWARDS = [1.0, 0.0, 0.25, 0.0, 0.1, 0.7, 0.7, 0.3]
PROMPTS = ["one", "another one"]
MAX_TOKENS = 7
COMMON: dict[str, Any] = {
    **TRL_OPTIONS,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": MAX_TOKENS,
    "model_init_kwargs": {"dtype": "auto", "attn_implementation": "eager"},
}


def model(**options: Any) -> nn.Module:
    return tiny_model(vocab_size=len(TOKENIZER), pad_token_id=TOKENIZER.pad_token_id, dtype=torch.float64, **options)


@dataclass
class Theirs:
    trainer: Any
    step: dict[str, Tensor]  # what TRL's rollout hands to its loss

    def loss(self) -> tuple[float, dict[str, Tensor]]:
        self.trainer.model.zero_grad()
        loss = self.trainer.compute_loss(self.trainer.model, self.step)
        loss.backward()
        return float(loss.detach()), gradients(self.trainer.model)


def trl_step(folder: Path, kind: str, options: dict[str, Any]) -> Theirs:
    model(attention="eager").save_pretrained(folder / "model")
    trainers = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
    if kind == "gmpo":
        gmpo = pytest.importorskip("trl.experimental.gmpo", reason="not in this version of TRL")
        trainers["gmpo"] = gmpo.GMPOTrainer, gmpo.GMPOConfig
    trainer_class, config_class = trainers[kind]
    trainer = trainer_class(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: REWARDS,
        args=config_class(output_dir=str(folder / "out"), **COMMON, **options),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=byte_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    if trainer.beta != 0:
        trainer.ref_model.load_state_dict(model(attention="eager", seed=1).state_dict())
    trainer.model.train()
    torch.manual_seed(0)
    inputs = [{"prompt": prompt} for prompt in PROMPTS for _ in range(4)]
    return Theirs(trainer, trainer._generate_and_score_completions(inputs))


def groups_of(step: dict[str, Tensor]) -> list[Group]:
    groups = []
    for g in range(2):
        rows = range(4 * g, 4 * g + 4)
        prompt = step["prompt_ids"][4 * g][step["prompt_mask"][4 * g] == 1]
        answers = [step["completion_ids"][i][step["completion_mask"][i] == 1].tolist() for i in rows]
        rollouts = [
            Rollout(Completion(tuple(ids), (0.0,) * len(ids), "", "stop"), Score(REWARDS[i]))
            for i, ids in zip(rows, answers, strict=True)
        ]
        groups.append(Group(Task(g, f"s:{g}", PROMPTS[g], tuple(prompt.tolist())), tuple(rollouts)))
    return groups


def padded(values: Tensor, batch: TokenBatch, like: Tensor) -> Tensor:
    """A column of ours as TRL holds it: one row per answer."""
    wide = torch.zeros(like.shape)
    for row, part in zip(wide, values.split(batch.response_lengths), strict=True):
        row[: len(part)] = part
    return wide


GRPO = {
    "trl-grpo": {"loss_type": "grpo"},
    "trl-dapo": {"loss_type": "dapo"},
    "trl-bnpo": {"loss_type": "bnpo"},
    "trl-dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "trl-gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "trl-cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "trl-sapo": {"loss_type": "sapo"},
    "trl-gmpo": {},
}


def assert_same(actual: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert actual[0] == approx(expected[0])
    assert_same_gradients(actual[1], expected[1])


def ours(config: Any, theirs: Theirs, **columns: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of an update, with the columns that TRL was given."""
    groups = groups_of(theirs.step)
    batch = rollout_batch(groups).with_columns(**columns)
    told, batch, _ = build_credit(config)(groups, batch, scored_places(groups))
    advantages = [rollout.advantage for group in told for rollout in group.rollouts]
    assert advantages == approx(theirs.step["advantages"].tolist())
    policy = model()
    loss, _ = build_objective(config)(packed_logprobs(policy, batch), batch)
    loss.backward()
    return float(loss.detach()), gradients(policy)


@pytest.mark.parametrize("name", GRPO)
def test_grpo_presets(tmp_path: Path, name: str) -> None:
    sizes = [f"preset={name}", f"policy.generation.max_new_tokens={MAX_TOKENS}"]
    theirs = trl_step(tmp_path, "gmpo" if name == "trl-gmpo" else "grpo", {**GRPO[name], "beta": 0.3})
    batch = rollout_batch(groups_of(theirs.step))
    reference = padded_back(theirs.step["ref_per_token_logps"], batch)
    with torch.no_grad():
        now = packed_logprobs(model(), batch)
        torch.testing.assert_close(reference, packed_logprobs(model(seed=1), batch), rtol=TOLERANCE, atol=TOLERANCE)
    priced = load_config("grpo", None, [*sizes, "loss_fn.reference_policy_kl_penalty=0.3"]).config
    assert_same(ours(priced, theirs, reference_logprobs=reference), theirs.loss())

    # After an update in between, and with TRL's own price of the KL, which is none.
    old = now + 0.3 * torch.randn(len(now), generator=torch.Generator().manual_seed(1))
    theirs.step["old_per_token_logps"] = padded(old, batch, theirs.step["completion_ids"])
    assert_same(ours(priced, theirs, reference_logprobs=reference, prev_logprobs=old), theirs.loss())
    theirs.trainer.beta = 0.0
    assert_same(ours(load_config("grpo", None, sizes).config, theirs, prev_logprobs=old), theirs.loss())


def padded_back(wide: Tensor, batch: TokenBatch) -> Tensor:
    return torch.cat([row[:n] for row, n in zip(wide, batch.response_lengths, strict=True)])


@pytest.mark.parametrize("normalised", [False, True], ids=["as is", "normalised"])
def test_rloo_preset(tmp_path: Path, normalised: bool) -> None:
    overrides = ["preset=trl-rloo"]
    if normalised:
        overrides += ["grpo.adv_estimator.whiten_advantages=rollouts", "grpo.adv_estimator.std_epsilon=1e-4"]
    config = load_config("grpo", None, overrides).config
    theirs = trl_step(tmp_path, "rloo", {"normalize_advantages": normalised})
    batch = rollout_batch(groups_of(theirs.step))
    with torch.no_grad():
        now, reference = packed_logprobs(model(), batch), packed_logprobs(model(seed=1), batch)
    columns = {"current_logprobs": now, "reference_logprobs": reference}
    assert_same(ours(config, theirs, **columns), theirs.loss())

    old = now + 0.05 * torch.randn(len(now), generator=torch.Generator().manual_seed(1))
    theirs.step["old_logps"] = torch.stack([part.sum() for part in old.split(batch.response_lengths)])
    assert_same(ours(config, theirs, **columns, prev_logprobs=old), theirs.loss())
