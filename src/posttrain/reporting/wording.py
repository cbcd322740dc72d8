"""The text of a run's output: stages, step blocks, one-line steps, validation, samples.

Pure functions from rows and groups to lines of text; `console.py` shows them. Stages and blocks have NeMo RL's words
and order: results, timing with percentages, performance. docs/seeds/differences.md compares them line by line.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttrain.reporting.presentation import RecorderSettings, ShownMetric
from posttrain.reporting.rows import TOTAL_STEP, TOTAL_VALIDATION, is_accuracy
from posttrain.reporting.run_files import Row

if TYPE_CHECKING:
    from posttrain.types import Completion, Group

Style = Literal["header", "title", "plain", "muted", "good", "warning", "bad"]


@dataclass(frozen=True)
class Line:
    text: str
    style: Style = "plain"


SHIFTS = (
    ("train/policy_shift_kl", "Policy Shift (KL)"),
    ("train/advantage_weighted_shift", "Advantage-Weighted Shift"),
    ("train/clip_fraction", "Clipped Tokens (share)"),
)
VALIDATION_RESULTS = (
    ("accuracy", "Accuracy"),
    ("reward", "Avg Reward"),
    ("loss", "Loss"),
    ("rewards_chosen_mean", "Chosen Reward"),
    ("rewards_rejected_mean", "Rejected Reward"),
)
# Key, words, unit, and whether the sum over all devices is shown as well.
THROUGHPUTS = (
    ("samples_per_sec_per_gpu", "E2E", "Samples", True),
    ("tokens_per_sec_per_gpu", "E2E", "Tokens", True),
    ("policy_training_tokens_per_sec_per_gpu", "Policy Training", "Tokens", False),
    ("policy_and_reference_logprobs_tokens_per_sec_per_gpu", "Policy and Reference Logprobs", "Tokens", False),
    ("training_worker_group_tokens_per_sec_per_gpu", "Training Worker Group", "Tokens", True),
    ("generation_tokens_per_sec_per_gpu", "Generation Worker Group", "Tokens", True),
)
# Stages that begin with a progress bar, by its label.
STAGES = {
    "generation": "Generating responses for batch of size {total}",
    "scoring": "Processing rewards",
    "logprobs": "Computing logprobs",
    "training": "Training policy",
}
VALIDATION_STAGE = "Starting validation"
GENERATION_PREP = "prepare_for_generation"
REFIT = f"{GENERATION_PREP}/transfer_and_update_weights"
# Timings on the line that sums up a step.
MAIN_STAGES = (
    ("generation", "gen"),
    ("reward_calculation", "reward"),
    ("policy_and_reference_logprobs", "logprobs"),
    ("policy_training", "train"),
)


def number(value: float | None) -> str:
    """Four decimals, or an exponent for very small and very large numbers."""
    if value is None or not math.isfinite(value):
        return "n/a"
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{value:,.0f}"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def duration(seconds: float) -> str:
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.1f}ms"
    if seconds < 60:
        return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.1f}s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes}m {whole:02d}s"
    return f"{hours}h {minutes:02d}m" if hours < 48 else f"{hours // 24}d {hours % 24:02d}h"


def printable(text: str) -> str:
    """Text with control characters replaced by their escape sequences."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs")
        else char.encode("unicode_escape").decode()
        for char in text
    )


def in_order(text: str) -> str:
    """Text of another program, or of a part of it: its colours are kept, and what would write over earlier lines is
    shown as escape sequences."""
    return re.sub(r"\x1b(?!\[[\d;]*m)|\r(?!\n)", lambda found: repr(found[0])[1:-1], text)


def stage_of(label: str, total: int) -> str:
    """The stage that a progress bar with this label begins; empty if it begins none."""
    return STAGES.get(label, "").format(total=total)


