"""Runs a pipeline: selects the iteration, then runs stage after stage, reusing what is finished.

A stage is finished when its `stage.json` exists, which is written last. A stage that was killed before that starts
again in an empty folder, except for training and evaluation, which resume.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from posttrain.apps.ship.pipeline.demo import check_names_in_the_demo, make_files, settings_naming, unmade
from posttrain.apps.ship.pipeline.iteration_models import choose_models
from posttrain.apps.ship.pipeline.iteration_plan import StageDecision, decide, plan
from posttrain.apps.ship.pipeline.records import (
    STAGES,
    Iteration,
    StageMark,
    StageName,
    StageRecord,
    read_iterations,
    relative,
    stage_folder,
)
from posttrain.apps.ship.pipeline.stage import Stage, StageContext, Stop
from posttrain.apps.ship.pipeline.stages import ALL_STAGES
from posttrain.apps.ship.pipeline.stages.data import current_content
from posttrain.apps.ship.pipeline.stages.evaluate import check_problems
from posttrain.apps.ship.registry.lineage import code_version
from posttrain.config.pipeline import PipelineConfig
from posttrain.errors import VERDICT_CODES, InputError, place_and_reason
from posttrain.files import durable
from posttrain.files.digests import FileHashes, digest
from posttrain.files.locks import LockHeld, locked, now_text
from posttrain.roles import ShowProgress, no_progress

HASHES_FILE = ".hashes.json"
ELAPSED_FILE = ".elapsed.json"
_BEAT_S = 2.0
LOCK_FILE = ".lock"
_POLL_S = 0.1  # while the training of a killed run holds the lock


@dataclass(frozen=True)
class RunRequest:
    """The options of the command line."""

    until: StageName = STAGES[-1]
    redo_from: StageName | None = None
    new_iteration: bool = False


@dataclass
class SelectedIteration:
    """An iteration with the content hashes of its traces."""

    iteration: Iteration
    data: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DryRun:
    """The iteration that would run, and the decision for each stage. If the demo has files to make, both are
    undetermined: then `unmade` are these files, and `unchecked` the settings that name them."""

    selected: SelectedIteration | None = None
    decisions: tuple[StageDecision, ...] = ()
    unmade: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


class PipelineRunner:
    def __init__(
        self,
        config: PipelineConfig,
        say: Callable[[str], None],
        show_progress: ShowProgress = no_progress,
        *,
        quiet: bool = False,
    ) -> None:
        self.config = config
        self.home = Path(config.pipeline.folder)
        self.say = say
        self._show_progress = show_progress
        self._quiet = quiet

    @cached_property
    def hashes(self) -> FileHashes:
        return FileHashes(self.home / HASHES_FILE)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, request: RunRequest, after_stage: Callable[[], object] = lambda: None) -> int:
        """The exit code. `after_stage` is called whenever there is something new to report."""
        stages = _until(request.until)
        self.check(stages)
        with only_runner(self.home, self.say) as lock:
            if self.config.demo is not None:
                make_files(self.config.demo, self.say, quiet=self._quiet, lock=lock)
            self._check_problems(stages)
            selected = self.select(request)
            for note in selected.notes:
                self.say(note)
            iteration = selected.iteration
            before: dict[str, StageRecord] = {}
            for stage in stages:
                context = self._context(iteration, selected.data, before, lock)
                decision = decide(stage, context)
                iteration, record = self._perform(stage, decision, context)
                if record is not None:
                    before[stage.name] = record
                self.hashes.save()
                after_stage()
            if request.until == STAGES[-1] and not iteration.finished:
                iteration = replace(iteration, running=None, finished=True)
                iteration.write()
                after_stage()
        gate = before.get("gate")
        return VERDICT_CODES[gate.outcome.values["verdict"]] if gate is not None else 0

    def dry_run(self, request: RunRequest) -> DryRun:
        """Check everything that can be checked; write nothing."""
        stages = _until(request.until)
        self.check(stages)
        if self.config.demo is not None and (names := unmade(self.config.demo)):
            waiting = settings_naming(names, self.config, [stage.name for stage in stages])
            if "base_model" not in waiting:
                choose_models(self.config)
            if "traces.path" not in waiting:
                current_content(self.config, self.hashes)
            self._check_problems(stages, waiting)
            return DryRun(unmade=names, unchecked=tuple(waiting))
        self._check_problems(stages)
        selected = self.select(request, write=False)
        return DryRun(selected, tuple(plan(stages, self._context(selected.iteration, selected.data, {}, None))))

    def check(self, stages: Sequence[Stage]) -> None:
        """Check the config and the files that it names, before anything runs."""
        for stage in stages:
            stage.check(self.config)
        check_names_in_the_demo(self.config, [stage.name for stage in stages])

    def _check_problems(self, stages: Sequence[Stage], waiting: Collection[str] = ()) -> None:
        if any(stage.name == "evaluate" for stage in stages):
            check_problems(self.config, waiting)

    # -- selecting the iteration ---------------------------------------------------------------------------------------

    def select(self, request: RunRequest, *, write: bool = True) -> SelectedIteration:
        """An iteration belongs to one set of traces and the models that it began with. Changed traces start a new
        iteration once the last is finished; until then it continues with those that it has read."""
        data = current_content(self.config, self.hashes)
        earlier = read_iterations(self.home)
        last = earlier[-1] if earlier else None
        if last is None or request.new_iteration:
            why = "" if last is None else "asked for with --new-iteration"
            selected = self._begin(1 if last is None else last.number + 1, data, why)
        elif last.data == digest(data):
            selected = SelectedIteration(last, data)
        elif last.finished:
            selected = self._begin(last.number + 1, data, "the traces have changed")
        else:
            selected = self._continue(last, data)
        if request.redo_from is not None:
            selected.iteration = self._with_redone(selected, request.redo_from)
        if write:
            selected.iteration.write()
        return selected

    def _begin(self, number: int, data: list[str], why: str) -> SelectedIteration:
        start, start_why, incumbent = choose_models(self.config)
        folder = self.home / f"iteration_{number}"
        iteration = Iteration(number, folder, now_text(), digest(data), start, start_why, incumbent)
        note = f"iteration {number} begins{f': {why}' if why else ''}; it trains {start.text} ({start_why})"
        return SelectedIteration(iteration, data, [note])

    def _continue(self, last: Iteration, data: list[str]) -> SelectedIteration:
        """The traces changed before the iteration was finished: it continues with its dataset, if that was made."""
        read = last.record("traces")
        if read is not None and last.record("dataset") is not None:
            frozen = [str(content) for content in read.inputs["files"]["traces"]]
            context = self._context(last, frozen, {}, None)
            if all(decision.action == "reuse" for decision in plan(ALL_STAGES[:2], context)):
                note = (
                    f"the traces have changed since iteration {last.number} read them; it continues with those, and "
                    "the next one takes the new ones (--new-iteration begins it now)"
                )
                return SelectedIteration(last, frozen, [note])
        return SelectedIteration(replace(last, data=digest(data)), data)

    def _with_redone(self, selected: SelectedIteration, first: StageName) -> Iteration:
        iteration = selected.iteration
        place = STAGES.index(first)
        for name in STAGES[:place]:
            if name not in iteration.stages or iteration.stages[name].outdated:
                raise InputError(
                    f"--from {first}: {name} has not run in iteration {iteration.number}; leave --from out, or begin "
                    "earlier"
                )
        redone = {name: iteration.redone.get(name, 0) + (STAGES.index(name) >= place) for name in STAGES}
        if place <= STAGES.index("evaluate"):
            _, _, incumbent = choose_models(self.config)
            iteration = replace(iteration, incumbent=incumbent)
        return replace(iteration, redone={name: count for name, count in redone.items() if count}, finished=False)

    # -- one stage -----------------------------------------------------------------------------------------------------

    def _context(
        self, iteration: Iteration, data: list[str], before: dict[str, StageRecord], lock: int | None
    ) -> StageContext:
        return StageContext(
            config=self.config,
            home=self.home,
            iteration=iteration,
            data=data,
            before=dict(before),
            hashes=self.hashes,
            say=self.say,
            show_progress=self._show_progress,
            quiet=self._quiet,
            lock=lock,
        )

    def _perform(
        self, stage: Stage, decision: StageDecision, context: StageContext
    ) -> tuple[Iteration, StageRecord | None]:
        iteration, name = context.iteration, f"{stage.name:<9}"
        if decision.action == "skip":
            self.say(f"{name} skipped: {decision.why}")
            record, mark = None, StageMark(skipped=decision.why)
        elif decision.record is not None:
            record = decision.record
            self.say(f"{name} unchanged: {record.outcome.headline}")
            mark = StageMark(relative(record.folder, self.home), record.folder.parent.name != iteration.folder.name)
        else:
            assert decision.action == "run", "stages come after those that they read"
            self.say(f"{name} runs: {decision.why}")
            iteration = iteration.running_stage(stage.name)
            iteration.write()
            record = self._execute(stage, decision, replace(context, iteration=iteration))
            self.say(f"{name} done in {record.seconds:.1f} s: {record.outcome.headline}")
            mark = StageMark(relative(record.folder, self.home))
        if iteration.stages.get(stage.name) != mark or iteration.running == stage.name:
            iteration = replace(iteration, stages={**iteration.stages, stage.name: mark}, running=None)
            iteration.write()
        return iteration, record

    def _execute(self, stage: Stage, decision: StageDecision, context: StageContext) -> StageRecord:
        folder = context.iteration.folder / stage_folder(stage.name, decision.key)
        if not stage.resumes or (folder / "stage.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a killed attempt, or of one whose results were deleted
        durable.make_folder(folder)
        clock = _Clock(folder)
        try:
            outcome = stage.work(replace(context, heartbeat=clock.beat), folder)
        except (InputError, Stop, KeyboardInterrupt):
            clock.beat(at_once=True)
            raise
        record = StageRecord(
            stage=stage.name,
            key=decision.key,
            inputs=decision.inputs or {},
            outcome=outcome,
            seconds=clock.seconds,
            finished_at=now_text(),
            code_version=code_version(),
            folder=folder,
        )
        record.write()
        return record


class _Clock:
    """The time of a stage over all of its attempts, stored in its folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / ELAPSED_FILE
        try:
            self._earlier = float(json.loads(self._file.read_text())["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            self._earlier = 0.0
        self._started = self._written = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._earlier + time.monotonic() - self._started

    def beat(self, *, at_once: bool = False) -> None:
        if at_once or time.monotonic() - self._written >= _BEAT_S:
            durable.write_text(self._file, json.dumps({"seconds": self.seconds}))
            self._written = time.monotonic()


def _until(last: StageName) -> tuple[Stage, ...]:
    return ALL_STAGES[: STAGES.index(last) + 1]


@contextmanager
def only_runner(home: Path, say: Callable[[str], None]) -> Iterator[int]:
    """One process at a time for a pipeline's folder. Yields the descriptor that holds the lock, for the training to
    inherit.

    If the pipeline is killed while its training is still saving, the next run waits for it.
    """
    progress = "`posttrain pipeline status` shows its progress"
    busy = f"{home}: another process is running this pipeline ({{holder}}); {progress}"
    with ExitStack() as held:
        is_announced = False
        while True:
            try:
                durable.make_folder(home)
                descriptor = held.enter_context(locked(home / LOCK_FILE, wait_s=0, refusal=busy))
                break
            except LockHeld as error:
                holder = error.holder  # if it has ended, its training has the lock
                if holder is None or not holder.is_on_this_machine or holder.is_alive is not False:
                    raise
            except OSError as error:
                raise InputError(f"pipeline.folder: {home} cannot be written ({place_and_reason(error)})") from error
            if not is_announced:
                say("the run before was killed and its training is still saving; waiting for it")
                is_announced = True
            time.sleep(_POLL_S)
        yield descriptor
