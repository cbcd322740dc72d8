"""The same batch and the same weights through TRL's own trainers: the same loss and the same gradients.

TRL pads and, for DPO, runs prompt and answer twice; we pack and share prompts. TRL's trainers are real ones and their
own `compute_loss` is called; nothing of their formulas is repeated here. Compared is what both define alike, and where
TRL's definition differs (the gradient of the KL term, unless it is bias-corrected) the difference itself is checked.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from float64 import approx, assert_same_gradients, float64
from tiny_models import byte_tokenizer, gradients, packed_logprobs, tiny_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from trl_options import TRL_OPTIONS

from posttrain.config import DpoConfig, LossFnConfig
from posttrain.policy.objectives import ClippedPolicyGradient, PreferenceLoss
from posttrain.roles import Objective
from posttrain.types import TokenBatch

pytest.importorskip("trl", reason="the bench extra is not installed")
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.usefixtures("in_float64", "no_epsilon")

TOKENIZER = byte_tokenizer()
VOCABULARY = len(TOKENIZER)


def policy(family: str = "llama", **options: Any) -> nn.Module:
    return tiny_model(
        family, vocab_size=VOCABULARY, pad_token_id=TOKENIZER.pad_token_id, dtype=torch.float64, **options
    )


def random_batch(lengths: list[int], prompt_of: list[int], prompt_lengths: list[int], seed: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(0, 256, (n,), generator=generator).tolist()

    prompts, responses = [ids(n) for n in prompt_lengths], [ids(n) for n in lengths]
    return TokenBatch.build(prompts, responses, prompt_of, {"mask": torch.ones(sum(lengths))})


def ours(
    objective: Objective, batch: TokenBatch, family: str = "llama", temperature: float = 1.0
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    model = policy(family)
    loss, metrics = objective(packed_logprobs(model, batch, temperature), batch)
    loss.backward()
    return float(loss.detach()), gradients(model), {name: float(value) for name, value in metrics.items()}


def assert_same(ours: tuple[float, dict[str, Tensor]], theirs: tuple[float, dict[str, Tensor]]) -> None:
    assert ours[0] == approx(theirs[0])
    assert_same_gradients(ours[1], theirs[1])


# -- DPO ---------------------------------------------------------------------------------------------------------------

with float64():
    PAIRS = random_batch([5, 9, 1, 7, 6, 6, 3, 8], [0, 0, 1, 1, 2, 2, 3, 3], [7, 3, 12, 1], seed=0)


def dpo_trainer(folder: Path, family: str, **options: Any) -> DPOTrainer:
    args = DPOConfig(output_dir=str(folder), max_length=None, **TRL_OPTIONS, **options)
    data = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    return DPOTrainer(
        model=policy(family, attention="eager"),
        ref_model=policy(family, attention="eager", seed=1),
        args=args,
        train_dataset=data,
        processing_class=byte_tokenizer(),
    )


def trl_dpo(
    folder: Path, batch: TokenBatch, family: str = "llama", **options: Any
) -> tuple[float, dict[str, Tensor], Any]:
    trainer = dpo_trainer(folder, family, **options)
    rows = [response.tolist() for response in batch.responses]
    examples = [
        {"prompt_ids": prompt.tolist(), "chosen_ids": rows[2 * i], "rejected_ids": rows[2 * i + 1]}
        for i, prompt in enumerate(batch.prompts)
    ]
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    loss.backward()
    return float(loss.detach()), gradients(trainer.model), {k: v[-1] for k, v in trainer._metrics["train"].items()}


def with_reference(batch: TokenBatch, family: str = "llama") -> TokenBatch:
    with torch.no_grad():
        return batch.with_columns(reference_logprobs=packed_logprobs(policy(family, seed=1), batch))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("beta", [0.05, 0.4])
def test_dpo_sigmoid(tmp_path: Path, family: str, beta: float) -> None:
    loss, expected, theirs = trl_dpo(tmp_path, PAIRS, family, beta=beta, loss_type="sigmoid")
    batch = with_reference(PAIRS, family)
    actual_loss, actual, metrics = ours(PreferenceLoss(DpoConfig(reference_policy_kl_penalty=beta)), batch, family)
    assert_same((actual_loss, actual), (loss, expected))
    assert metrics["num_ranked_right"] / len(PAIRS.prompts) == approx(theirs["rewards/accuracies"])
    # TRL multiplies its rewards by beta; ours, like NeMo RL's, are the bare log-ratios.
    assert beta * metrics["rewards_chosen_mean"] == approx(theirs["rewards/chosen"])
    assert beta * metrics["rewards_rejected_mean"] == approx(theirs["rewards/rejected"])


def test_dpo_with_a_supervised_term(tmp_path: Path) -> None:
    """TRL averages over all chosen tokens, we within each answer first: the same for equally long answers."""
    pairs = random_batch([5, 9, 5, 2, 5, 6], [0, 0, 1, 1, 2, 2], [4, 8, 2], seed=3)
    loss, expected, _ = trl_dpo(tmp_path, pairs, beta=0.3, loss_type=["sigmoid", "sft"], loss_weights=[0.8, 0.25])
    weights = {"preference_loss_weight": 0.8, "sft_loss_weight": 0.25}
    objective = PreferenceLoss(DpoConfig(reference_policy_kl_penalty=0.3, sft_average_log_probs=True, **weights))
    actual_loss, actual, _ = ours(objective, with_reference(pairs))
    assert_same((actual_loss, actual), (loss, expected))


# -- GRPO --------------------------------------------------------------------------------------------------------------

ADVANTAGES = [1.2, -0.7, 0.3, -1.5, 0.0, 0.9, -0.4, 2.0]
with float64():
    PLAIN = random_batch([5, 9, 1, 7, 4, 6, 3, 8], [0, 0, 0, 0, 1, 1, 2, 2], [6, 2, 11], seed=4)


def grpo_batch(family: str = "llama", temperature: float = 1.0, on_policy: bool = False) -> TokenBatch:
    """Advantages per response; old and reference log-probabilities near the model's own, so that some ratios clip."""
    lengths = torch.tensor(PLAIN.response_lengths)
    with torch.no_grad():
        current = packed_logprobs(policy(family), PLAIN, temperature)
    generator = torch.Generator().manual_seed(9)
    old = current + 0.3 * torch.randn(len(current), generator=generator)
    batch = PLAIN.with_columns(
        advantages=torch.tensor(ADVANTAGES).repeat_interleave(lengths),
        generation_logprobs=old,
        reference_logprobs=current + 0.4 * torch.randn(len(current), generator=generator),
    )
    return batch if on_policy else batch.with_columns(prev_logprobs=old)


