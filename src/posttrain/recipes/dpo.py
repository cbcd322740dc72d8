"""Preference optimisation: on pairs, or, with a loss such as kto, on single answers that are labelled good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posttrain.algorithms.dpo import Dpo
from posttrain.algorithms.kto import Kto
from posttrain.config import DpoRunConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import load_judged_dataset, load_pair_dataset
from posttrain.data.row_dataset import Stream
from posttrain.policy.objectives import KtoLoss, PreferenceLoss
from posttrain.policy.reference_cache import CachedReference
from posttrain.recipes.recipe import Prepared, Recipe, RunParts, presentation_of
from posttrain.reporting.presentation import Presentation
from posttrain.types import Judged, Pair


@dataclass(frozen=True)
class DpoRecipe(Recipe):
    config: DpoRunConfig
    presentation: ClassVar[Presentation] = presentation_of("dpo")

    def prepare(self, chat: ChatFormat) -> Prepared:
        policy, dpo = self.config.policy, self.config.dpo
        size, length = policy.train_global_batch_size, policy.max_total_sequence_length

        def on_pairs(parts: RunParts, stream: Stream[Pair], held_out: Sequence[Pair]) -> Dpo:
            objective = PreferenceLoss(dpo)
            reference = self._reference(parts) if objective.needs_reference else None
            return Dpo(size, objective, parts.policy, stream, held_out, reference)

        def on_single_answers(parts: RunParts, stream: Stream[Judged], held_out: Sequence[Judged]) -> Kto:
            reference = self._reference(parts)
            return Kto(size, KtoLoss(dpo), parts.policy, stream, held_out, reference=reference, max_total_tokens=length)

        num_held_out = dpo.val_batches * dpo.val_global_batch_size
        if self.config.loss_traits.is_paired:
            return self._of_answers("pairs", chat, load_pair_dataset, num_held_out, on_pairs)
        return self._of_answers("answers", chat, load_judged_dataset, num_held_out, on_single_answers)

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