def step_summary(results: Sequence[ShownMetric], row: Row, groups: Sequence[Group]) -> list[Line]:
    """A step on four lines, which begin with [Generate], [Reward], [Train] and [Time]."""
    timings = {key.removeprefix("timing/train/"): value or 0.0 for key, value in row.items()}
    lines = []
    if groups:
        lines.append(Line(f"[Generate] {_counts(row, groups)} ({duration(timings.get('generation', 0.0))})"))
        shown = [(name, row.get(f"train/{key}")) for name, key in REWARD_STATISTICS]
        rewards = ", ".join(f"{name}={number(value)}" for name, value in shown)
        lines.append(Line(f"[Reward]   {rewards if shown[0][1] is not None else 'no response could be scored'}"))
    names = {metric.key: "kl" if metric.key == "kl_penalty" else metric.key for metric in results if metric.short_name}
    shown_above = ("reward", "filtered_reward", "mean_generation_length")
    of_training = [key for key in names if f"train/{key}" in row and key not in shown_above]
    trained = [f"{names[key]}={number(row[f'train/{key}'])}" for key in of_training]
    lines.append(Line(f"[Train]    {', '.join(trained)}"))
    parts = [f"{name}={duration(timings[stage])}" for stage, name in MAIN_STAGES if timings.get(stage)]
    among = f" ({', '.join(parts)})" if parts else ""
    return [*lines, Line(f"[Time]     total={duration(timings.get(TOTAL_STEP, 0.0))}{among}")]


REWARD_STATISTICS = (("mean", "reward"), ("std", "reward_std"), ("min", "reward_min"), ("max", "reward_max"))


def _counts(row: Row, groups: Sequence[Group]) -> str:
    """Prompts x answers of each = responses, of the groups that were trained on."""
    sizes = {len(group.rollouts) for group in groups}
    total = sum(len(group.rollouts) for group in groups)
    each = f" x {sizes.pop()} generations" if len(sizes) == 1 else ""
    sampled = row.get("train/num_samples") or total
    of_more = f", of {sampled:.0f} sampled" if sampled > total else ""
    recorded = sum(not rollout.completion.logprobs for group in groups for rollout in group.rollouts)
    of_these = f", {recorded} of them recorded" if recorded else ""
    age = row.get("train/trajectory_age_mean")
    in_rounds = "" if age is None else f", begun {age:.2f} steps ago on average"
    return f"{len(groups)} prompts{each} = {total} responses{of_more}{of_these}{in_rounds}"


def unscored_reasons(groups: Sequence[Group]) -> Counter[str]:
    scores = [rollout.score for group in groups for rollout in group.rollouts]
    return Counter(score.error or "no reason given" for score in scores if not score.scored)


def step_block(run: RecorderSettings, row: Row, groups: Sequence[Group], eta_s: float | None) -> list[Line]:
    lines = [Line("Training Results:", "title")]
    for metric in run.presentation.results:
        if f"train/{metric.key}" in row:
            lines.append(Line(f"  • {metric.name}: {number(row[f'train/{metric.key}'])}"))
        if metric.key == "reward":
            lines += _part_lines(row, "train/")
    # Zero on-policy; worth watching when training on recorded answers.
    lines += [Line(f"  • {words}: {number(row[key])}") for key, words in SHIFTS if row.get(key)]
    lines += _unscored_lines(row, groups)
    lines += _timing_lines(row, eta_s, run.refit_remark)
    lines += _performance_lines(row, run.device_word, run.hardware.num_devices)
    return lines


def _part_lines(row: Row, prefix: str) -> list[Line]:
    """The parts of a reward that has several."""
    parts = {key.removeprefix(f"{prefix}reward/"): v for key, v in row.items() if key.startswith(f"{prefix}reward/")}
    return [Line(f"    - {part}: {number(value)}") for part, value in sorted(parts.items())]


def _unscored_lines(row: Row, groups: Sequence[Group]) -> list[Line]:
    reasons = unscored_reasons(groups)
    count = row.get("train/unscored", reasons.total() if groups else None)
    if count is None:
        return []
    of_all = f" of {sum(len(group.rollouts) for group in groups)}" if groups else ""
    why = ", ".join(f"{times} × {reason[:100]}" for reason, times in reasons.most_common(3))
    text = f"  • Unscored: {count:.0f}{of_all}" + (f" ({why})" if why else "")
    return [Line(text, "warning" if count else "plain")]


_OUTSIDE_A_STEP = {
    "checkpoint_write": "in the background",
    "generation_ahead": "beside the step before",
    "generation_ahead_wait": "at the end of the step before",
}


