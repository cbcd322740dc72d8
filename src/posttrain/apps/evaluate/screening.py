"""Which prompts a GRPO run can learn from: answers are sampled with the run's own model and settings, and scored by its
rewards.

A prompt is kept if its mean reward is within a range and its rewards differ, as GRPO learns from differences within a
group. An unscored answer is ignored, not counted as wrong. Prompts are measured in a seeded order, so any part of them
is a random sample; sampling noise is keyed by prompt and answer, and differs from that of training, which begins with
step 1.

Kept rows are in NAME.jsonl, all rewards in NAME.screen.jsonl, their settings in NAME.screen.json. Rewards are appended
batch by batch and reach the disk before the next batch begins. The first line of their file is what determines them. So
an interrupted screening can continue, and another range of rewards needs no new samples.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np

from posttrain import __version__
from posttrain.apps.evaluate.build import ANSWERS, first_answers
from posttrain.apps.evaluate.identity import digest, files_digest, judge_of, plain_identity, what_differs
from posttrain.apps.evaluate.runner import TaskQueue
from posttrain.build import start_samplers
from posttrain.checkpointing import Interruption, SaveDeadline
from posttrain.config import GrpoRunConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import TaskDataset
from posttrain.data.entries import Entry, read_entries
from posttrain.data.named_datasets import response_spec
from posttrain.data.row_dataset import keyed_order
from posttrain.data.sources import Row
from posttrain.errors import ExitCode, InputError, StopRequested
from posttrain.files import durable
from posttrain.files.json_files import JsonObject, parse_json
from posttrain.files.locks import locked
from posttrain.files.redaction import without_credentials
from posttrain.models.accepted_names import model_fingerprint, resolve_model
from posttrain.models.loading import check_model_exists, expand_images_for, load_tokenizer
from posttrain.orchestration.rank import Rank
from posttrain.orchestration.sharded import ShardedEngine
from posttrain.orchestration.workers import call_all
from posttrain.recipes.grpo import GrpoRecipe, sampling_of
from posttrain.reporting.run_files import append_rows, write_text
from posttrain.roles import RolloutSource, ShowProgress
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.types import Task

Verdict = Literal["kept", "too hard", "too easy", "no difference", "unscored"]
# Samples per engine in one batch: enough to keep the device busy, few enough to lose little when interrupted.
_TOKENS_PER_BATCH = {"cuda": 1 << 20, "cpu": 1 << 13}
ENDING = ".jsonl"
MEAN_COLUMN, COUNT_COLUMN = "screen_mean_reward", "screen_num_scored"  # of a kept row, beside its own columns
Rewards = Sequence[float | None]  # of the answers to one prompt; None: unscored
_MAX_VALUES = 17  # means of 16 answers that are right or wrong


@dataclass(frozen=True)
class RewardRange:
    """Of mean rewards, ends included, in units of the environment's reward."""

    low: float = 0.05
    high: float = 0.95
    is_default: bool = True  # for rewards from 0 to 1

    def verdict(self, rewards: Rewards) -> Verdict:
        scored = [reward for reward in rewards if reward is not None]
        if len(scored) < 2:
            return "unscored"
        mean = fmean(scored)
        if mean < self.low:
            return "too hard"
        if mean > self.high:
            return "too easy"
        return "kept" if min(scored) < max(scored) else "no difference"

    def check(self, rewards: Sequence[float]) -> None:
        if self.is_default and rewards and not 0 <= min(rewards) <= max(rewards) <= 1:
            raise InputError(
                f"rewards from {min(rewards):g} to {max(rewards):g} were measured, and without --keep rewards are "
                "taken to be from 0 to 1; give --keep LOW:HIGH in units of the reward. What was measured is saved"
            )


class NothingScored(InputError):
    exit_code = ExitCode.NO_PROGRESS


