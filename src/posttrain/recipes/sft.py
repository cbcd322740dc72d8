"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posttrain.algorithms.sft import Sft
from posttrain.config import SftRunConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import ExampleDataset, load_example_dataset
from posttrain.data.entries import Entries
from posttrain.data.sampler import Stream
from posttrain.recipes.recipe import Prepared, Recipe, RunParts, first_rows, load_both
from posttrain.reporting.presentation import ChartSpec, Headline, Presentation, ShownMetric


@dataclass(frozen=True)
class SftRecipe(Recipe):
    config: SftRunConfig
    presentation: ClassVar[Presentation] = Presentation(
        "sft",
        Headline(
            "train/loss",
            "Loss",
            lower_is_better=True,
            chart=ChartSpec(
                "Loss",
                (("train/loss", "training"), ("validation/loss", "validation")),
                "Mean negative log-likelihood per token.",
            ),
        ),
        (
            ShownMetric("loss", "Loss", "loss"),
            ShownMetric("grad_norm", "Grad Norm", "grad"),
            ShownMetric("lr", "Learning Rate", "lr"),
        ),
    )

    @property
    def unit(self) -> str:
        return "examples"

    def prepare(self, chat: ChatFormat) -> Prepared:
        config, sft = self.config, self.config.sft

        def load(entries: Entries) -> ExampleDataset:
            return load_example_dataset(
                entries,
                config.data.default,
                chat,
                max_total_tokens=config.policy.max_total_sequence_length,
                only_unmask_final=sft.only_unmask_final,
                seed=sft.seed,
            )

        train, validation = load_both(config.data, load)
        stream = Stream(train, sft.seed, config.data.shuffle)

        def algorithm(parts: RunParts) -> Sft:
            held_out = first_rows(validation, sft.val_batches * sft.val_global_batch_size)
            return Sft(config.policy.train_global_batch_size, parts.policy, stream, held_out)

        return Prepared(train, validation, stream, algorithm)


RECIPE = SftRecipe
