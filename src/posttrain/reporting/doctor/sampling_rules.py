"""Rules about sampling: agreement of trainer and sampler, size of updates, speed of sampling."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from posttrain.reporting.doctor.history import RunHistory
from posttrain.reporting.doctor.rule import Sighting, lower_lr, percent

WEIGHT, SAMPLE_SIZE, STALE = (
    "train/sampling_importance_ratio",
    "train/sampling_effective_sample_size",
    "train/stale_token_fraction",
)
SHIFT, AGE = "train/policy_shift_kl", "train/trajectory_age_mean"
MISMATCH, SAMPLER_KL = "train/token_mult_prob_error", "train/gen_kl_error"
LENGTH, TRAINING_RATE = "train/mean_generation_length", "performance/policy_training_tokens_per_sec_per_gpu"
CORRECTION = "loss_fn.use_importance_sampling_correction"
PRECISION, FP8_TRAINING = "policy.generation.native_cfg.precision", "policy.fp8"
MAX_AGE = "grpo.async_grpo.max_trajectory_age_steps"
MISMATCH_WARNING, MISMATCH_ERROR, SAMPLER_KL_LIMIT = 1.02, 1.05, 1e-3
WEIGHT_LIMITS, SAMPLE_SIZE_ERROR, SAMPLE_SIZE_WARNING = (0.5, 2.0), 0.3, 0.7
SHIFT_WARNING, SHIFT_ERROR, SHIFT_PER_STEP = 0.03, 0.1, 0.03  # nats per token between sampling and training
CLIP_WARNING = 0.3
PERSISTENCE = 3  # steps


def sampler_mismatch(run: RunHistory) -> Sighting | None:
    """Not of tokens that older weights sampled: those are expected to differ."""
    if run.now(STALE) or run.now(MISMATCH) is None:
        return None
    error = _moving_average(run.tail(MISMATCH, min(20, len(run.values(MISMATCH)))))
    kl = run.recent(SAMPLER_KL, PERSISTENCE)
    if run.setting(PRECISION) == "fp8":
        fixes = (run.fix(PRECISION, "auto"),)
    elif run.setting(FP8_TRAINING) is True:
        fixes = (run.fix(FP8_TRAINING, "false"),)
    else:
        fixes = (run.fix(CORRECTION, "true"),)
    is_corrected = run.setting(CORRECTION) is True
    text = (
        f"sampler and trainer compute different probabilities: mean exp|difference of log-probabilities| is {error:.4g}"
    )
    if error > MISMATCH_ERROR and len(run.values(MISMATCH)) >= PERSISTENCE:
        return Sighting("warning" if is_corrected else "error", MISMATCH, error, text, fixes)
    if error > MISMATCH_WARNING and len(run.values(MISMATCH)) >= PERSISTENCE:
        return Sighting("note" if is_corrected else "warning", MISMATCH, error, text, fixes)
    if kl is not None and kl > SAMPLER_KL_LIMIT:
        text = f"the KL of the sampler to the trainer is {kl:.2g}, above {SAMPLER_KL_LIMIT:g}"
        return Sighting("note" if is_corrected else "warning", SAMPLER_KL, kl, text, fixes)
    return None


def _moving_average(values: Sequence[float], weight: float = 0.2) -> float:
    average: float | None = None
    for value in values:
        average = value if average is None else (1 - weight) * average + weight * value
    return 1.0 if average is None else average


def off_policy(run: RunHistory) -> Sighting | None:
    weight, size = run.now(WEIGHT), run.now(SAMPLE_SIZE)
    low, high = WEIGHT_LIMITS
    age = run.number_setting(MAX_AGE)
    fixes = []
    if run.now(STALE):
        fixes.append(run.fix(MAX_AGE, str(int((age or 2) // 2))))
    if run.setting(CORRECTION) is not True:
        fixes.append(run.fix(CORRECTION, "true"))
    fixes.append(lower_lr(run))
    if size is not None and size < SAMPLE_SIZE_ERROR:
        lasts = run.all_below(SAMPLE_SIZE, SAMPLE_SIZE_ERROR, PERSISTENCE)
        text = f"the answers are off-policy: the effective sample size is {percent(size)} of the tokens"
        return Sighting("error" if lasts else "warning", SAMPLE_SIZE, size, text, tuple(fixes))
    if weight is not None and not low < weight < high:
        lasts = run.all_above(WEIGHT, high, PERSISTENCE) or run.all_below(WEIGHT, low, PERSISTENCE)
        text = f"the answers are off-policy: the mean importance weight is {weight:.3g}, far from 1"
        return Sighting("error" if lasts else "warning", WEIGHT, weight, text, tuple(fixes))
    if size is not None and run.now(STALE) and run.all_below(SAMPLE_SIZE, SAMPLE_SIZE_WARNING, PERSISTENCE):
        stale = run.now(STALE) or 0.0
        text = f"{percent(stale)} of the tokens are from older weights; the effective sample size is {percent(size)}"
        return Sighting("warning", SAMPLE_SIZE, size, text, tuple(fixes))
    return _stale_answers(run, tuple(fixes))


def _stale_answers(run: RunHistory, fixes: tuple[str, ...]) -> Sighting | None:
    """Without correction the weights of stale answers are 1; how far the policy has moved since shows instead."""
    shift = run.now(SHIFT)
    if shift is None or not run.now(STALE) or not run.all_above(SHIFT, SHIFT_WARNING, PERSISTENCE):
        return None
    if shift / max(run.now(AGE) or 1.0, 1.0) > SHIFT_PER_STEP:  # steps are too large at any age
        fixes = (lower_lr(run), *(fix for fix in fixes if fix != lower_lr(run)))
    text = f"the answers are off-policy: the KL to the policy that sampled them is {shift:.2g} nats per token"
    lasts = run.all_above(SHIFT, SHIFT_ERROR, PERSISTENCE)
    return Sighting("error" if lasts else "warning", SHIFT, shift, text, fixes)


def clip_fraction(run: RunHistory) -> Sighting | None:
    key = "train/clip_fraction"
    if not run.all_above(key, CLIP_WARNING, PERSISTENCE):
        return None
    now = run.now(key) or 0.0
    text = f"{percent(now)} of the tokens are clipped: the updates of a step are too large"
    return Sighting(
        "warning", key, now, text, (lower_lr(run), "make fewer updates per step: a larger train_global_batch_size")
    )


def generation_slowing(run: RunHistory) -> Sighting | None:
    """Seconds per sampled token against those of the first steps, at about equal length."""
    seconds, tokens = run.values("timing/train/generation"), run.values("train/num_generated_tokens")
    if run.num_steps < 20 or len(seconds) != len(tokens):
        return None
    start, now = _pace(seconds[2:7], tokens[2:7]), _pace(seconds[-10:], tokens[-10:])
    length, before = run.recent(LENGTH), run.start(LENGTH)
    if not start or not now or length is None or before is None or now <= 1.5 * start:
        return None
    if not 0.8 * before <= length <= 1.25 * before:
        return None
    first, last = run.values(TRAINING_RATE)[2:7], run.values(TRAINING_RATE)[-10:]
    others = statistics.median(first) / statistics.median(last) if first and statistics.median(last) else 1.0
    if now / start <= 1.5 * max(1.0, others):
        return None  # everything is slower: the machine is busy
    text = (
        f"sampling takes {now / start:.1f} times as long per token as at the start, at equal length; "
        "the KV cache may be too small"
    )
    fixes = (run.fix("policy.generation.native_cfg.gpu_memory_utilization", "more, or fewer answers at once"),)
    return Sighting("note", "timing/train/generation", seconds[-1], text, fixes)


def _pace(seconds: Sequence[float], tokens: Sequence[float]) -> float:
    pairs = [(s, t) for s, t in zip(seconds, tokens, strict=True) if t]
    return statistics.median(s / t for s, t in pairs) if pairs else 0.0