@dataclass
class Screening:
    config: GrpoRunConfig
    out: Path
    num_samples: int
    keep: RewardRange
    say: Callable[[str], None]
    limit: int | None = None  # prompts
    minutes: float | None = None  # of measuring; the model's loading does not count

    def __post_init__(self) -> None:
        if self.num_samples < 2:
            raise InputError(f"--samples {self.num_samples}: rewards of at least 2 answers can differ")
        if self.minutes is not None and not self.minutes > 0:
            raise InputError(f"--minutes {self.minutes:g}: a positive number is needed")
        ScreenFiles.check_name(self.out)

    @cached_property
    def recipe(self) -> GrpoRecipe:
        return GrpoRecipe(self.config)

    @cached_property
    def entry(self) -> Entry:
        """The dataset whose rows are screened, each of them once."""
        entries = read_entries(self.config.data.train, self.config.data.default)
        if len(entries) > 1:
            raise InputError(
                f"data.train lists {len(entries)} datasets, and the rows of one file are read in one way; screen one "
                "at a time: data.train='{dataset_name: …, data_path: …}'"
            )
        entry = entries[0].model_copy(update={"repeat": None})
        if entry.holds_recorded_groups:
            raise InputError(f"data.train.dataset_name = {entry.dataset_name}: its answers have their rewards already")
        return entry

    def execute(self, show_progress: ShowProgress) -> tuple[int, JsonObject]:
        """Measure the prompts that were not measured before, and write those to keep. Returns exit code and summary."""
        policy = self.config.policy
        self.recipe.check()
        check_model_exists(policy.model_name)
        tokenizer = policy.tokenizer
        chat = ChatFormat(load_tokenizer(tokenizer.name), tokenizer.chat_template, tokenizer.chat_template_kwargs or {})
        chat.image_tokens = expand_images_for(policy.model_name, chat.tokenizer)
        dataset = self.recipe.load_tasks(self.entry, chat)
        if self.entry.split_validation_size and self.config.data.validation is None:
            self.say(
                "data.train.split_validation_size: a run on the kept rows validates on some of them, so its accuracy "
                "cannot be compared with that of a run on all rows; set data.validation for that"
            )
        for reason, count in dataset.dropped.items():
            self.say(f"data.train: {count} rows left out: {reason}")
        chosen = [int(place) for place in keyed_order(len(dataset), self.config.grpo.seed, 0)][: self.limit]
        identity = self._identity(dataset, chat)
        code = 0
        with ExitStack() as cleanup:
            files = ScreenFiles.open(self.out, identity)
            cleanup.callback(files.close)
            missing = [dataset[place] for place in chosen if place not in files.rewards]
            if missing:
                before = f", {len(chosen) - len(missing)} of them measured before" if len(missing) < len(chosen) else ""
                self.say(f"{dataset.name}: {len(chosen)} prompts{before}, {self.num_samples} answers each")
                code = self._measure(missing, chat, files, show_progress, cleanup)
            measured = {place: files.rewards[place] for place in sorted(chosen) if place in files.rewards}
            self.keep.check(_scored(measured.values()))
            summary = self._summary(measured, len(chosen) - len(measured), identity)
            rows = self._kept_rows(dataset, measured)
            if rows:
                files.write(rows, summary)
            elif code == 0:
                raise InputError(_why_none(summary))
        return code, summary

    def _measure(
        self,
        tasks: Sequence[Task],
        chat: ChatFormat,
        files: ScreenFiles,
        show_progress: ShowProgress,
        cleanup: ExitStack,
    ) -> int:
        workers = start_samplers(self.config, chat)
        cleanup.callback(workers.close)
        size = self._prompts_per_engine(call_all(workers, Rank.facts)[0].device) * len(workers.workers)
        batches = [tasks[start : start + size] for start in range(0, len(tasks), size)]
        interruption = Interruption(answer="writing what was measured, then stopping")
        interruption.tell(workers.request_stop)
        environment, turns = self.recipe.scoring(chat, self.say, cleanup, interruption.tell)
        source = FreshRollouts(
            TaskQueue(batches),
            ShardedEngine(workers),
            environment,
            num_samples=self.num_samples,
            sampling=sampling_of(self.config.policy, chat.stop_token_ids),
            seed=self.config.grpo.seed,
            label=ANSWERS,
            after_step=True,
        )
        source = turns(source)
        limit_s = None if self.minutes is None else 60 * self.minutes
        with show_progress(ANSWERS, len(tasks) * self.num_samples) as progress, interruption:
            source.show_progress = partial(first_answers, progress)
            try:
                measure(
                    source, [len(batch) for batch in batches], files, self.keep, SaveDeadline(limit_s), interruption
                )
            except FloatingPointError as error:
                raise InputError(f"policy.model_name: the model cannot be sampled from: {error}") from error
        return interruption.exit_code

    def _prompts_per_engine(self, device: str) -> int:
        generation = self.config.policy.generation
        assert generation is not None, "GRPO samples"
        num_answers = _TOKENS_PER_BATCH[device] // generation.max_new_tokens
        if device == "cuda":
            num_answers = max(num_answers, generation.native_cfg.max_batch_size)
        return max(1, num_answers // self.num_samples)

    def _identity(self, dataset: TaskDataset, chat: ChatFormat) -> JsonObject:
        """Everything that determines the rewards, and nothing that changes only their speed."""
        config, policy = self.config, self.config.policy
        generation, tokenizer = policy.generation, policy.tokenizer
        assert generation is not None, "GRPO samples"
        engine = generation.vllm_cfg if generation.uses_vllm else generation.native_cfg
        model = resolve_model(policy.model_name)
        fingerprint = model_fingerprint(model, self.say)
        found = {
            "model": policy.model_name if fingerprint is None else None,
            "model_fingerprint": fingerprint,
            "tokenizer": None
            if tokenizer.name == policy.model_name
            else files_digest({"tokenizer": {"name": tokenizer.name}}),
            "prompts_hash": dataset.fingerprint,
            "metadata_hash": digest([dict(task.metadata) for task in dataset]),  # rewards read it
            "engine": [generation.backend, policy.precision, engine.precision],
            "max_total_sequence_length": policy.max_total_sequence_length,
            "max_rollout_turns": config.grpo.max_rollout_turns,
            "sampling": asdict(sampling_of(policy, chat.stop_token_ids)),
            "env": {
                name: judge_of(environment.model_dump()) for name, environment in self.recipe.environments().items()
            },
            "seed": config.grpo.seed,
            "num_samples": self.num_samples,
        }
        plain: JsonObject = without_credentials(found)
        return plain

    def _kept_rows(self, dataset: TaskDataset, measured: dict[int, Rewards]) -> list[tuple[Row, float, int]]:
        kept = {
            place: _scored([rewards]) for place, rewards in measured.items() if self.keep.verdict(rewards) == "kept"
        }
        if not kept:
            return []
        rows = list(self.entry.rows(response_spec(self.entry, needs_reference=True)))
        numbers = {place: int(dataset[place].id.rpartition(":")[2]) for place in kept}  # ids are "<dataset>:<row>"
        return [(rows[numbers[place]], fmean(scored), len(scored)) for place, scored in kept.items()]

    def _summary(self, measured: dict[int, Rewards], num_missing: int, identity: JsonObject) -> JsonObject:
        found = list(measured.values())
        verdicts = Counter(map(self.keep.verdict, found))
        means = [fmean(scored) for rewards in found if (scored := _scored([rewards]))]
        names: tuple[Verdict, ...] = ("kept", "too hard", "too easy", "no difference", "unscored")
        return {
            "out": str(self.out),
            "model": self.config.policy.model_name,
            "num_samples": self.num_samples,
            "seed": self.config.grpo.seed,
            "keep": [self.keep.low, self.keep.high],
            "prompts": {**{name: verdicts[name] for name in names}, "not measured": num_missing},
            "num_unscored_answers": sum(reward is None for rewards in found for reward in rewards),
            "mean_reward": fmean(means) if means else None,
            "histogram": histogram(means),
            "posttrain_version": __version__,
            "identity": identity,
            "config": without_credentials(self.config.model_dump(by_alias=True)),
        }


def measure(
    source: RolloutSource,
    batch_sizes: Sequence[int],
    files: ScreenFiles,
    keep: RewardRange,
    deadline: SaveDeadline,
    interruption: Interruption,
) -> None:
    """Batch after batch, each saved before the next begins, until a signal or the time limit. A batch that a signal
    interrupts is left out."""
    deadline.start()
    for size in batch_sizes:
        if interruption.is_asked() or deadline.must_save_now():
            return
        try:
            groups = source.take(size, step=0).groups
        except StopRequested:
            return
        rewards = {group.task.draw: group.rewards for group in groups}
        reasons = {
            group.task.draw: next(rollout.score.error or "" for rollout in group.rollouts if not rollout.score.scored)
            for group in groups
            if None in group.rewards
        }
        if not files.rewards and not _scored(rewards.values()):
            raise NothingScored(f"no answer could be scored: {next(iter(reasons.values()))}")
        files.append(rewards, reasons)
        keep.check(_scored(rewards.values()))
        deadline.mark_step()


def histogram(means: Sequence[float]) -> list[tuple[float, float, int]]:
    """(lowest, highest, how many): one for each value where they are few, as of rewards 0 and 1, otherwise ten equal
    parts."""
    values = Counter(means)
    if len(values) <= _MAX_VALUES:
        return [(value, value, values[value]) for value in sorted(values)]
    counts, edges = np.histogram(means, bins=10)
    return [(float(low), float(high), int(n)) for low, high, n in zip(edges, edges[1:], counts, strict=False)]


def _why_none(summary: JsonObject) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in summary["prompts"].items() if count)
    means = ", ".join(f"{low:.3g} ({count})" for low, _, count in sorted(summary["histogram"], key=lambda b: -b[2])[:5])
    return (
        f"no prompt has a mean reward within --keep {summary['keep'][0]:g}:{summary['keep'][1]:g} and answers that "
        f"differ: {counts}. The most frequent mean rewards (prompts): {means or 'none'}. Another --keep samples "
        "nothing again"
    )