def _timing_lines(row: Row, eta_s: float | None, refit_remark: str) -> list[Line]:
    prefix = "timing/train/"
    timings = {key.removeprefix(prefix): value or 0.0 for key, value in row.items() if key.startswith(prefix)}
    total = timings.pop(TOTAL_STEP, 0.0)
    timings.pop("checkpointing", None)  # of the save before this step, in whose block it is shown
    if parts := [seconds for stage, seconds in timings.items() if stage.startswith(f"{GENERATION_PREP}/")]:
        timings[f"{GENERATION_PREP}/total"] = sum(parts)
    lines = [Line("Timing:", "title"), Line(f"  • Total step time: {duration(total)}")]
    for stage, seconds in sorted(timings.items(), key=lambda item: -item[1]):
        percent = 100 * seconds / total if total > 0 else 0.0
        remark = f", {refit_remark}" if stage == REFIT and refit_remark else ""
        share = _OUTSIDE_A_STEP.get(stage, f"{percent:.1f}%{remark}")
        lines.append(Line(f"  • {stage}: {duration(seconds)} ({share})"))
    if eta_s is not None:
        lines.append(Line(f"  • Left for the run: about {duration(eta_s)}"))
    return lines


def _performance_lines(row: Row, device_word: str, num_devices: int) -> list[Line]:
    rates = {key.removeprefix("performance/"): value for key, value in row.items() if key.startswith("performance/")}
    if not rates:
        return []
    lines = [Line("Performance Metrics:", "title")]
    if "mean_total_tokens_per_sample" in rates:
        lines.append(Line(f"  • Mean Total Tokens per Sample: {rates['mean_total_tokens_per_sample']:.2f}"))
    shown = [(rates[key], *rest) for key, *rest in THROUGHPUTS if rates.get(key) is not None]
    if shown:
        lines.append(Line(f"  • Throughputs (per {device_word}):"))
        per = f"sec/{device_word.lower()}"
        lines += [Line(f"    - {words} ({unit}/{per}): {_rate(value)}") for value, words, unit, _ in shown]
        lines.append(Line("  • Throughputs (per Group):"))
        groups = [(value * num_devices, words, unit) for value, words, unit, is_of_group in shown if is_of_group]
        lines += [Line(f"    - {words} ({unit}/sec): {_rate(value)}") for value, words, unit in groups]
    per_device = rates.get("train_flops_per_gpu")
    if per_device is not None:
        total = f"{_rate(per_device * num_devices)} TFLOPS"
        lines.append(Line(f"  • Training FLOPS: {total} ({_rate(per_device)} TFLOPS per {device_word})"))
        mfu = rates.get("train_mfu")
        share = f"{100 * mfu:.2f}%" if mfu is not None else f"n/a (the peak of this {device_word} is not known)"
        lines.append(Line(f"  • Training Model Floating Point Utilization: {share}"))
    return lines


def _rate(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.3g}"


def trend(values: Sequence[float | None]) -> str:
    """How the latter half of the values lies to the first; empty while there are few."""
    known = [value for value in values if value is not None]
    half = len(known) // 2
    if half < 3:
        return ""
    change = math.fsum(known[-half:]) / half - math.fsum(known[:half]) / half
    return f"({'+' if change >= 0 else '−'}{abs(change):.2g} in {len(known)} steps)"


def answer_lines(groups: Sequence[Group], max_characters: int = 90) -> list[Line]:
    """One answer, of a group whose rewards differ if there is one, with its question on one line."""
    differing = [group for group in groups if len(set(group.rewards)) > 1]
    group = next(iter(differing or groups))
    if not group.rollouts:
        return []
    rollout = group.rollouts[0]
    reward = number(rollout.score.reward) if rollout.score.scored else "unscored"
    asked = group.task.messages[-1].get("content") if group.task.messages else None  # without the chat template
    question, answer = (
        " ".join(text.split())
        for text in (asked if isinstance(asked, str) else group.task.prompt, rollout.completion.text)
    )
    question = question if len(question) <= max_characters else f"{question[:max_characters]}…"
    answer = answer if len(answer) <= max_characters else f"…{answer[-max_characters:]}"
    return [Line(f"      {question}", "muted"), Line(f"      {reward} │ {answer}", "muted")]


