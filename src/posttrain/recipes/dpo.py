"""Preference optimisation: on pairs, or, with a loss such as kto, on single answers that are labelled good or bad."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from posttrain.algorithms.dpo import Dpo
from posttrain.algorithms.kto import Kto
from posttrain.config import DpoRunConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import load_judged_dataset, load_pair_dataset
from posttrain.data.sampler import Stream
from posttrain.policy.objectives import KtoLoss, PreferenceLoss
from posttrain.policy.reference_cache import CachedReference
from posttrain.recipes.recipe import (
    PAIR_RESULTS,
    Prepared,
    Recipe,
    RunParts,
    first_rows,
    load_both,
    pair_accuracy,
)
from posttrain.reporting.presentation import Presentation, ShownMetric


@dataclass(frozen=True)
class DpoRecipe(Recipe):
    config: DpoRunConfig
    presentation: ClassVar[Presentation] = Presentation(
        "dpo",
        pair_accuracy("Share of pairs whose chosen answer has the higher implicit reward."),
        (
            ShownMetric("loss", "Loss", "loss"),
            ShownMetric("preference_loss", "Preference Loss"),
            ShownMetric("sft_loss", "SFT Loss"),
            *PAIR_RESULTS,
            ShownMetric("grad_norm", "Grad Norm", "grad"),
            ShownMetric("lr", "Learning Rate"),
        ),
    )

    @property
    def unit(self) -> str:
        return "pairs" if self.config.loss_traits.is_paired else "answers"

    def prepare(self, chat: ChatFormat) -> Prepared:
        return self._on_pairs(chat) if self.config.loss_traits.is_paired else self._on_single_answers(chat)

    def _on_pairs(self, chat: ChatFormat) -> Prepared:
        config, dpo = self.config, self.config.dpo
        length = config.policy.max_total_sequence_length
        load = partial(
            load_pair_dataset, defaults=config.data.default, chat=chat, max_total_tokens=length, seed=dpo.seed
        )
        train, validation = load_both(config.data, load)
        stream = Stream(train, dpo.seed, config.data.shuffle)

        def algorithm(parts: RunParts) -> Dpo:
            objective = PreferenceLoss(dpo)
            return Dpo(
                config.policy.train_global_batch_size,
                objective,
                parts.policy,
                stream,
                first_rows(validation, self._num_held_out),
                self._reference(parts) if objective.needs_reference else None,
            )

        return Prepared(train, validation, stream, algorithm)

    def _on_single_answers(self, chat: ChatFormat) -> Prepared:
        config, dpo = self.config, self.config.dpo
        length = config.policy.max_total_sequence_length
        load = partial(
            load_judged_dataset, defaults=config.data.default, chat=chat, max_total_tokens=length, seed=dpo.seed
        )
        train, validation = load_both(config.data, load)
        stream = Stream(train, dpo.seed, config.data.shuffle)

        def algorithm(parts: RunParts) -> Kto:
            return Kto(
                config.policy.train_global_batch_size,
                length,
                KtoLoss(dpo),
                parts.policy,
                stream,
                self._reference(parts),
                first_rows(validation, self._num_held_out),
            )

        return Prepared(train, validation, stream, algorithm)

    @property
    def _num_held_out(self) -> int:
        return self.config.dpo.val_batches * self.config.dpo.val_global_batch_size

    def _reference(self, parts: RunParts) -> CachedReference:
        checkpointing = self.config.checkpointing
        return CachedReference(
            parts.policy,
            int(self.config.dpo.reference_cache_gib * 2**30),
            # An exact resume needs the cached values, so they are kept beside the checkpoints.
            Path(checkpointing.checkpoint_dir) if checkpointing.enabled else None,
            parts.warn,
        )


RECIPE = DpoRecipe
