"""GRPO or DPO for a set of traces: the criteria of choice, each with the numbers that speak for or against it.

| situation | method |
|---|---|
| prompts have diverse responses | GRPO: a ranking teaches more than two classes |
| preferred and not preferred are clearly apart | DPO: simple and stable |
| labels are noisy | GRPO: an order within a prompt survives noise better than a threshold |
| a quick first result is wanted | DPO: fewer settings |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

from posttrain.data.traces.report import EXACT_DUPLICATE, Tally
from posttrain.data.traces.statistics import TraceStatistics
from posttrain.files.json_files import JsonObject

Method = Literal["GRPO", "DPO", "GRPO with fresh answers"]

# Shares from which a situation counts as given.
DIVERSE_PROMPTS = 0.5  # of the prompts have three or more different responses
CLEAR_PROMPTS = 0.8  # of the prompts whose rewards differ yield a pair
BETWEEN_AT_MOST = 0.2  # of the traces are neither preferred nor rejected
NOISY_BETWEEN = 0.3  # of the traces are neither preferred nor rejected
NOISY_REPEATS = 0.1  # of the repeated responses got another reward than the first time
FEWEST_REPEATS = 20  # below this many they say nothing
GRADED = 0.5  # of the groups whose rewards differ have three or more different rewards
FEW_PROMPTS = 100  # too few to learn much from
USABLE = 0.2  # of the prompts have different rewards; below this, and with few of them, training is not worth it


@dataclass(frozen=True)
class Criterion:
    situation: str
    speaks_for: Literal["GRPO", "DPO"]
    holds: bool
    numbers: str


@dataclass(frozen=True)
class Advice:
    method: Method
    reason: str
    criteria: list[Criterion]
    cautions: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # what to type next

    def as_dict(self) -> JsonObject:
        return asdict(self)


def advise(found: TraceStatistics, path: str, *, quick: bool = False, options: str = "", settings: str = "") -> Advice:
    """Options of this command are repeated in the next one: `options` of `data pairs`, `settings` of a run.

    `settings` say where the data is, too; without any it is `path`.
    """
    diverse, clear, noisy = _diverse(found), _clear(found), _noisy(found)
    goal = Criterion(
        "a quick first result is wanted", "DPO", quick, "asked for" if quick else "not asked for (--quick)"
    )
    method, reason = _decide(found, diverse.holds, clear.holds, noisy.holds, quick)
    if found.read.holds_pairs_only:
        commands = [f"posttrain dpo data.train.dataset_name=PreferenceDataset data.train.data_path={path}"]
    elif method == "DPO":
        commands = [
            f"posttrain data pairs {path} pairs.jsonl{options}",
            "posttrain dpo data.train.dataset_name=PreferenceDataset data.train.data_path=pairs.jsonl",
        ]
    else:
        mixed = " grpo.num_recorded_per_prompt=1" if method != "GRPO" else ""
        data = settings or f" data.train.dataset_name=TraceGroups data.train.data_path={path}"
        commands = [f"posttrain grpo{data}{mixed}"]
    cautions = [] if found.read.holds_pairs_only else list(_cautions(found, method))
    return Advice(method, reason, [diverse, clear, noisy, goal], cautions, commands)


def _decide(found: TraceStatistics, diverse: bool, clear: bool, noisy: bool, quick: bool) -> tuple[Method, str]:
    if found.read.holds_pairs_only:
        return "DPO", "the rows are preference pairs already"
    if not found.prompts_with_signal:
        return "GRPO with fresh answers", (
            "no prompt has recorded answers with different rewards, so neither a group nor a pair can be learnt from; "
            "sample new answers to these prompts and score them"
        )
    if found.prompts_with_signal < FEW_PROMPTS and _share(found.prompts_with_signal, found.pairs.prompts) < USABLE:
        return "GRPO with fresh answers", (
            f"only {found.prompts_with_signal} of {found.pairs.prompts} prompts have recorded answers with different "
            "rewards; sample new answers to these prompts and score them"
        )
    if noisy:
        return "GRPO", "the labels are noisy, and the order within a prompt survives noise better than a threshold"
    if quick and found.pairs.pairs:
        return "DPO", "a quick first result is wanted, and there are pairs to make"
    if diverse and clear:
        if _share(found.graded, found.with_signal) >= GRADED:
            return "GRPO", "both would work; rewards have many levels, and a ranking uses them all, a pair only two"
        return "DPO", "both would work; rewards have two levels, of which pairs use all, and DPO is simpler to run"
    if clear:
        return "DPO", "preferred and rejected answers are clearly apart, and there are few answers to a prompt to rank"
    if diverse:
        return "GRPO", "there are many answers to a prompt to rank, and no clear line between good and bad ones"
    if found.pairs.pairs:
        return "DPO", "there are too few answers to a prompt for a ranking; the pairs that there are can be used"
    return (
        "GRPO",
        "no pair passes the thresholds, but rewards differ within prompts, and an order is all that GRPO needs",
    )


def _diverse(found: TraceStatistics) -> Criterion:
    share = _share(found.diverse, found.groups)
    numbers = (
        f"{found.diverse} of {found.groups} groups ({share:.0%}) have three or more different responses; "
        f"{_share(found.traces, found.groups):.1f} traces a group"
    )
    return Criterion("prompts have diverse responses", "GRPO", share >= DIVERSE_PROMPTS, numbers)


def _clear(found: TraceStatistics) -> Criterion:
    pairs, signal = found.pairs.prompts_with_pairs, found.prompts_with_signal
    between = _share(found.between, found.traces)
    holds = signal > 0 and _share(pairs, signal) >= CLEAR_PROMPTS and between <= BETWEEN_AT_MOST
    margin = "" if found.pairs.mean_margin is None else f", {found.pairs.mean_margin:.2f} apart on average"
    numbers = (
        f"{pairs} of {signal} prompts with different rewards yield a pair{margin}; {between:.0%} of the traces lie "
        f"between {found.rules.rejected_below:g} and {found.rules.preferred:g}"
    )
    return Criterion("preferred and not preferred are clearly apart", "DPO", holds, numbers)


def _noisy(found: TraceStatistics) -> Criterion:
    repeats = found.exact_duplicates + found.read.filtered.get(EXACT_DUPLICATE, Tally()).count
    conflicts = found.conflicting_duplicates + found.read.conflicting_duplicates
    between = _share(found.between, found.traces)
    contradicted = repeats >= FEWEST_REPEATS and _share(conflicts, repeats) >= NOISY_REPEATS
    numbers = (
        f"{conflicts} of {repeats} repeated responses have another reward than the first time; "
        f"{between:.0%} of the traces lie between the thresholds"
    )
    return Criterion("labels are noisy", "GRPO", contradicted or between >= NOISY_BETWEEN, numbers)


def _cautions(found: TraceStatistics, method: Method) -> Iterator[str]:
    usable = found.pairs.prompts_with_pairs if method == "DPO" else found.prompts_with_signal
    if method != "GRPO with fresh answers" and usable < FEW_PROMPTS:
        yield f"only {usable} of {found.pairs.prompts} prompts can be learnt from"
    if method == "GRPO with fresh answers":
        yield "fresh answers need a reward: set `env`, and `trace_columns.reference` if it compares with an answer"
    if found.prompts_with_signal and not found.pairs.pairs and not (found.preferred and found.rejected):
        yield (
            f"rewards go from {found.reward_min:.4g} to {found.reward_max:.4g}, the thresholds are "
            f"{found.rules.rejected_below:g} and {found.rules.preferred:g}: set --preferred and --rejected-below to "
            "fit, or take --strategy by_margin"
        )
    if found.read.ids_with_several_prompts:
        yield (
            f"{found.read.ids_with_several_prompts} group ids cover several different prompts; "
            "answers are only compared within one prompt"
        )
    if found.read.problems or found.read.broken_files:
        rows = sum(tally.count for tally in found.read.problems.values())
        files = len(found.read.broken_files)
        yield f"{rows} rows and {files} files cannot be used; `posttrain data inspect` names them"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
