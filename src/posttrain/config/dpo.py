"""`dpo`: the preference loss, what each loss needs and reads, and validation; and the whole config of such a run.

The formulas are in `policy/objectives/preference_forms.py` and `kto.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from posttrain.config.base import (
    IsSetByUser,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    setting,
)
from posttrain.config.run_config import StepSizes, SupervisedConfig, SupervisedRunConfig

PreferenceLossName = Literal[
    "dpo", "cdpo", "robust", "hinge", "ipo", "rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl", "simpo", "orpo", "kto"
]


@dataclass(frozen=True)
class LossTraits:
    reads: tuple[str, ...] = ()  # of the settings that not every loss reads
    needs_reference: bool = True  # False: no frozen copy of the model is made
    always_averages: bool = False  # rewards are means over tokens by definition, whatever the settings say
    is_paired: bool = True  # False: rows are single answers, each called good or bad


_BETA = "reference_policy_kl_penalty"
_AVERAGE = "preference_average_log_probs"
_RPO = LossTraits((_BETA, _AVERAGE, "gt_reward_scale"))

LOSSES: dict[PreferenceLossName, LossTraits] = {
    "dpo": LossTraits((_BETA, _AVERAGE)),
    "cdpo": LossTraits((_BETA, _AVERAGE, "label_smoothing")),
    "robust": LossTraits((_BETA, _AVERAGE, "label_smoothing")),
    "hinge": LossTraits((_BETA, _AVERAGE)),
    "ipo": LossTraits((_BETA, _AVERAGE)),
    "rpo_sq": _RPO,
    "rpo_bwd_kl": _RPO,
    "rpo_fwd_kl": _RPO,
    "simpo": LossTraits((_BETA, "label_smoothing", "simpo_gamma"), needs_reference=False, always_averages=True),
    "orpo": LossTraits((), needs_reference=False, always_averages=True),
    "kto": LossTraits((_BETA, "desirable_weight", "undesirable_weight"), is_paired=False),
}
assert set(LOSSES) == set(get_args(PreferenceLossName))
OPTIONAL = list(dict.fromkeys(setting for traits in LOSSES.values() for setting in traits.reads))


class DpoConfig(SupervisedConfig):
    max_num_steps: PositiveInt = setting(150, "Optimizer steps after which the run ends.")
    val_period: int = setting(25, "Steps between validations; 0 or less turns periodic validation off.")
    val_global_batch_size: PositiveInt = setting(8, "Rows in one validation batch.")
    preference_loss: PreferenceLossName = setting(
        "dpo", "The loss on preferences; kto learns from single answers, all others from pairs."
    )
    reference_policy_kl_penalty: float = setting(
        0.05, "Scale of the implicit reward (beta): larger keeps the policy closer to the reference.", gt=0
    )
    preference_average_log_probs: bool = setting(False, "Implicit reward is the mean over tokens instead of the sum.")
    gt_reward_scale: PositiveFloat = setting(1.0, "rpo_*: factor on the margin chosen_reward - rejected_reward.")
    label_smoothing: float = setting(
        0.0, "cdpo, robust, simpo: share of pairs assumed to be labelled the wrong way round.", ge=0, lt=0.5
    )
    simpo_gamma: NonNegativeFloat = setting(0.5, "simpo: margin by which beta times the chosen reward should lead.")
    desirable_weight: NonNegativeFloat = setting(1.0, "kto: factor on the loss of desirable answers.")
    undesirable_weight: NonNegativeFloat = setting(1.0, "kto: factor on the loss of undesirable answers.")
    sft_average_log_probs: bool = setting(False, "SFT term averages over the tokens of each chosen answer.")
    sft_token_level_loss: bool = setting(
        False, "SFT term is a mean over all chosen tokens of the batch instead of over answers."
    )
    preference_loss_weight: NonNegativeFloat = setting(1.0, "Weight of the preference loss.")
    sft_loss_weight: NonNegativeFloat = setting(
        0.0, "Weight of the negative log-likelihood of the chosen answers; 0 does not compute it."
    )
    reference_cache_gib: NonNegativeFloat = setting(
        4.0, "GiB of reference log-probabilities kept in memory and beside the checkpoints; 0 scores every time."
    )

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        name, traits = self.preference_loss, LOSSES[self.preference_loss]
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            yield "dpo.preference_loss_weight and dpo.sft_loss_weight are both 0, so there is no loss: set one above 0"
        for key in OPTIONAL:
            value, usual = getattr(self, key), type(self).model_fields[key].default
            holds_anyway = key == _AVERAGE and value == traits.always_averages
            if key not in traits.reads and value != usual and not holds_anyway:
                yield self._set_in_vain(key, value)
        if name in ("cdpo", "robust") and self.label_smoothing == 0:
            yield (
                f"dpo.preference_loss = {name} with dpo.label_smoothing = 0 is plain dpo: set dpo.label_smoothing to "
                "the share of pairs that you believe to be labelled the wrong way round, e.g. 0.1, or "
                "dpo.preference_loss=dpo"
            )
        if name == "orpo" and self.sft_loss_weight == 0:
            yield (
                "dpo.preference_loss = orpo is a term beside the likelihood of the chosen answers, which "
                "dpo.sft_loss_weight = 0 leaves out: set dpo.sft_loss_weight=1 and dpo.preference_loss_weight to "
                "ORPO's lambda, e.g. 0.1"
            )
        # The second follows preference_average_log_probs unless it is set, and only a setting can contradict the first.
        if self.sft_token_level_loss and self.sft_average_log_probs and not self.preference_average_log_probs:
            yield (
                "dpo.sft_token_level_loss averages over all chosen tokens of the batch and dpo.sft_average_log_probs "
                "within each answer first: set one of them to false"
            )

    def _set_in_vain(self, key: str, value: float) -> str:
        name = self.preference_loss
        if key == _AVERAGE:
            return f"dpo.{_AVERAGE} = true: the reward of {name} is a sum over tokens by definition; remove the setting"
        if key == _BETA and name == "orpo":
            return (
                f"dpo.{_BETA} = {value:g} is not read by orpo, whose lambda is dpo.preference_loss_weight; "
                f"remove it (on the command line: '~dpo.{_BETA}')"
            )
        readers = ", ".join(other for other, traits in LOSSES.items() if key in traits.reads)
        return f"dpo.{key} = {value:g} is read by {readers} only, and dpo.preference_loss is {name}: change one"

    def cautions(self, is_set: IsSetByUser) -> Iterator[str]:
        if self.preference_loss == "ipo" and not is_set(f"dpo.{_AVERAGE}"):
            yield (
                "dpo.preference_loss: ipo sums log-probabilities over the tokens of an answer, as in NeMo-Aligner and "
                f"OpenRLHF; TRL averages them (dpo.{_AVERAGE}=true). Set that key to say which you mean"
            )


class DpoRunConfig(SupervisedRunConfig):
    kind: ClassVar[str] = "dpo"
    dpo: DpoConfig = setting(..., "The preference loss, and validation.")

    @property
    def loss_traits(self) -> LossTraits:
        return LOSSES[self.dpo.preference_loss]

    @property
    def needs_reference(self) -> bool:
        return self.loss_traits.needs_reference

    def step_sizes(self) -> StepSizes:
        rows, needs_reference = self.policy.train_global_batch_size, self.needs_reference
        if self.loss_traits.is_paired:
            return StepSizes(rows, 2, 2, num_scorings=int(needs_reference), caches_reference=True)
        # Answers beside other prompts as well, under the reference and under the policy.
        return StepSizes(rows, num_scorings=int(needs_reference) + 2, caches_reference=True)

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        yield from super().problems(is_set)
        if self.dpo.preference_loss == "kto" and self.policy.train_global_batch_size < 2:
            yield "policy.train_global_batch_size must be 2 or more with kto, which compares with other prompts"
