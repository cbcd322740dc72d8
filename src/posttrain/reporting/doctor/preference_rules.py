"""Rules about runs on pairs: DPO and reward models."""

from __future__ import annotations

import math
import statistics

from posttrain.reporting.doctor.findings import Severity
from posttrain.reporting.doctor.history import RunHistory
from posttrain.reporting.doctor.rule import Sighting, lower_lr, percent

ACCURACY, CHOSEN, REJECTED = "train/accuracy", "train/rewards_chosen_mean", "train/rewards_rejected_mean"
LOSS = "train/preference_loss"
CHANCE = math.log(2)
MOVED = 0.01  # nats: below, rounding ties pairs whose answers differ


def both_fall(run: RunHistory) -> Sighting | None:
    """Chosen answers lose probability too. Common, and harmless while small beside the gap."""
    chosen, rejected = run.recent(CHOSEN), run.recent(REJECTED)
    first_chosen, first_rejected = run.start(CHOSEN), run.start(REJECTED)
    if chosen is None or rejected is None or first_chosen is None or first_rejected is None:
        return None
    fell, gap = first_chosen - chosen, chosen - rejected
    if fell <= 1.0 or first_rejected - rejected <= 1.0:
        return None
    severity: Severity = "warning" if fell > max(gap, 0.0) else "note"
    text = f"the chosen answers lose probability too ({first_chosen:.3g} to {chosen:.3g} nats), the margin is {gap:.3g}"
    return Sighting(severity, CHOSEN, chosen, text, (run.fix("dpo.sft_loss_weight", "0.1"), lower_lr(run)))


def too_easy(run: RunHistory) -> Sighting | None:
    early = 5 <= run.num_steps <= 20
    if not early or not run.all_above(ACCURACY, 0.98, 3):
        return None
    held_out = run.values("validation/accuracy")
    if held_out and held_out[-1] > 0.95:
        severity: Severity = "note"
        text = "all pairs are ranked correctly after a few steps, also held-out pairs: they are easy to distinguish"
    else:
        severity = "warning"
        text = (
            "all pairs are ranked correctly after a few steps: they are easy to distinguish, or the same pairs repeat"
        )
    fixes = ("look for duplicates and for simple differences, such as length: posttrain data inspect",)
    return Sighting(severity, ACCURACY, run.now(ACCURACY), text, fixes)


def memorised(run: RunHistory) -> Sighting | None:
    train, held_out = run.recent(ACCURACY), run.values("validation/accuracy")
    if train is None or len(held_out) < 2 or train < 0.95 or held_out[-1] > train - 0.2:
        return None
    shares = percent(train), percent(held_out[-1])
    text = f"{shares[0]} of the training pairs are ranked correctly, but {shares[1]} of the held-out pairs"
    fixes = (run.fix(f"{run.kind}.max_num_epochs", "1"), "remove duplicated pairs", lower_lr(run))
    severity: Severity = "error" if held_out[-1] < 0.6 and train > 0.98 else "warning"
    return Sighting(severity, "validation/accuracy", held_out[-1], text, fixes)


def equal_pairs(run: RunHistory) -> Sighting | None:
    """Both answers of a pair are the same text: they stay tied regardless of training."""
    ties = run.tail("train/tie_rate", 5)
    if run.num_steps < 6 or not ties or min(ties) <= 0.05:  # in the first step every pair is tied
        return None
    all_are_equal = min(ties) == 1 and not run.now("train/grad_norm")
    if not all_are_equal and max(abs(run.now(key) or 0.0) for key in (CHOSEN, REJECTED)) < MOVED:
        return None  # so small an update does not show in the rewards of any pair
    share = min(ties)
    what = "chosen and rejected are the same text, or the same tokens"
    text = f"{percent(share)} of the pairs stay tied after updates: {what}"
    severity: Severity = "error" if share > 0.3 else "warning"
    return Sighting(
        severity, "train/tie_rate", share, text, ("remove pairs whose two answers are equal from data.train",)
    )


def worse_than_chance(run: RunHistory) -> Sighting | None:
    key = LOSS if run.values(LOSS) else "train/loss"
    if run.setting("dpo.preference_loss") not in (None, "dpo") or not run.all_above(key, 1.5 * CHANCE, 5):
        return None
    now = run.now(key) or 0.0
    text = f"the loss is {now:.3g}: worse than chance ({CHANCE:.2f})"
    return Sighting("error", key, now, text, (lower_lr(run, 100 if now > 10 * CHANCE else 10),))


def not_learning(run: RunHistory) -> Sighting | None:
    accuracy = run.values(ACCURACY)
    if len(accuracy) < 50:
        return None
    last = statistics.median(accuracy[-len(accuracy) // 5 :])
    if last >= 0.55:
        return None
    text = f"{percent(last)} of the pairs are ranked correctly in the last fifth of the run: no better than chance"
    fixes = (run.fix("policy.optimizer.kwargs.lr", "more"), "check that chosen and rejected are not swapped")
    return Sighting("warning", ACCURACY, last, text, fixes)
