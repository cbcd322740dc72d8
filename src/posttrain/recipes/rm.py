"""Training of a reward model. It reads whole conversations, and scores each with the layer on top of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posttrain.algorithms.answers import RewardModelTraining
from posttrain.config.runs import RmRunConfig
from posttrain.data.chat import ChatFormat, WholeChatFormat
from posttrain.data.datasets import load_pair_dataset
from posttrain.policy.objectives import BradleyTerry
from posttrain.recipes.recipe import Prepared, Recipe, presentation_of
from posttrain.reporting.presentation import Presentation


@dataclass(frozen=True)
class RewardModelRecipe(Recipe):
    config: RmRunConfig
    chat_form: ClassVar[type[ChatFormat]] = WholeChatFormat
    presentation: ClassVar[Presentation] = presentation_of("rm")

    def prepare(self, chat: ChatFormat) -> Prepared:
        rm, size = self.config.rm, self.config.policy.train_global_batch_size
        objective = BradleyTerry(rm.center_rewards_coefficient, rm.margin_from_rewards)
        return self._of_answers(
            "pairs",
            chat,
            load_pair_dataset,
            rm.val_batches * rm.val_global_batch_size,
            lambda parts, *rows: RewardModelTraining(size, objective, parts.policy, *rows),
        )


RECIPE = RewardModelRecipe