def step_line(results: Sequence[ShownMetric], row: Row, max_steps: int, eta_s: float | None, trend: str = "") -> Line:
    """One short step on one line, in columns of fixed width."""
    width = len(str(max_steps))
    parts = [f"step {row['step']:>{width}}/{max_steps}"]
    for metric in results:
        if metric.short_name and f"train/{metric.key}" in row:
            value = row[f"train/{metric.key}"]
            text = f"{value:.1f}" if metric.short_name == "length" and value is not None else number(value)
            parts.append(f"{metric.short_name} {text:>8}")
            if trend and metric.short_name in ("reward", "accuracy"):
                parts.append(trend)
    if row.get("train/unscored"):
        parts.append(f"unscored {row['train/unscored']:.0f}")
    parts.append(duration(row.get(f"timing/train/{TOTAL_STEP}") or 0.0))
    if eta_s is not None:
        parts.append(f"left {duration(eta_s)}")
    return Line("  ".join(parts), "warning" if row.get("train/unscored") else "plain")


def validation_block(row: Row, num_samples: int) -> list[Line]:
    """The main results of a validation; all of its metrics are in the file."""
    found = {key.removeprefix("validation/"): value for key, value in row.items() if key.startswith("validation/")}
    lines = [Line(f"Validation Results (step {row['step']}):", "title")]
    for name, words in VALIDATION_RESULTS:
        if name in found and not (name == "reward" and "accuracy" in found):
            parts = _part_lines(row, "validation/")
            words = "Avg Reward" if name == "accuracy" and not is_accuracy(row) else words
            lines.append(Line(f"  • {words}: {number(found[name])}", "title" if name == "accuracy" else "plain"))
            lines += parts if name in ("accuracy", "reward") else []
    for name in sorted(name for name in found if name.startswith(("pass_", "cons_"))):
        lines.append(Line(f"  • {name.replace('_', '@')}: {number(found[name])}"))
    length = found.get("mean_generation_length", found.get("avg_length"))
    if length is not None:
        lines.append(Line(f"  • Average response length: {length:.1f} tokens"))
    if num_samples:
        lines.append(Line(f"  • Samples processed: {num_samples:,}"))
    if found.get("unscored"):
        lines.append(Line(f"  • Unscored: {found['unscored']:.0f}", "warning"))
    seconds = row.get(f"timing/validation/{TOTAL_VALIDATION}")
    if seconds:
        lines += [Line("Validation Timing:", "title"), Line(f"  • Total validation time: {duration(seconds)}")]
    return lines


def short_model_name(model: str) -> str:
    """For titles: the last two parts of a path; of a checkpoint's weights those of its folder."""
    path = Path(model)
    if path.parts[-3:] == ("policy", "weights", "model"):
        path = path.parents[2]
    return str(Path(*path.parts[-2:]))


def sample_lines(groups: Sequence[Group], count: int, max_characters: int = 600) -> list[Line]:
    """Prompt, answer and reward of the first rollout of the first `count` groups."""
    lines: list[Line] = []
    for index, group in enumerate(groups[:count], start=1):
        if not group.rollouts:
            continue
        rollout = group.rollouts[0]
        verdict = number(rollout.score.reward) if rollout.score.scored else f"unscored: {rollout.score.error}"
        lines.append(Line(f"Sample {index} ({group.task.id}), reward {verdict}", "title"))
        lines += _quoted("prompt", group.task.prompt, max_characters)
        for label, text in _texts(rollout.completion):
            lines += _quoted(label, text, max_characters)
        if group.task.reference is not None:
            lines += _quoted("expected", str(group.task.reference), max_characters)
    return lines


def _texts(completion: Completion) -> list[tuple[str, str]]:
    """The answer, or each turn of a conversation with the environment, with a label."""
    if completion.conversation is None:
        return [("answer", completion.text)]
    turns = completion.conversation.utterances
    return [("answer" if turn.role == "assistant" else turn.role[:8], turn.text) for turn in turns]


def _quoted(label: str, text: str, max_characters: int) -> list[Line]:
    cut = f" … ({len(text) - max_characters:,} more characters)" if len(text) > max_characters else ""
    body = text[:max_characters].strip("\n") + cut
    first, *rest = body.split("\n")
    return [Line(f"  {label:>8} │ {first}"), *(Line(f"  {'':>8} │ {line}") for line in rest)]
