"""Training of a reward model. It reads whole conversations, and scores each with the layer on top of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from posttrain.algorithms.rm import RewardModelTraining
from posttrain.config.runs import RmRunConfig
from posttrain.data.chat import ChatFormat, WholeChatFormat
from posttrain.data.datasets import load_pair_dataset
from posttrain.data.row_dataset import Stream
from posttrain.policy.objectives import BradleyTerry
from posttrain.recipes.recipe import Prepared, Recipe, RunParts, presentation_of
from posttrain.reporting.presentation import Presentation
from posttrain.types import Pair


@dataclass(frozen=True)
class RewardModelRecipe(Recipe):
    config: RmRunConfig
    chat_form: ClassVar[type[ChatFormat]] = WholeChatFormat
    presentation: ClassVar[Presentation] = presentation_of("rm")

    @property
    def unit(self) -> str:
        return "pairs"

    def prepare(self, chat: ChatFormat) -> Prepared:
        rm = self.config.rm

        def build(parts: RunParts, stream: Stream[Pair], held_out: Sequence[Pair]) -> RewardModelTraining:
            objective = BradleyTerry(rm.center_rewards_coefficient, rm.margin_from_rewards)
            size = self.config.policy.train_global_batch_size
            return RewardModelTraining(size, objective, parts.policy, stream, held_out)

        return self._of_answers(chat, load_pair_dataset, rm.val_batches * rm.val_global_batch_size, build)


RECIPE = RewardModelRecipe
