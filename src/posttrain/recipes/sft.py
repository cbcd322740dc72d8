"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posttrain.algorithms.answers import Sft
from posttrain.config import SftRunConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import load_example_dataset
from posttrain.policy.objectives import NegativeLogLikelihood
from posttrain.recipes.recipe import Prepared, Recipe, presentation_of
from posttrain.reporting.presentation import Presentation


@dataclass(frozen=True)
class SftRecipe(Recipe):
    config: SftRunConfig
    presentation: ClassVar[Presentation] = presentation_of("sft")

    def prepare(self, chat: ChatFormat) -> Prepared:
        sft, size = self.config.sft, self.config.policy.train_global_batch_size
        num_held_out, how = sft.val_batches * sft.val_global_batch_size, {"only_unmask_final": sft.only_unmask_final}
        return self._of_answers(
            "examples",
            chat,
            load_example_dataset,
            num_held_out,
            lambda parts, *rows: Sft(size, NegativeLogLikelihood(), parts.policy, *rows),
            **how,
        )


RECIPE = SftRecipe