def _scored(prompts: Iterable[Rewards]) -> list[float]:
    return [reward for rewards in prompts for reward in rewards if reward is not None]


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass
class ScreenFiles:
    """Open for writing, by this process alone. `rewards` are by the place of the prompt in its dataset."""

    out: Path
    rewards: dict[int, Rewards] = field(default_factory=dict)
    _lock: ExitStack = field(default_factory=ExitStack)

    @property
    def journal(self) -> Path:
        return self.out.with_suffix(".screen.jsonl")

    @property
    def summary(self) -> Path:
        return self.out.with_suffix(".screen.json")

    @classmethod
    def check_name(cls, out: Path) -> None:
        if out.suffix != ENDING or out.name.endswith(".screen.jsonl"):
            raise InputError(f"--out {out}: rows are written as jsonl; the name must end in {ENDING}")
        if out.is_dir():
            raise InputError(f"--out {out}: is a folder; name the file to write")
        if not out.absolute().parent.is_dir():
            raise InputError(f"--out {out}: the folder {out.absolute().parent} does not exist")

    @classmethod
    def open(cls, out: Path, identity: Mapping[str, object]) -> ScreenFiles:
        cls.check_name(out)
        files = cls(out)
        busy = f"--out {out}: {{holder}} is screening into this file; wait for it, or name another"
        files._lock.enter_context(locked(out.with_name(f".{out.stem}.screen.lock"), wait_s=0, refusal=busy))
        try:
            files._read(plain_identity(identity))
        except BaseException:
            files.close()
            raise
        return files

    def _read(self, identity: dict[str, object]) -> None:
        durable.cut_torn_line(self.journal)
        lines = self.journal.read_bytes().splitlines() if self.journal.exists() else []
        if not lines:
            if self.out.exists():
                raise InputError(
                    f"--out {self.out}: exists, without the {self.journal.name} of a screening; name another"
                )
            append_rows(self.journal, [identity])
            return
        try:
            found, *rows = map(parse_json, lines)
            differing = what_differs(found, identity)
            # Where an answer is unscored, the prompt is measured again.
            self.rewards = {row["row"]: row["rewards"] for row in rows if None not in row["rewards"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{self.journal}: not the rewards of a screening ({error}); name another --out") from error
        if differing:
            if rows or self.out.exists():
                raise InputError(f"--out {self.out}: was screened with other settings: {differing}. Name another file")
            self.journal.unlink()  # of an attempt that failed before it had measured anything
            append_rows(self.journal, [identity])

    def append(self, measured: Mapping[int, Rewards], errors: Mapping[int, str]) -> None:
        """They are on the disk when this returns. `errors`: why an answer to that prompt could not be scored."""
        rows = [
            {"row": place, "rewards": list(rewards), **({"error": errors[place]} if place in errors else {})}
            for place, rewards in measured.items()
        ]
        append_rows(self.journal, rows)
        self.rewards |= measured

    def write(self, kept: Sequence[tuple[Row, float, int]], summary: Mapping[str, object]) -> None:
        """The kept rows with their mean reward and the number of scored answers, and the summary."""
        durable.write_bytes(self.out, "".join(_line(*row) for row in kept).encode())
        write_text(self.summary, json.dumps(summary, indent=2) + "\n")

    def close(self) -> None:
        self._lock.close()


def _line(row: Row, mean: float, count: int) -> str:
    values = {**row.values, MEAN_COLUMN: mean, COUNT_COLUMN: count}
    try:
        return json.dumps(values, ensure_ascii=False) + "\n"
    except TypeError as error:
        raise InputError(
            f"{row.where}: cannot be written as JSON ({error}); leave that column out of the data"
        ) from error