def grpo_trainer(folder: Path, family: str = "llama", accumulate: int = 1, **options: Any) -> GRPOTrainer:
    policy(family, attention="eager").save_pretrained(folder / "model")
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate,
        num_generations=4,
        max_completion_length=16,
        model_init_kwargs={"dtype": "auto", "attn_implementation": "eager"},
        **TRL_OPTIONS,
        **options,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=byte_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = accumulate
    trainer.model.train()
    return trainer


def trl_inputs(batch: TokenBatch, rows: range) -> dict[str, Tensor]:
    """What TRL's rollout would hand to its loss: prompts padded on the left, completions on the right."""
    pad = TOKENIZER.pad_token_id

    def padded(values: list[Tensor], fill: float, side: str = "right") -> Tensor:
        return pad_sequence(values, batch_first=True, padding_value=fill, padding_side=side)

    prompts = [batch.prompts[batch.prompt_of[row]] for row in rows]
    completions = [batch.responses[row] for row in rows]
    inputs = {
        "prompt_ids": padded(prompts, pad, "left"),
        "prompt_mask": padded([torch.ones_like(p) for p in prompts], 0, "left"),
        "completion_ids": padded(completions, pad),
        "completion_mask": padded([torch.ones_like(c) for c in completions], 0),
        "advantages": torch.tensor([ADVANTAGES[row] for row in rows]),
        "num_items_in_batch": torch.tensor(batch.num_tokens),
    }
    for theirs, column in (("old_per_token_logps", "prev_logprobs"), ("ref_per_token_logps", "reference_logprobs")):
        if column in batch.columns:
            pieces = batch.column_parts(column)
            inputs[theirs] = padded([pieces[row] for row in rows], 0.0)
    return inputs


