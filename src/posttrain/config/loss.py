"""`loss_fn`: the clipped policy-gradient loss of GRPO and its variants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import IsSetByUser, NonNegativeFloat, PositiveFloat, PositiveInt, Section, setting


class LossFnConfig(Section):
    reference_policy_kl_penalty: NonNegativeFloat = setting(
        0.01, "Weight of the KL term against the frozen reference (beta); 0 loads no reference at all."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = setting(
        "k3", "Estimator of the KL: k1 is the negative log-ratio, k2 half its square, k3 the low-variance one."
    )
    kl_input_clamp_value: PositiveFloat | None = setting(
        20.0, "Log-ratio to the reference is clamped to plus or minus this (nats); null does not clamp."
    )
    kl_output_clamp_value: PositiveFloat | None = setting(
        10.0, "KL of a token is clamped to plus or minus this (nats); null does not clamp."
    )
    ratio_clip_min: float = setting(
        0.2, "How far below 1 the probability ratio may fall before it is clipped (epsilon low).", ge=0, le=1
    )
    ratio_clip_max: NonNegativeFloat = setting(
        0.2, "How far above 1 the probability ratio may rise before it is clipped (epsilon high)."
    )
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = setting(
        None, "Dual clip: factor above 1 that bounds the loss where the advantage is negative; null is off."
    )
    ratio_ceiling: PositiveFloat | None = setting(
        None, "Bound of the probability ratio itself, whatever the sign of the advantage (TRL's delta)."
    )
    log_ratio_clamp_value: PositiveFloat | None = setting(
        None, "Log-ratio to the old policy is clamped to plus or minus this (nats); null does not clamp."
    )
    kl_importance_weight: Literal["on_policy", "sampler", "previous", "none"] | None = setting(
        None, "What the KL of a token is weighted by; null is on_policy, or follows use_on_policy_kl_approximation."
    )
    use_on_policy_kl_approximation: bool = setting(
        False, "Weights the KL of a token by exp(current - sampler logprob), which makes it exact off-policy."
    )
    use_importance_sampling_correction: bool = setting(
        False, "Multiplies the loss by exp(trainer - sampler logprob) to correct for engines that differ."
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = setting(
        None, "How large corrections are cut: tis clamps, icepop zeroes tokens, seq-mask-tis zeroes sequences."
    )
    truncated_importance_sampling_ratio: PositiveFloat | None = setting(
        None, "Upper bound of the importance correction."
    )
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = setting(
        None, "Lower bound of the importance correction; icepop and seq-mask-tis need it."
    )
    sequence_level_importance_ratios: bool = setting(
        False, "One ratio per answer, the geometric mean over its tokens (GSPO); needs token_level_loss false."
    )
    sequence_ratio_type: Literal["geometric_mean", "product"] = setting(
        "geometric_mean",
        "What the one ratio of an answer is made of: the mean over its tokens (GSPO), or their product (RLOO).",
    )
    token_level_loss: bool = setting(
        True, "Averages over all tokens of the batch; false averages within each answer, then over answers."
    )
    loss_normalizer: Literal["tokens", "sequences", "max_tokens"] | None = setting(
        None, "What the sum is divided by; null follows token_level_loss, and is max_tokens with dr_grpo."
    )
    max_response_tokens: PositiveInt | None = setting(
        None, "Tokens that every answer counts as with the normalizer max_tokens, whatever its length."
    )
    force_on_policy_ratio: bool = setting(
        False, "Takes the ratio as 1 and skips the extra forward pass; needs one optimizer step per RL step."
    )
    use_kl_in_reward: bool = setting(False, "Subtracts the KL from the reward instead of adding it to the loss.")
    use_cispo: bool = setting(False, "CISPO: the clipped ratio is a constant weight on the log-probability.")
    disable_ppo_ratio: bool = setting(False, "REINFORCE: the loss is -advantage * logprob, with no ratio.")
    positive_example_nll_weight: NonNegativeFloat = setting(
        0.0, "Weight of a negative log-likelihood term on tokens of rewarded answers (VAPO)."
    )

    @property
    def normalizer(self) -> str:
        return self.loss_normalizer or ("tokens" if self.token_level_loss else "sequences")

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        yield from self._ratio_problems()
        yield from self._truncation_problems()
        if self.kl_importance_weight is not None and self.use_on_policy_kl_approximation:
            yield (
                f"loss_fn.kl_importance_weight = {self.kl_importance_weight} and "
                "loss_fn.use_on_policy_kl_approximation both say how the KL is weighted: set one of them"
            )
        if self.loss_normalizer == "max_tokens" and self.max_response_tokens is None:
            yield "loss_fn.loss_normalizer = max_tokens needs loss_fn.max_response_tokens, e.g. that of max_new_tokens"
        if self.use_kl_in_reward and self.reference_policy_kl_penalty == 0:
            yield (
                "loss_fn.use_kl_in_reward charges loss_fn.reference_policy_kl_penalty, which is 0: set it above 0, or "
                "use_kl_in_reward=false"
            )

    def _ratio_problems(self) -> Iterator[str]:
        if self.sequence_level_importance_ratios and self.normalizer != "sequences":
            yield (
                "loss_fn.sequence_level_importance_ratios (GSPO) needs loss_fn.token_level_loss = false, because its "
                "ratio belongs to an answer: set loss_fn.token_level_loss=false"
            )
        if self.sequence_ratio_type == "product" and not self.sequence_level_importance_ratios:
            yield (
                "loss_fn.sequence_ratio_type = product is about the ratio of a whole answer: it needs "
                "loss_fn.sequence_level_importance_ratios = true"
            )
        if self.ratio_ceiling is not None and (self.use_cispo or self.disable_ppo_ratio):
            other = "use_cispo" if self.use_cispo else "disable_ppo_ratio"
            yield f"loss_fn.ratio_ceiling bounds the ratio of the clipped loss; loss_fn.{other} has none: unset one"
        if not self.use_cispo:
            return
        for name in ("sequence_level_importance_ratios", "disable_ppo_ratio", "force_on_policy_ratio", "ratio_clip_c"):
            if getattr(self, name) not in (False, None):
                yield f"loss_fn.use_cispo and loss_fn.{name} exclude each other, as CISPO has its own ratio: unset one"
        if self.normalizer == "sequences":
            yield "loss_fn.use_cispo needs loss_fn.token_level_loss = true: CISPO averages over tokens"

    def _truncation_problems(self) -> Iterator[str]:
        kind = self.truncated_importance_sampling_type
        if kind is None:
            return
        prefix = "loss_fn.truncated_importance_sampling"
        field, upper = f"{prefix}_type = {kind}", self.truncated_importance_sampling_ratio
        lower = self.truncated_importance_sampling_ratio_min
        if not self.use_importance_sampling_correction:
            yield f"{field} needs loss_fn.use_importance_sampling_correction = true: else there is nothing to truncate"
        if upper is None:
            yield f"{field} needs {prefix}_ratio, the upper bound, e.g. 2.0"
        if kind in ("icepop", "seq-mask-tis") and lower is None:
            yield f"{field} needs {prefix}_ratio_min, the lower bound, e.g. 0.5"
        if upper is not None and lower is not None and lower >= upper:
            yield f"{prefix}_ratio_min = {lower:g} must be below {prefix}_ratio = {upper:g}"
