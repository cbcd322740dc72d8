"""The configs of `rm` and `sft`, and the one registration of all kinds of run in the config layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple

from posttrain.config.base import NonNegativeFloat, PositiveInt, Section, setting
from posttrain.config.dpo import DpoRunConfig
from posttrain.config.evaluation import EvalRunConfig
from posttrain.config.grpo_run import GrpoRunConfig
from posttrain.config.run_config import StepSizes, SupervisedConfig, SupervisedRunConfig


class RmConfig(SupervisedConfig):
    max_num_steps: PositiveInt = setting(1_000_000, "Optimizer steps after which the run ends, if not by epochs.")
    val_period: int = setting(16, "Steps between validations; 0 or less turns periodic validation off.")
    val_batches: int = setting(-1, "Batches used by a validation; 0 or less uses the whole set.")
    val_at_start: bool = setting(False, "Validates a fresh run before its first step.")
    center_rewards_coefficient: NonNegativeFloat = setting(
        0.0, "Weight of the squared sum of a pair's scores, which keeps scores around 0; 0 does not compute it."
    )
    margin_from_rewards: bool = setting(
        False, "Asks for a difference of scores larger than that of the pair's chosen_reward and rejected_reward."
    )


class RmRunConfig(SupervisedRunConfig):
    kind: ClassVar[str] = "rm"
    rm: RmConfig = setting(..., "The loss of a reward model, and validation.")

    def step_sizes(self) -> StepSizes:
        return StepSizes(self.policy.train_global_batch_size, 2, 2)

    def scoring_layer_problems(self) -> Iterator[str]:
        if not self.scores_answers:
            yield "policy.reward_model_cfg.enabled = false: `posttrain rm` trains a reward model; leave it true"


class SftConfig(SupervisedConfig):
    only_unmask_final: bool = setting(False, "Trains only the last answer of a conversation, not all answers.")


class SftRunConfig(SupervisedRunConfig):
    kind: ClassVar[str] = "sft"
    sft: SftConfig = setting(..., "Length of the run, and validation.")


Kind = Literal["grpo", "dpo", "rm", "sft", "eval"]
KINDS: tuple[Kind, ...] = ("grpo", "dpo", "rm", "sft")  # those that train
SUPERVISED_KINDS: tuple[Kind, ...] = ("dpo", "rm", "sft")  # those that sample nothing
PAIR_KINDS: tuple[Kind, ...] = ("dpo", "rm")  # those whose rows are pairs of answers
ALL_KINDS: tuple[Kind, ...] = (*KINDS, "eval")

RUN_CONFIGS: dict[Kind, type[Section]] = {
    "grpo": GrpoRunConfig,
    "dpo": DpoRunConfig,
    "rm": RmRunConfig,
    "sft": SftRunConfig,
    "eval": EvalRunConfig,
}


class Variant(NamedTuple):
    """A kind of run under a name of its own, for some settings of it."""

    kind: Kind
    section: str  # NeMo RL's name for the kind's own section
    settings: tuple[str, ...]  # overrides; what is given on the command line comes after them

    def problem(self, config: Section) -> str | None:
        """What else the run needs that the name stands for."""
        assert isinstance(config, GrpoRunConfig)
        name = config.grpo.adv_estimator.name
        if self is VARIANTS["ppo"] and config.critic is None:
            return f"grpo.adv_estimator.name = {name} has no critic: leave it out, or use `posttrain grpo`"
        if self is VARIANTS["distill"] and config.teacher_name is None:
            return "teacher.model_name is not set: name the model to learn from, e.g. teacher=models/large"
        return None


VARIANTS = {
    "ppo": Variant("grpo", "ppo", ("grpo.adv_estimator.name=gae",)),
    "distill": Variant("grpo", "distillation", ()),
}
TRAINING_NAMES = ("grpo", *VARIANTS, "dpo", "rm", "sft")  # that a command takes: kinds that train, and their variants


VARIANT_OF_SECTION = {variant.section: name for name, variant in VARIANTS.items()}


def kind_named(name: str) -> str:
    """The kind of run that a name stands for; of another word, the word."""
    return VARIANTS[name].kind if name in VARIANTS else name
