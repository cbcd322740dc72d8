"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from posttrain.algorithms.sft import Sft
from posttrain.config import SftRunConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import load_example_dataset
from posttrain.data.row_dataset import Stream
from posttrain.recipes.recipe import Prepared, Recipe, RunParts, presentation_of
from posttrain.reporting.presentation import Presentation
from posttrain.types import Example


@dataclass(frozen=True)
class SftRecipe(Recipe):
    config: SftRunConfig
    presentation: ClassVar[Presentation] = presentation_of("sft")

    @property
    def unit(self) -> str:
        return "examples"

    def prepare(self, chat: ChatFormat) -> Prepared:
        sft = self.config.sft

        def build(parts: RunParts, stream: Stream[Example], held_out: Sequence[Example]) -> Sft:
            return Sft(self.config.policy.train_global_batch_size, parts.policy, stream, held_out)

        num_held_out, last_only = sft.val_batches * sft.val_global_batch_size, sft.only_unmask_final
        return self._of_answers(chat, load_example_dataset, num_held_out, build, only_unmask_final=last_only)


RECIPE = SftRecipe