def trl_grpo(trainer: GRPOTrainer, batch: TokenBatch) -> tuple[float, dict[str, Tensor]]:
    parts = trainer.current_gradient_accumulation_steps
    total = 0.0
    for start in range(0, 8, 8 // parts):
        loss = trainer.compute_loss(trainer.model, trl_inputs(batch, range(start, start + 8 // parts)))
        loss.backward()
        total += float(loss.detach())
    return total, gradients(trainer.model)


OFF_POLICY = {
    "dapo": ({"loss_type": "dapo"}, {}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dapo, separate clips": (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
        {"ratio_clip_min": 0.1, "ratio_clip_max": 0.28},
    ),
    "dapo, two-sided": ({"loss_type": "dapo", "delta": 1.4}, {"ratio_clip_c": 1.4}),
    "grpo": ({"loss_type": "grpo"}, {"token_level_loss": False}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        {"token_level_loss": False, "sequence_level_importance_ratios": True}
        | {"ratio_clip_min": 0.05, "ratio_clip_max": 0.05},
    ),
    # TRL's CISPO bounds the ratio by epsilon_high itself and has no lower bound.
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.3},
    ),
}


@pytest.mark.parametrize(("theirs", "options"), OFF_POLICY.values(), ids=OFF_POLICY.keys())
def test_grpo_after_the_first_update(tmp_path: Path, theirs: dict[str, Any], options: dict[str, Any]) -> None:
    batch = grpo_batch()
    loss, expected = trl_grpo(grpo_trainer(tmp_path, **theirs, beta=0.0), batch)
    actual_loss, actual, _ = ours(
        ClippedPolicyGradient(LossFnConfig(**{"reference_policy_kl_penalty": 0.0, **options})), batch
    )
    assert_same((actual_loss, actual), (loss, expected))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize(("kind", "token_level"), [("dapo", True), ("grpo", False)])
def test_grpo_on_policy_under_a_temperature(tmp_path: Path, family: str, kind: str, token_level: bool) -> None:
    batch = grpo_batch(family, temperature=0.7, on_policy=True)
    loss, expected = trl_grpo(grpo_trainer(tmp_path, family, loss_type=kind, temperature=0.7, beta=0.0), batch)
    objective = ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.0, token_level_loss=token_level))
    actual_loss, actual, _ = ours(objective, batch, family, temperature=0.7)
    assert_same((actual_loss, actual), (loss, expected))


@pytest.mark.parametrize(("kind", "token_level"), [("dapo", True), ("grpo", False)])
def test_one_batch_equals_gradient_accumulation_of_trl(tmp_path: Path, kind: str, token_level: bool) -> None:
    batch = grpo_batch()
    loss, expected = trl_grpo(grpo_trainer(tmp_path, accumulate=2, loss_type=kind, beta=0.0), batch)
    actual_loss, actual, _ = ours(
        ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.0, token_level_loss=token_level)), batch
    )
    assert_same((actual_loss, actual), (loss, expected))


@pytest.mark.parametrize(("kind", "token_level"), [("dapo", True), ("grpo", False)])
@pytest.mark.parametrize("on_policy", [True, False], ids=["on policy", "off policy"])
def test_kl_with_bias_correction(tmp_path: Path, kind: str, token_level: bool, on_policy: bool) -> None:
    """TRL weights the KL by current / old: on policy our usual factor, off policy our sampler's weight."""
    batch = grpo_batch(on_policy=on_policy)
    trainer = grpo_trainer(tmp_path, loss_type=kind, beta=0.2, use_bias_correction_kl=True)
    loss, expected = trl_grpo(trainer, batch)
    objective = ClippedPolicyGradient(
        LossFnConfig(
            reference_policy_kl_penalty=0.2, token_level_loss=token_level, use_on_policy_kl_approximation=not on_policy
        )
    )
    actual_loss, actual, metrics = ours(objective, batch)
    assert_same((actual_loss, actual), (loss, expected))
    if token_level:
        assert metrics["kl_penalty"] == approx(trainer._metrics["train"]["kl"][-1])


def test_kl_without_bias_correction_differs_by_the_score_function_term_alone(tmp_path: Path) -> None:
    batch = grpo_batch(on_policy=True)
    loss, expected = trl_grpo(grpo_trainer(tmp_path, loss_type="dapo", beta=0.2, use_bias_correction_kl=False), batch)
    actual_loss, actual, _ = ours(ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.2)), batch)
    assert actual_loss == approx(loss)

    model = policy()
    current = packed_logprobs(model, batch)
    log_ratio = (batch.columns["reference_logprobs"] - current).detach()
    k3 = log_ratio.exp() - 1 - log_ratio
    (0.2 * k3 * current).sum().div(batch.num_tokens).backward()
    score_term = gradients(model)
    assert_same_gradients({name: actual[name] - score_term[name] for name in actual}, expected)
