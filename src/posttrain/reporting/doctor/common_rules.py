"""Rules about every kind of run: numbers that are not finite, gradients, a loss that diverges, overfitting, experts."""

from __future__ import annotations

import statistics

from posttrain.reporting.doctor.findings import Severity
from posttrain.reporting.doctor.history import RunHistory
from posttrain.reporting.doctor.rule import Sighting, lower_lr, percent, short

LOSS, NORM, SKIPPED = "train/loss", "train/grad_norm", "train/update_skipped"
LOAD, ROUTER_ENTROPY = "train/expert_load_max", "train/router_entropy"
LOAD_WARNING = 4.0  # times the mean
SPIKE_WARNING, SPIKE_ERROR, SPIKE_RATIO = 5.0, 10.0, 5.0
DEAD_NORM = 1e-5
WINDOW = 50  # steps whose median is the usual norm


def not_finite(run: RunHistory) -> Sighting | None:
    key = next((key for key in (LOSS, NORM) if run.is_null(key)), SKIPPED)
    if key == SKIPPED and not run.now(SKIPPED):
        return None
    lasts = run.all_above(SKIPPED, 0, 3)
    text = f"{key} is not finite, so the update was skipped" if key != SKIPPED else "an update was skipped"
    return Sighting("error" if lasts else "warning", key, run.now(key), text, (lower_lr(run),))


def grad_spike(run: RunHistory) -> Sighting | None:
    norm = run.now(NORM)
    values = run.values(NORM)
    if norm is None or len(values) <= 5 or norm <= SPIKE_WARNING:
        return None
    usual = statistics.median(values[-WINDOW - 1 : -1])
    fixes = (lower_lr(run),)
    high = [value for value in values[-10:] if value > SPIKE_ERROR and value > SPIKE_RATIO * usual]
    text = f"the gradient norm is {norm:.3g}, {norm / usual:.0f} times its median {usual:.3g}" if usual else "a spike"
    if len(high) >= 3:
        return Sighting("error", NORM, norm, text, fixes)
    if norm > SPIKE_ERROR and norm > SPIKE_RATIO * usual:
        return Sighting("warning", NORM, norm, text, fixes)
    if norm > SPIKE_RATIO * usual:
        return Sighting("note", NORM, norm, text, fixes)
    start = run.start(NORM)
    if run.kind == "grpo" and start and run.all_above(NORM, SPIKE_ERROR, 10) and usual > SPIKE_RATIO * start:
        text = f"the gradient norm grew from {start:.3g} to {usual:.3g}"
        return Sighting("warning", NORM, norm, text, fixes)
    return None


def grad_dead(run: RunHistory) -> Sighting | None:
    if run.now("train/groups_with_signal") == 0 or not run.all_below(NORM, DEAD_NORM, 5):
        return None  # without signal there is no gradient: a separate rule covers that
    norm = run.now(NORM)
    text = f"the gradient norm is {norm:.2g}: the weights do not change"
    return Sighting("error", NORM, norm, text, ("check that parameters are trainable and that the data has a signal",))


def loss_diverges(run: RunHistory) -> Sighting | None:
    """Not for GRPO, whose loss does not measure progress."""
    start, now = run.start(LOSS), run.recent(LOSS)
    if start is None or now is None or start <= 0:
        return None
    values = run.values(LOSS)[-1000:]
    best = min((statistics.median(values[i : i + 5]) for i in range(0, len(values) - 4, 5)), default=None)
    if now > 1.3 * start:
        return Sighting("error", LOSS, now, f"the loss rose from {start:.3g} to {now:.3g}", (lower_lr(run),))
    if best is not None and now > 3 * best and now - best > 0.3 * start:
        text = f"the loss rose from its minimum {best:.3g} to {now:.3g}"
        return Sighting("warning", LOSS, now, text, (lower_lr(run),))
    return None


def overfit(run: RunHistory) -> Sighting | None:
    """The loss on held-out rows rises, validation after validation, while that of training falls."""
    losses = run.values("validation/loss")
    if len(losses) < 4 or run.now("validation/loss") is None:
        return None
    best, now = min(losses), losses[-1]
    rises = losses[-3] < losses[-2] < now
    if not rises or now <= 1.1 * best:
        return None
    step = run.steps("validation/loss")[losses.index(best)]
    severity: Severity = "warning" if now > 1.3 * best else "note"
    text = f"the validation loss is {now:.3g}, {percent(now / best - 1)} above its minimum at step {step}"
    fixes = (
        run.fix(f"{run.kind}.max_num_steps", str(step)),
        run.fix("policy.optimizer.kwargs.weight_decay", short(0.1)),
    )
    return Sighting(severity, "validation/loss", now, text, fixes)


def experts_unbalanced(run: RunHistory) -> Sighting | None:
    """Most tokens go to few experts, which they did not at the start."""
    start, now = run.start(LOAD), run.recent(LOAD)
    if start is not None and now is not None and now > LOAD_WARNING and now > 2 * start:
        text = f"the busiest expert gets {now:.3g} times the mean number of tokens, {start:.3g} times at the start"
        return Sighting("warning", LOAD, now, text, (lower_lr(run),))
    start, now = run.start(ROUTER_ENTROPY), run.recent(ROUTER_ENTROPY)
    if start is not None and now is not None and now < start / 2:
        text = f"the entropy of the routers fell from {start:.3g} to {now:.3g}"
        return Sighting("warning", ROUTER_ENTROPY, now, text, (lower_lr(run),))
    return None
