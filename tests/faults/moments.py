"""`kill -9` just before each kind of change that a command makes to its files, and inside of named functions.

A command is run once with a list of its file operations (`processes.watch_changes`); those that differ in numbers only
are one kind. It is then killed at the first and at the last change of each kind: `open /run/metrics.jsonl`,
`remove /run/removing_step_#/checksums.json`. So no moment depends on how fast the machine is.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import tiny_pipelines
import tiny_runs

from faults import processes
from faults.campaign import Case, NotPossibleHere, Part
from faults.kills import files_in, made_by_pipeline, weights_in
from faults.lab import STEPS, Lab, assert_no_traceback
from faults.processes import Finished, Surroundings

RUN = "dpo-kept"
NOT_ALWAYS = re.compile("attempts|logs|heartbeat")  # heartbeats and lines of a log depend on the time
TOKENS = {r"\*": "[0-9a-f]{32}", r"\#": r"[0-9]+"}
# Where a run is killed in mid-call: the n-th call. Two validations come before, at the steps 0 and 2.
CALLS = {
    "dpo-kept": {
        "validation": ("posttrain.algorithms.dpo:with_accuracy", 6),
        "last-step": ("posttrain.algorithms.dpo:Dpo.step", STEPS),
        "last-validation": ("posttrain.algorithms.dpo:Dpo.validate", 4),
        "report": ("posttrain.reporting.report:render_page", 2),
        "loading": ("posttrain.checkpointing.save_and_resume:CheckpointStore.latest", 1),
    },
    "grpo-kept": {
        "validation": ("posttrain.algorithms.grpo:reward_metrics", 2),
        "last-step": ("posttrain.algorithms.grpo:Grpo.step", STEPS),
        "report": ("posttrain.reporting.report:render_page", 2),
    },
}
ROWS = "iteration_1/train-*/*/metrics.jsonl"
PROMOTION = "posttrain.apps.ship.registry.store:MlflowStore"
# Also in mid-change: SQLite's own writes are not seen, but what is between its transactions is.
PROMOTION_CALLS = {
    "change": (f"{PROMOTION}.add_change", 1),
    "log": (f"{PROMOTION}._append", 1),
    "aliases": (f"{PROMOTION}.set_aliases", 1),
}


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for kind, calls in CALLS.items():
        for name, call in calls.items():
            if not short or name in ("validation", "report"):
                yield Case(f"{kind}:in:{name}", partial(die_in_run, lab, kind, call))
    if short:
        yield from at_changes("run", changes_of_run(lab, RUN, r"removing_step_\d+ ?|remove .*\.metadata$"), lab, RUN)
        return
    yield from at_changes("run", changes_of_run(lab, RUN, "."), lab, RUN)
    yield from at_changes("grpo", changes_of_run(lab, "grpo-kept", "/rollouts/"), lab, "grpo-kept")
    for name, (make, check) in COMMANDS.items():
        for kind, count in changes(lab, name, partial(make, lab)).items():
            yield Case(f"{name}:{named(kind)}", partial(die_in_command, lab, make, check, (kind, count)))
    for name, call in PROMOTION_CALLS.items():
        yield Case(f"promote:in:{name}", partial(die_in_promotion, lab, call))
    yield Case("pipeline:each-stage", partial(die_in_each_stage, lab), tries=2 * len(_stages()) + 1)


PART = Part(
    "moments",
    "killed before any kind of change of its files, a command given again ends as if it had not been",
    cases,
    7,
)


# -- which changes there are -------------------------------------------------------------------------------------------


def changes(lab: Lab, name: str, make: Callable[[Path], list[str]], wanted: str = ".") -> dict[str, int]:
    """The kinds of changes that a command makes, with how often. Folders that are made hold nothing yet."""

    def trace(shared: Path) -> Counter[str]:
        finished = processes.run(make(shared), shared / "log", Surroundings(trace=shared / "trace"))
        assert finished.code == 0, finished
        lines = (shared / "trace").read_text().splitlines()
        inside = [line.replace(str(shared), "") for line in lines if str(shared) in line]
        return Counter(
            re.sub(r"\d+", "#", re.sub(r"[0-9a-f]{32}", "*", line))
            for line in inside
            if not line.startswith(("mkdir", "rmdir"))
        )

    found: Counter[str] = lab.shared(f"changes-{name}", trace)
    assert found, f"{name} changes no file"
    return {kind: count for kind, count in found.items() if re.search(wanted, kind)}


def changes_of_run(lab: Lab, kind: str, wanted: str) -> dict[str, int]:
    return changes(lab, kind, lambda folder: lab.arguments(kind, folder / "run"), wanted)


def named(kind: str) -> str:
    return kind.replace(" ", ":")


def pattern_of(kind: str) -> str:
    """Of lines as `watch_changes` writes them, with absolute paths."""
    text = re.escape(kind).replace(r"\ ", r" \S*")
    for token, digits in TOKENS.items():
        text = text.replace(token, digits)
    return f"^{text}$"


def at_changes(name: str, kinds: dict[str, int], lab: Lab, run: str) -> Iterable[Case]:
    for kind, count in kinds.items():
        for place, number in {"first": 1, "last": count}.items():
            if place == "last" or (count > 1 and "step_#" not in kind):  # in a checkpoint the last one has it all
                check = partial(die_in_run, lab, run, None, die_at=(pattern_of(kind), number))
                yield Case(f"{name}:{place}:{named(kind)}", check)


# -- runs --------------------------------------------------------------------------------------------------------------


def die_in_run(
    lab: Lab,
    kind: str,
    call: tuple[str, int] | None,
    folder: Path,
    chance: random.Random,
    die_at: tuple[str, int] | None = None,
) -> None:
    whole = lab.whole(kind)
    for attempt in range(3 if die_at else 1):  # a heartbeat or a line of a log is not written every time
        run = folder / f"try{attempt}" / "run"  # changes are named from `run` on
        surroundings = Surroundings(die_in=call, die_at=die_at)
        killed = processes.run(lab.arguments(kind, run), folder / "killed.log", surroundings)
        if killed.code != 0:
            break
    if die_at and killed.code == 0:
        assert NOT_ALWAYS.search(die_at[0]), f"the run made no change {die_at[0]} in three tries"
        raise NotPossibleHere("the run made no such change in three tries")
    assert killed.code == -signal.SIGKILL, killed
    finished = processes.run(lab.arguments(kind, run), folder / "log")
    assert_no_traceback(finished)
    lab.assert_same_end(kind, run, finished)
    left = {name for name in names_in(run) if "step_" in name or name.endswith(".partial")}
    assert left == {name for name in names_in(whole) if "step_" in name}, f"left behind or missing: {left}, {finished}"
    page = (run / "report.html").read_text()
    assert page.rstrip().endswith("</html>"), "a torn report"
    assert f"{STEPS} / {STEPS}" in page, "an old report"


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


# -- other commands ----------------------------------------------------------------------------------------------------


def convert(lab: Lab, folder: Path) -> list[str]:
    return ["convert", str(lab.whole("dpo")), "--to", str(folder / "hf")]


def evaluate(lab: Lab, folder: Path) -> list[str]:
    reward = f"env.mine.function={lab.data / 'rewards.py:odd'}"
    settings = (reward, "generation.num_prompts_per_step=1")
    return tiny_runs.evaluation(lab.model, lab.data / "held_out_questions.jsonl", folder / "eval", *settings)


def same_conversion(folder: Path, whole: Path, finished: Finished) -> None:
    assert finished.code == 0, finished
    assert weights_in(folder / "hf") == weights_in(whole / "hf")
    assert names_in(folder) == ["hf", "killed.log", "log"], f"left behind: {names_in(folder)}"


def same_evaluation(folder: Path, whole: Path, finished: Finished) -> None:
    assert finished.code == 0, finished
    ours, expected = files_in(folder / "eval"), files_in(whole / "eval")
    assert sorted(ours) == sorted(expected), f"left behind or missing: {sorted(ours)}"
    assert ours["problems.jsonl"] == expected["problems.jsonl"], "other answers"


def same_registry(folder: Path, whole: Path, finished: Finished) -> None:
    from posttrain.apps.ship.registry import Registry

    assert finished.code == 0, finished
    versions = Registry(folder / "registry").versions("m")
    assert versions
    assert all(not version.lineage.gate for version in versions)
    for version in versions:
        shown = ["registry", "show", f"m@{version.version}", "--verify", "--registry", str(folder / "registry")]
        checked = processes.run(shown, folder / "log")
        assert checked.code == 0, checked
    stored = [path.name for path in (folder / "registry" / "artifacts" / "m").iterdir()]
    assert len(stored) == len(versions), f"files without a version: {stored}"


def add(lab: Lab, folder: Path) -> list[str]:
    require_registry()
    return ["registry", "add", "m", str(lab.model), "--registry", str(folder / "registry")]


COMMANDS: dict[str, tuple[Callable[[Lab, Path], list[str]], Callable[[Path, Path, Finished], None]]] = {
    "convert": (convert, same_conversion),
    "eval": (evaluate, same_evaluation),
    "registry-add": (add, same_registry),
}


def die_in_command(
    lab: Lab,
    make: Callable[[Lab, Path], list[str]],
    check: Callable[[Path, Path, Finished], None],
    change: tuple[str, int],
    folder: Path,
    chance: random.Random,
) -> None:
    kind, count = change
    name = next(name for name, (of, _) in COMMANDS.items() if of is make)
    changes(lab, name, partial(make, lab))
    die_at = (pattern_of(kind), chance.randint(1, count))
    killed = processes.run(make(lab, folder), folder / "killed.log", Surroundings(die_at=die_at))
    assert killed.code == -signal.SIGKILL, f"not killed before {kind}: {killed}"
    check(folder, lab.folder / "shared" / f"changes-{name}", processes.run(make(lab, folder), folder / "log"))


def require_registry() -> None:
    try:
        import mlflow  # noqa: F401
    except ImportError:
        raise NotPossibleHere("the registry needs the extra `registry`") from None


def die_in_promotion(lab: Lab, call: tuple[str, int], folder: Path, chance: random.Random) -> None:
    """MLflow's aliases, which its own pages show, follow the stages."""
    from posttrain.apps.ship.registry import Registry

    changes(lab, "registry-add", partial(add, lab))
    # A path of its own: MLflow keeps the databases open that this process has opened, also deleted ones.
    registry = folder / f"registry-{call[0].rpartition('.')[2]}-{call[1]}"
    shutil.copytree(lab.folder / "shared" / "changes-registry-add" / "registry", registry)
    words = ["registry", "promote", "m", "1", "--to", "canary", "--force", "--why", "tried"]
    words += ["--registry", str(registry)]
    killed = processes.run(words, folder / "killed.log", Surroundings(die_in=call))
    assert killed.code == -signal.SIGKILL, killed
    finished = processes.run(words, folder / "log")
    assert finished.code == 0, finished
    opened = Registry(registry)
    stages = [str(one.stage) for one in opened.versions("m")]
    assert stages == ["canary"], f"{stages}: {finished}"
    assert len(opened.history("m")) == 1, "promoted twice"
    aliases = opened._store.client.get_registered_model("m").aliases
    assert {name: str(version) for name, version in aliases.items()} == {"canary": "1"}, f"{aliases}: {finished}"


