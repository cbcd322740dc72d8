"""What each preference loss needs and reads, and the settings that do not go together. No torch: the formulas are in
`policy/objectives/preference_forms.py` and `kto.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from posttrain.config.dpo import DpoRunConfig

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

# The settings that only some losses read, and their defaults: another value would be set in vain.
_OPTIONAL: dict[str, float] = {
    _BETA: 0.05,
    _AVERAGE: False,
    "gt_reward_scale": 1.0,
    "label_smoothing": 0.0,
    "simpo_gamma": 0.5,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}


def check_preference_loss(config: DpoRunConfig) -> Iterator[str]:
    """What of `dpo` contradicts itself."""
    dpo = config.dpo
    name, traits = dpo.preference_loss, LOSSES[dpo.preference_loss]
    if dpo.preference_loss_weight == 0 and dpo.sft_loss_weight == 0:
        yield "dpo.preference_loss_weight and dpo.sft_loss_weight are both 0, so there is no loss: set one of them above 0"
    for setting, usual in _OPTIONAL.items():
        value = getattr(dpo, setting)
        holds_anyway = setting == _AVERAGE and value == traits.always_averages
        if setting not in traits.reads and value != usual and not holds_anyway:
            yield _set_in_vain(setting, value, name)
    if name in ("cdpo", "robust") and dpo.label_smoothing == 0:
        yield (
            f"dpo.preference_loss = {name} with dpo.label_smoothing = 0 is plain dpo: set dpo.label_smoothing to the share "
            "of pairs that you believe to be labelled the wrong way round, e.g. 0.1, or dpo.preference_loss=dpo"
        )
    if name == "orpo" and dpo.sft_loss_weight == 0:
        yield (
            "dpo.preference_loss = orpo is a term beside the likelihood of the chosen answers, which dpo.sft_loss_weight = 0 "
            "leaves out: set dpo.sft_loss_weight=1 and dpo.preference_loss_weight to ORPO's lambda, e.g. 0.1"
        )
    # The second follows preference_average_log_probs unless it is set, and only a setting can contradict the first.
    if dpo.sft_token_level_loss and dpo.sft_average_log_probs and not dpo.preference_average_log_probs:
        yield (
            "dpo.sft_token_level_loss averages over all chosen tokens of the batch and dpo.sft_average_log_probs within each "
            "answer first: set one of them to false"
        )
    if name == "kto" and config.policy.train_global_batch_size < 2:
        yield (
            "dpo.preference_loss = kto compares answers with those to other prompts of the batch: set "
            "policy.train_global_batch_size to 2 or more"
        )


def _set_in_vain(setting: str, value: float, name: PreferenceLossName) -> str:
    if setting == _AVERAGE:
        return f"dpo.{_AVERAGE} = true: the reward of {name} is a sum over tokens by definition; remove the setting"
    if setting == _BETA and name == "orpo":
        return (
            f"dpo.{_BETA} = {value:g} is not read by orpo, whose lambda is dpo.preference_loss_weight; "
            f"remove it (on the command line: '~dpo.{_BETA}')"
        )
    readers = ", ".join(other for other, traits in LOSSES.items() if setting in traits.reads)
    return f"dpo.{setting} = {value:g} is read by {readers} only, and dpo.preference_loss is {name}: change one of them"


def ambiguous_loss(config: DpoRunConfig, is_set: Callable[[str], bool]) -> Iterator[str]:
    """Names that mean different things elsewhere, where the config does not say which is meant."""
    if config.dpo.preference_loss == "ipo" and not is_set(f"dpo.{_AVERAGE}"):
        yield (
            "dpo.preference_loss: ipo sums log-probabilities over the tokens of an answer, as in NeMo-Aligner and OpenRLHF; "
            f"TRL averages them (dpo.{_AVERAGE}=true). Set that key to say which you mean"
        )
