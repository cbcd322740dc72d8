"""`loss_fn`: the clipped policy-gradient loss of GRPO and its variants."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section


class LossFnConfig(Section):
    reference_policy_kl_penalty: NonNegativeFloat = Field(
        default=0.01,
        description="Weight of the KL term against the frozen reference (beta); 0 loads no reference at all.",
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="Estimator of the KL: k1 is the negative log-ratio, k2 half its square, k3 the low-variance one.",
    )
    kl_input_clamp_value: PositiveFloat | None = Field(
        default=20.0,
        description="Log-ratio to the reference is clamped to plus or minus this (nats); null does not clamp.",
    )
    kl_output_clamp_value: PositiveFloat | None = Field(
        default=10.0, description="KL of a token is clamped to plus or minus this (nats); null does not clamp."
    )
    ratio_clip_min: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.2, description="How far below 1 the probability ratio may fall before it is clipped (epsilon low)."
    )
    ratio_clip_max: NonNegativeFloat = Field(
        default=0.2, description="How far above 1 the probability ratio may rise before it is clipped (epsilon high)."
    )
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="Dual clip: factor above 1 that bounds the loss where the advantage is negative; null is off.",
    )
    ratio_ceiling: PositiveFloat | None = Field(
        default=None,
        description="Bound of the probability ratio itself, whatever the sign of the advantage (TRL's delta).",
    )
    log_ratio_clamp_value: PositiveFloat | None = Field(
        default=None,
        description="Log-ratio to the old policy is clamped to plus or minus this (nats); null does not clamp.",
    )
    kl_importance_weight: Literal["on_policy", "sampler", "previous", "none"] | None = Field(
        default=None,
        description="What the KL of a token is weighted by; null is on_policy, or follows use_on_policy_kl_approximation.",
    )
    use_on_policy_kl_approximation: bool = Field(
        default=False,
        description="Weights the KL of a token by exp(current - sampler logprob), which makes it exact off-policy.",
    )
    use_importance_sampling_correction: bool = Field(
        default=False,
        description="Multiplies the loss by exp(trainer - sampler logprob) to correct for engines that differ.",
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        default=None,
        description="How large corrections are cut: tis clamps, icepop zeroes tokens, seq-mask-tis zeroes sequences.",
    )
    truncated_importance_sampling_ratio: PositiveFloat | None = Field(
        default=None, description="Upper bound of the importance correction."
    )
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = Field(
        default=None, description="Lower bound of the importance correction; icepop and seq-mask-tis need it."
    )
    sequence_level_importance_ratios: bool = Field(
        default=False,
        description="One ratio per answer, the geometric mean over its tokens (GSPO); needs token_level_loss false.",
    )
    sequence_ratio_type: Literal["geometric_mean", "product"] = Field(
        default="geometric_mean",
        description="What the one ratio of an answer is made of: the mean over its tokens (GSPO), or their product (RLOO).",
    )
    token_level_loss: bool = Field(
        default=True,
        description="Averages over all tokens of the batch; false averages within each answer, then over answers.",
    )
    loss_normalizer: Literal["tokens", "sequences", "max_tokens"] | None = Field(
        default=None,
        description="What the sum is divided by; null follows token_level_loss, and is max_tokens with dr_grpo.",
    )
    max_response_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens that every answer counts as with the normalizer max_tokens, whatever its length.",
    )
    force_on_policy_ratio: bool = Field(
        default=False,
        description="Takes the ratio as 1 and skips the extra forward pass; needs one optimizer step per RL step.",
    )
    use_kl_in_reward: bool = Field(
        default=False, description="Subtracts the KL from the reward instead of adding it to the loss."
    )
    use_cispo: bool = Field(
        default=False, description="CISPO: the clipped ratio is a constant weight on the log-probability."
    )
    disable_ppo_ratio: bool = Field(
        default=False, description="REINFORCE: the loss is -advantage * logprob, with no ratio."
    )
    positive_example_nll_weight: NonNegativeFloat = Field(
        default=0.0, description="Weight of a negative log-likelihood term on tokens of rewarded answers (VAPO)."
    )