# -- pipeline ----------------------------------------------------------------------------------------------------------


def _stages() -> Sequence[str]:
    from posttrain.apps.ship.pipeline.records import STAGES

    return STAGES


def die_in_each_stage(lab: Lab, folder: Path, chance: random.Random) -> None:
    """One pipeline, killed when each stage has begun, in mid-training, and when each stage is done but not recorded."""
    require_registry()

    def make(shared: Path) -> tuple[Path, Path]:
        world = tiny_pipelines.save_world(shared / "world")
        file = tiny_pipelines.write_file(shared / "p.yaml", tiny_pipelines.settings(world, shared / "home"))
        finished = processes.run(["pipeline", "run", str(file), "--quiet"], shared / "log", limit_s=300)
        assert finished.code == 0, finished
        return world, shared / "home"

    world, whole = lab.shared("pipeline-by-stage", make)
    home = folder / "home"
    file = tiny_pipelines.write_file(folder / "p.yaml", tiny_pipelines.settings(world, home))
    command = ["pipeline", "run", str(file), "--quiet"]
    for stage in _stages():
        for moment in (rf"^mkdir \S*/{stage}-[0-9a-f]+$", rf"^rename \S*/{stage}-[0-9a-f]+/\.stage\.json\.partial "):
            if stage == "train" and moment.startswith("^rename"):
                training = processes.begin(command, folder / "killed.log")
                begun = training.wait_for(lambda: any(tiny_runs.count_rows(one.parent) > 5 for one in home.glob(ROWS)))
                assert begun, f"the training was over before it could be killed: {training.finish()}"
                training.kill_all()
            killed = processes.run(command, folder / "killed.log", Surroundings(die_at=(moment, 1)), limit_s=300)
            assert killed.code == -signal.SIGKILL, f"not killed in {stage} ({moment}): {killed}"
    finished = processes.run(command, folder / "log", limit_s=300)
    assert finished.code == 0, finished
    assert made_by_pipeline(home) == made_by_pipeline(whole)
