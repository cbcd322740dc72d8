"""Rules about policies that are trained on their own answers (GRPO).

Thresholds are relative to the start of the run wherever the absolute value depends on model and task. Entropy, length
and norms differ by orders of magnitude between a small model on sums and a large one on proofs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

from posttrain.reporting.doctor.findings import Severity
from posttrain.reporting.doctor.history import RunHistory
from posttrain.reporting.doctor.rule import (
    LR,
    MAX_NEW_TOKENS,
    Sighting,
    higher_kl_penalty,
    longer_answers,
    lower_lr,
    percent,
    short,
)

REWARD, SIGNAL, ENTROPY = "train/reward", "train/groups_with_signal", "train/approx_entropy"
TRUNCATION, LENGTH = "train/truncation_rate", "train/mean_generation_length"
ADVANTAGE, STD_OVER = "train/advantage_max", "grpo.adv_estimator.std_over"
REPETITION, DISTINCT = "train/repetition", "train/distinct_answers"
TEMPLATE = "policy.tokenizer.chat_template"

KL_WARNING, KL_ERROR = 0.1, 0.5
ENTROPY_WARNING, ENTROPY_ERROR, NO_ENTROPY = 0.2, 0.05, 0.02
SIGNAL_WARNING, SIGNAL_ERROR = 0.3, 0.1
ENOUGH_GROUPS = 4  # with a signal in a step: a policy learns from them, however many others it is asked
ADVANTAGE_WARNING = 5.0
COLD = 0.1  # temperatures below sample hardly more than one answer
TRUNCATION_WARNING, TRUNCATION_ERROR = 0.2, 0.5
MIN_LENGTH = 16  # tokens: shorter answers may double in length without a problem
PERSISTENCE = 3  # steps
LONG_PERSISTENCE = 5
TRUNCATION_PERSISTENCE = 20  # many models learn to end their answers within the first steps
MIN_STEPS_OF_TREND = 50
MAX_WINDOW = 1000  # steps that a level is looked for in


def kl_runaway(run: RunHistory) -> Sighting | None:
    kl = run.now(run.kl)
    if kl is None:
        return None
    is_estimate = run.kl != "train/kl_penalty"  # every few steps only
    count = 2 if is_estimate else PERSISTENCE
    fixes = (higher_kl_penalty(run), lower_lr(run, 100 if kl > 5 else 10))
    if run.num_steps <= 20 or kl > 5:  # it grew at once: the learning rate is at fault rather than the penalty
        fixes = (fixes[1], fixes[0])
    if run.all_above(run.kl, KL_ERROR, count):
        what = "the policy is diverging from it (0.01 to 0.1 is usual)"
        text = f"the KL to the starting model is {kl:.3g} per token: {what}"
        return Sighting("error", run.kl, kl, text, fixes)
    if run.all_above(run.kl, KL_WARNING, count):
        severity: Severity = "note" if run.validation_is_rising else "warning"
        text = f"the KL to the starting model is {kl:.3g} per token (0.01 to 0.1 is usual)"
        return Sighting(severity, run.kl, kl, text, fixes)
    return None


def entropy_collapse(run: RunHistory) -> Sighting | None:
    start, now = run.start(ENTROPY), run.recent(ENTROPY, PERSISTENCE)
    if start is None or now is None or start < NO_ENTROPY:
        return None  # it was low from the start
    share = now / start
    severity: Severity
    if share < ENTROPY_ERROR or (now < NO_ENTROPY and share < 0.5):
        severity = "error"
    elif share < ENTROPY_WARNING:
        severity = "warning"
    else:
        return None
    if run.validation_is_rising and not run.all_above(run.kl, KL_ERROR, 1):
        severity = "note"
    text = f"the entropy per token fell from {start:.3g} to {now:.3g}: the answers of a group are nearly identical"
    return Sighting(severity, ENTROPY, now, text, (lower_lr(run), higher_kl_penalty(run)), "equal")


def exploding_advantages(run: RunHistory) -> Sighting | None:
    estimator, is_others = run.setting("grpo.adv_estimator.name"), run.setting(STD_OVER) == "others"
    whitened = run.setting("grpo.adv_estimator.whiten_advantages") or ("none" if estimator != "gdpo" else "rollouts")
    if estimator in ("gae", "reinforce_plus_plus") or (whitened != "none" and not is_others):
        return None  # relative to all tokens or answers of the step, of which a few may be far from the others
    largest = max(run.tail(ADVANTAGE, LONG_PERSISTENCE), default=0.0)
    group = run.number_setting("grpo.num_generations_per_prompt") or 1.0
    if largest <= max(ADVANTAGE_WARNING, 1.01 * math.sqrt(group)):  # sqrt: the bound of the default estimator
        return None
    text = f"an advantage of {largest:.3g}: one answer decides the update"
    fix = run.fix(STD_OVER, "group") if is_others else run.fix("grpo.advantage_clip_high", short(ADVANTAGE_WARNING))
    return Sighting("warning", ADVANTAGE, largest, text, (fix,))


def no_signal(run: RunHistory) -> Sighting | None:
    signal = run.now(SIGNAL)
    if signal is None:
        return None
    all_equal = run.now("train/reward_min") is not None and run.now("train/reward_min") == run.now("train/reward_max")
    solved = _is_solved(run)
    severity: Severity
    if (all_equal and not any(run.tail(SIGNAL, PERSISTENCE) or (1,))) or run.all_below(
        SIGNAL, SIGNAL_ERROR, LONG_PERSISTENCE
    ):
        severity = "error"
    elif run.all_below(SIGNAL, SIGNAL_WARNING, LONG_PERSISTENCE):
        severity = "note" if _has_hard_prompts(run) else "warning"
    elif all_equal and (run.now("train/num_samples") or 0) >= 8:
        severity = "warning" if run.num_steps == 1 else "note"
    else:
        return None
    if solved or run.setting("grpo.use_dynamic_sampling") is True:
        severity = "note"
    cause, fixes = _cause_of_no_signal(run, is_solved=solved)
    reward = run.now(REWARD)
    what = f"all rewards are {reward:.3g}" if all_equal and reward is not None else f"{percent(signal)} of the groups"
    gives = ", so every advantage is 0" if all_equal else " have different rewards, so most advantages are 0"
    return Sighting(severity, SIGNAL, signal, f"{what}{gives}: {cause}", fixes, "equal")


def _is_solved(run: RunHistory) -> bool:
    """Nearly all rewards are the highest that the run has seen, and the run had lower ones before."""
    best, reward, lowest = run.values("train/reward_max"), run.now(REWARD), run.values(REWARD)
    return bool(best) and reward is not None and reward >= 0.9 * max(best) > 0 and min(lowest) < 0.8 * max(best)


def _has_hard_prompts(run: RunHistory) -> bool:
    """Few groups have a signal, as at the start, but enough of them to learn from."""
    signal, sampled = run.recent(SIGNAL), run.now("train/num_samples")
    group = run.number_setting("grpo.num_generations_per_prompt")
    if signal is None or sampled is None or not group:
        return False
    is_as_before = run.values(SIGNAL)[0] < SIGNAL_WARNING and signal >= 0.6 * (run.start(SIGNAL) or 0.0)
    return is_as_before and signal * sampled / group >= ENOUGH_GROUPS


def _cause_of_no_signal(run: RunHistory, *, is_solved: bool) -> tuple[str, tuple[str, ...]]:
    distinct, truncation = run.now(DISTINCT), run.now(TRUNCATION) or 0.0
    temperature = run.number_setting("policy.generation.temperature")
    group = int(run.number_setting("grpo.num_generations_per_prompt") or 0)
    if is_solved:
        return "the model has learnt these prompts", ("use harder prompts, or end the run",)
    is_cold = temperature is not None and temperature < COLD
    if is_cold or (run.num_steps <= 5 and distinct is not None and group > 1 and distinct <= 1.01 / group):
        return (
            "the answers of a group are the same text",
            (run.fix("policy.generation.temperature", "1.0"),),
        )
    if distinct is not None and group > 1 and distinct <= 1.5 / group:
        return "the policy has collapsed to one answer per prompt", (lower_lr(run), higher_kl_penalty(run))
    first = run.values(SIGNAL)[0]
    was_truncated = min((run.values(TRUNCATION) or (0.0,))[0], truncation) > TRUNCATION_WARNING
    start, recent = run.start(SIGNAL), run.recent(SIGNAL)
    has_fallen = start is not None and recent is not None and recent < 0.6 * start
    if (first >= SIGNAL_WARNING or has_fallen) and run.num_steps > 1 and not was_truncated:
        at_once = 100 if run.num_steps <= LONG_PERSISTENCE else 10
        before = max(first, start or 0.0)
        text = f"at the start {percent(before)} of the groups had a signal, so the policy has degraded"
        return text, (lower_lr(run, at_once),)
    if truncation > TRUNCATION_ERROR:
        return (
            f"{percent(truncation)} of the answers are truncated at {MAX_NEW_TOKENS} before the reward can score them",
            (*_template_fixes(run), longer_answers(run)),
        )
    dynamic_sampling = run.fix("grpo.use_dynamic_sampling", "true")
    if _has_hard_prompts(run):
        screen = "or screen the prompts: posttrain data screen"
        return "most prompts are too hard, or too easy", (dynamic_sampling, screen)
    return (
        "the reward does not distinguish the answers, or the prompts are too easy or too hard",
        (
            "check the reward on known answers: posttrain rewards test",
            *_template_fixes(run),
            dynamic_sampling,
        ),
    )


def _template_fixes(run: RunHistory) -> tuple[str, ...]:
    return (run.fix(TEMPLATE, "default"),) if run.setting(TEMPLATE) not in (None, "default") else ()


def wrong_template(run: RunHistory) -> Sighting | None:
    """The first steps of a model that was given another template than its own: it neither stops nor earns a reward."""
    if run.num_steps != PERSISTENCE or not _template_fixes(run):
        return None
    truncation = run.recent(TRUNCATION, PERSISTENCE)
    ranges = zip(run.values("train/reward_min"), run.values("train/reward_max"), strict=False)
    earns_nothing = all(low == high for low, high in ranges)
    if truncation is None or not (truncation > 0.9 or earns_nothing):
        return None
    text = (
        f"with {TEMPLATE} set, {percent(truncation)} of the answers do not stop: the model may not know this template"
    )
    severity: Severity = "error" if truncation > 0.9 and earns_nothing else "warning"
    return Sighting(severity, TRUNCATION, truncation, text, _template_fixes(run), "cut")


def truncated(run: RunHistory) -> Sighting | None:
    now = run.now(TRUNCATION)
    is_error = run.all_above(TRUNCATION, TRUNCATION_ERROR, LONG_PERSISTENCE)
    if now is None or not (is_error or run.all_above(TRUNCATION, TRUNCATION_WARNING, TRUNCATION_PERSISTENCE)):
        return None
    text = f"{percent(now)} of the answers are truncated at the length limit, so the reward does not see their end"
    fixes: tuple[str, ...] = (
        *_template_fixes(run),
        longer_answers(run),
        run.fix("grpo.overlong_filtering", "true"),
    )
    start, lowest = run.values(TRUNCATION)[0], sorted(run.values(TRUNCATION))[PERSISTENCE - 1]
    if start < TRUNCATION_WARNING or lowest < TRUNCATION_WARNING / 2:  # the policy has learnt to continue
        fixes = (lower_lr(run), run.fix("grpo.reward_shaping.enabled", "true"), higher_kl_penalty(run))
        text = f"{percent(lowest)} of the answers were truncated before, now {percent(now)}: the policy does not stop"
    severity: Severity = "error" if is_error else "warning"
    values = run.values(TRUNCATION)
    falls = now < 0.7 * max(values) and run.validation_is_rising
    return Sighting("note" if falls else severity, TRUNCATION, now, text, fixes, "cut")


def length_explosion(run: RunHistory) -> Sighting | None:
    start, now = run.start(LENGTH), run.recent(LENGTH)
    if start is None or now is None or now < MIN_LENGTH or now <= 2 * start:
        return None
    severity: Severity = "note" if run.validation_is_rising else "warning"
    text = f"answers grew from {start:.0f} to {now:.0f} tokens"
    fixes = (run.fix("grpo.reward_shaping.enabled", "true"), higher_kl_penalty(run))
    return Sighting(severity, LENGTH, now, text, fixes, "longest")


def reward_flat(run: RunHistory) -> Sighting | None:
    values = run.values(REWARD)
    if len(values) < MIN_STEPS_OF_TREND or _is_solved(run):
        return None
    fifth = len(values) // 5
    first, last = statistics.median(values[:fifth]), statistics.median(values[-fifth:])
    slope = theil_sen(values[-fifth:])
    if slope > 0 or last > first + 0.1 * max(abs(first), 1e-9):
        return None
    fell = last < first - 0.2 * max(abs(first), 1e-9)
    text = f"the reward was {first:.3g} in the first fifth of the run and is {last:.3g} in the last, and does not rise"
    lr = run.number_setting(LR)
    raised = (run.fix(LR, short(3 * lr)),) if lr and not fell else ()
    fixes = (
        (lower_lr(run),) if fell else (*raised, run.fix("grpo.num_generations_per_prompt", "more answers per prompt"))
    )
    return Sighting("error" if fell else "warning", REWARD, last, text, fixes)


def theil_sen(values: Sequence[float], max_points: int = 100) -> float:
    """The median slope over all pairs of points, of at most `max_points` evenly spread ones."""
    points = list(enumerate(values))
    stride = max(1, len(points) // max_points)
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(points[::stride], 2)]
    return statistics.median(slopes) if slopes else 0.0


def reward_collapse(run: RunHistory) -> Sighting | None:
    """The reward has fallen to less than half of what it was for some time."""
    values = run.values(REWARD)
    if len(values) < 3 * LONG_PERSISTENCE or run.now(REWARD) is None:
        return None
    now = statistics.median(values[-LONG_PERSISTENCE:])
    lowest = min(run.values("train/reward_min"), default=0.0)
    recent, size = values[-MAX_WINDOW:], LONG_PERSISTENCE
    before = max(statistics.median(recent[i : i + size]) for i in range(0, len(recent) - size + 1, size))
    if before - lowest <= 0.05 or (now - lowest) >= 0.5 * (before - lowest):
        return None
    text = f"the reward has fallen from {before:.3g} to {now:.3g}"
    return Sighting("error", REWARD, now, text, (lower_lr(run), higher_kl_penalty(run)))


def reward_hacking(run: RunHistory) -> Sighting | None:
    """The reward rises while signs of health fail: a guess, which the answers of the step confirm or refute."""
    start, now = run.start(REWARD), run.recent(REWARD)
    if start is None or now is None or now <= start + 0.1 * max(abs(start), 0.1):
        return None
    signs = []
    if run.all_above(run.kl, KL_ERROR, 1):
        signs.append("KL")
    entropy = run.start(ENTROPY)
    if entropy and (run.recent(ENTROPY) or entropy) < ENTROPY_WARNING * entropy:
        signs.append("entropy")
    if (run.recent(TRUNCATION) or 0.0) > TRUNCATION_ERROR:
        signs.append("truncation")
    length = run.start(LENGTH)
    if length and (run.recent(LENGTH) or 0.0) > max(2 * length, MIN_LENGTH):
        signs.append("length")
    repetition, before = run.recent(REPETITION), run.start(REPETITION)
    repeats = repetition is not None and before is not None and repetition > before + 0.3
    validation = run.values("validation/accuracy")
    fixes = (higher_kl_penalty(run), lower_lr(run), "read the answers with the highest rewards, and fix the reward")
    if repeats:
        text = (
            f"the reward rises while answers repeat themselves ({percent(repetition or 0)} repeated 4-token sequences)"
        )
        return Sighting("error", REPETITION, repetition, text, fixes, "best")
    if len(signs) >= 2:
        return Sighting("error", REWARD, now, f"the reward rises while {' and '.join(signs)} get worse", fixes, "best")
    if _validation_falls(run):
        text = f"the reward rises while the validation fell from {max(validation):.3g} to {validation[-1]:.3g}"
        return Sighting("warning", "validation/accuracy", validation[-1], text, fixes, "best")
    return None


def _validation_falls(run: RunHistory) -> bool:
    """Whether the last two validations are below the best one by more than chance."""
    values = run.values("validation/accuracy")
    if len(values) < 3:
        return False
    spread, count = run.values("validation/reward_std"), run.values("validation/num_samples")
    error = spread[-1] / math.sqrt(count[-1]) if spread and count and count[-1] else 0.0  # of one mean
    chance = 2 * math.sqrt(2) * error
    best = max(values)
    return values[-1] < min(0.8 * best, best - chance) and values[-2] < min(0.9 * best, best - chance)


def unscored(run: RunHistory) -> Sighting | None:
    count = min(LONG_PERSISTENCE, len(run.values("train/unscored")))
    failed, sampled = run.tail("train/unscored", count), run.tail("train/num_samples", count)
    if not failed or not sum(sampled) or run.now("train/agent_calls") is not None:  # of agents: agents_die
        return None
    share = sum(failed) / sum(sampled)
    if share <= 0.05 or (run.num_steps < PERSISTENCE and share < 1):
        return None
    text = f"{percent(share)} of the rewards of the last steps failed; unscored.jsonl has the reasons"
    fixes = tuple(
        run.fix(key, short(2 * value))
        for key, value in run.settings.items()
        if key.startswith("env.") and key.endswith(".timeout_s") and isinstance(value, int | float)
    )
    return Sighting(
        "error" if share > 0.3 else "warning",
        "train/unscored",
        failed[-1],
        text,
        ("correct the reward function, or the rows that it fails for", *fixes),
        "unscored",
    )


# Nothing follows from rewards in a run that is not trained on them.
ABOUT_REWARDS = (no_signal, wrong_template, truncated, reward_flat, reward_collapse, reward_hacking)
# With a critic, equal rewards of a group are a signal too, and advantages are those of single tokens.
ABOUT_GROUPS = (no_signal, exploding_advantages)
