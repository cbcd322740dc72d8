"""`kill -9` at random moments: the same command, given again, ends with the bits of a run never killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import tiny_pipelines
import tiny_runs

from faults import processes
from faults.campaign import Case, NotPossibleHere, Part
from faults.lab import STEPS, Lab
from faults.processes import Running, Surroundings

KINDS = ("grpo", "dpo", "sft", "rm", "grpo-lora")
KINDS_IN_BACKGROUND = ("dpo-background", "grpo-background", "grpo-lora-background")
RAY_KILLS = 4  # in a row, before the run may end: a start of Ray takes half a minute
DEDICATED_CASES, DEDICATED_KILLS = 10, 5


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    alone, asynchronous, background, convert, registry, pipeline = (
        (3, 1, 1, 1, 0, 0) if short else (52, 50, 12, 8, 8, 8)
    )
    for number in range(alone):
        yield Case(f"one-process-{number}", partial(kill_and_resume, lab, KINDS[number % len(KINDS)]))
    for number in range(asynchronous):
        yield Case(f"asynchronous-{number}", partial(kill_and_resume, lab, "grpo-rounds"))
    for number in range(background):
        kind = KINDS_IN_BACKGROUND[number % len(KINDS_IN_BACKGROUND)]
        yield Case(f"background-{number}", partial(kill_and_resume, lab, kind))
    for number in range(convert):
        yield Case(f"convert-{number}", partial(kill_conversion, lab))
    for number in range(registry):
        yield Case(f"registry-{number}", partial(kill_registry, lab))
    for number in range(pipeline):
        yield Case(f"pipeline-{number}", partial(kill_pipeline, lab))
    for victim in () if short else ("driver", "rank", "all"):
        yield Case(f"ray-{victim}", partial(kill_ray, lab, victim), tries=RAY_KILLS)
    for number in range(0 if short else DEDICATED_CASES):
        yield Case(f"dedicated-{number}", partial(kill_dedicated, lab), tries=DEDICATED_KILLS)


PART = Part(
    "kills", "a run that was killed with kill -9 and started again is the run that was not, bit for bit", cases, 32
)


# -- one process -------------------------------------------------------------------------------------------------------


def kill_and_resume(lab: Lab, kind: str, folder: Path, chance: random.Random) -> None:
    run, whole = folder / "run", lab.whole(kind)
    assert whole.is_dir()
    moment = chance.choice(["start", "row", "while saving", "while writing", "after saving"])
    for attempt in range(5):
        if _killed_at(moment, lab.arguments(kind, run), run, folder / f"log_{attempt}", chance):
            break
        shutil.rmtree(run)  # it was over before the kill: this was none
    else:
        raise AssertionError(f"the run was over five times before it could be killed ({moment})")
    lab.assert_same_end(kind, run, processes.run(lab.arguments(kind, run), folder / "log"))


def _killed_at(moment: str, arguments: list[str], run: Path, log: Path, chance: random.Random) -> bool:
    hold = log.with_suffix(".hold")
    if moment.startswith("while"):
        hold.touch()  # the kill comes before a checkpoint is complete, however fast the disk is
    running = processes.begin(arguments, log, Surroundings(hold=hold))
    if moment == "start":
        time.sleep(chance.uniform(0, 0.6))
    elif moment == "row":
        rows = chance.randrange(1, 6)
        running.wait_for(lambda: tiny_runs.count_rows(run) >= rows)
        time.sleep(chance.uniform(0, 0.1))
    elif moment == "after saving":
        running.wait_for(lambda: any(run.glob("step_*")))
        time.sleep(chance.uniform(0, 0.1))
    else:
        running.wait_for(lambda: any(run.glob("tmp_step_*")))
        time.sleep(chance.uniform(0, 0.03) if moment == "while saving" else chance.uniform(0.03, 0.4))
    running.process.kill()
    running.process.join()
    hold.unlink(missing_ok=True)
    return running.finish().code == -signal.SIGKILL


# -- two ranks under Ray -----------------------------------------------------------------------------------------------


def kill_ray(lab: Lab, victim: str, folder: Path, chance: random.Random) -> None:
    kind, run = "dpo-ray-background", folder / "run"
    lab.whole(kind)
    kills = 0
    for attempt in range(3 * RAY_KILLS):
        running = processes.begin(lab.arguments(kind, run), folder / f"log_{attempt}")
        _wait_for_a_moment(running, run, chance)
        if _killed_in_ray(victim, running, chance):
            kills += 1
        else:  # it was over before: this was none
            lab.assert_same_end(kind, run, running.finish())
            shutil.rmtree(run)
        if kills == RAY_KILLS:
            break
    else:
        raise AssertionError(f"the run was over before {RAY_KILLS} kills hit it")
    lab.assert_same_end(kind, run, processes.run(lab.arguments(kind, run), folder / "log", limit_s=300))


def _wait_for_a_moment(running: Running, run: Path, chance: random.Random) -> None:
    before = tiny_runs.count_rows(run)
    moment = chance.choice(["start", "row", "saving"])
    if moment == "start":
        running.wait_for(lambda: _ranks_of(running))
        time.sleep(chance.uniform(0, 5))
    elif moment == "row":
        running.wait_for(lambda: tiny_runs.count_rows(run) > before)
    else:
        running.wait_for(lambda: any(run.glob("tmp_step_*")) or tiny_runs.count_rows(run) > before + 2)


def _ranks_of(running: Running, log: str = "") -> list[psutil.Process]:
    """Ranks and engines; with `log` those that write one whose name begins with it."""
    found = []
    for process in processes.descendants(running.pid):
        try:
            if "RankActor" in " ".join(process.cmdline()) and (not log or _writes(process, log)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _writes(process: psutil.Process, log: str) -> bool:
    names = [Path(opened.path).name for opened in process.open_files()]
    return any(name.startswith(log) and name.endswith(".log") for name in names)


def _killed_in_ray(victim: str, running: Running, chance: random.Random) -> bool:
    """Whether the run was still going on."""
    everybody, ranks = processes.descendants(running.pid), _ranks_of(running)
    try:
        if victim == "rank":
            training = _ranks_of(running, "rank_")
            processes.kill([chance.choice(training)] if training else [])
        elif victim == "driver":
            running.process.kill()
        else:
            running.kill_all()
        running.process.join(180)
        left = processes.wait_until_gone(ranks, 90)
        assert not left, f"{len(left)} ranks still run 90 s after the kill of the {victim}"
        finished = running.finish()
        assert finished.code != 64, f"a killed {victim} was taken for bad input: {finished}"
    finally:
        processes.kill(everybody)
    return finished.code != 0


# -- an engine of its own that samples ahead ---------------------------------------------------------------------------


def kill_dedicated(lab: Lab, folder: Path, chance: random.Random) -> None:
    """Without the engine the run goes on, with another one; without the driver or a rank the same command does."""
    kind, run = "grpo-rounds-dedicated", folder / "run"
    draws = tiny_runs.trained_draws(lab.whole(kind), STEPS)
    assert sorted(draws) == list(range(len(draws))), "every prompt is trained once"
    kills, running = 0, None
    for attempt in range(4 * DEDICATED_KILLS):
        if running is None:
            running = processes.begin(lab.arguments(kind, run), folder / f"log_{attempt}")
        _wait_for_a_moment(running, run, chance)
        victim = chance.choice(["driver", "rank", "engine", "all"])
        if victim == "engine" and running.process.is_alive():
            engines = _ranks_of(running, "engine_")
            processes.kill(engines)
            kills += bool(engines)
        else:
            was_alive = running.process.is_alive()
            if _killed_in_ray(victim, running, chance):
                kills += was_alive  # an engine that is killed while a run starts ends it
            else:  # it was over before: this was none
                lab.assert_same_end(kind, run, running.finish())
                shutil.rmtree(run)
            running = None
        if kills == DEDICATED_KILLS:
            break
    else:
        raise AssertionError(f"the run was over before {DEDICATED_KILLS} kills hit it")
    if running is not None and (finished := running.finish(300)).code == 0:
        lab.assert_same_end(kind, run, finished)
        return
    lab.assert_same_end(kind, run, processes.run(lab.arguments(kind, run), folder / "log", limit_s=300))


# -- conversion, registry, pipeline ------------------------------------------------------------------------------------


def _timed_kill(arguments: list[str], log: Path, seconds: float) -> bool:
    """Whether it was still running then."""
    running = processes.begin(arguments, log)
    running.process.join(seconds)
    running.kill_all()
    return running.finish().code == -signal.SIGKILL


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def kill_conversion(lab: Lab, folder: Path, chance: random.Random) -> None:
    source = lab.whole("dpo")

    def convert(target: Path) -> list[str]:
        return ["convert", str(source), "--to", str(target)]

    def make(shared: Path) -> tuple[dict[str, bytes], float]:
        finished = processes.run(convert(shared / "hf"), shared / "log")
        assert finished.code == 0, finished
        return weights_in(shared / "hf"), finished.seconds

    expected, usual_s = lab.shared("converted", make)
    target = folder / "hf"
    _timed_kill(convert(target), folder / "killed.log", chance.uniform(0, usual_s))
    if target.exists() and any(target.iterdir()):
        assert weights_in(target) == expected, f"a torn conversion has the name of a complete one: {os.listdir(target)}"
    finished = processes.run(convert(target), folder / "log")
    assert finished.code == 0 or "is not empty" in finished.output, finished
    assert weights_in(target) == expected, finished
    assert sorted(os.listdir(folder)) == ["hf", "killed.log", "log"], f"left behind: {os.listdir(folder)}"


def weights_in(folder: Path) -> dict[str, bytes]:
    names = ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def kill_registry(lab: Lab, folder: Path, chance: random.Random) -> None:
    """A version is there, with its files, or it is not; the registry stays usable."""

    from posttrain.apps.ship.registry import Registry
    from posttrain.apps.ship.registry.store import DATABASE

    def make(shared: Path) -> Path:
        with Registry(shared)._store.writing():  # making the tables takes MLflow seconds
            return shared / DATABASE

    registry = folder / "registry"
    registry.mkdir()
    shutil.copy(lab.shared("registry", make), registry)

    def command(*words: str) -> list[str]:
        return ["registry", *words, "--registry", str(registry)]

    def ask(*words: str) -> Any:
        finished = processes.run(command(*words, "--json"), folder / "log")
        assert finished.code == 0, finished
        return json.loads(finished.output[finished.output.index("{" if words[0] == "show" else "[") :])

    first = processes.run(command("add", "m", str(lab.model)), folder / "log")
    assert first.code == 0, first
    deed = chance.choice(
        [("add", "m", str(lab.model)), ("promote", "m", "1", "--to", "canary", "--force", "--why", "tried")]
    )
    _timed_kill(command(*deed), folder / "killed.log", chance.uniform(0, first.seconds))
    versions = len(ask("list", "m"))
    assert versions in (1, 2)
    finished = processes.run(command(*deed), folder / "log")
    if deed[0] == "add":
        assert finished.code == 0, finished
        assert len(ask("list", "m")) == versions + 1
    else:
        assert finished.code in (0, 64), finished  # 64: the killed one had promoted it
        assert ask("show", "m", "1")["stage"] == "canary"
    for version in range(1, len(ask("list", "m")) + 1):
        checked = processes.run(command("show", f"m@{version}", "--verify"), folder / "log")
        assert checked.code == 0, checked


def kill_pipeline(lab: Lab, folder: Path, chance: random.Random) -> None:
    def make(shared: Path) -> tuple[Path, Path, float]:
        world = tiny_pipelines.save_world(shared / "world")
        file = tiny_pipelines.write_file(shared / "p.yaml", tiny_pipelines.settings(world, shared / "home"))
        finished = processes.run(["pipeline", "run", str(file), "--quiet"], shared / "log", limit_s=300)
        assert finished.code == 0, finished
        return world, shared / "home", finished.seconds

    try:
        import mlflow  # noqa: F401
    except ImportError:
        raise NotPossibleHere("the registry needs the extra `registry`") from None
    world, whole, usual_s = lab.shared("pipeline", make)
    file = tiny_pipelines.write_file(folder / "p.yaml", tiny_pipelines.settings(world, folder / "home"))
    command = ["pipeline", "run", str(file), "--quiet"]
    _timed_kill(command, folder / "killed.log", chance.uniform(1, usual_s))
    finished = processes.run(command, folder / "log", limit_s=300)
    assert finished.code == 0, finished
    assert made_by_pipeline(folder / "home") == made_by_pipeline(whole)


def made_by_pipeline(home: Path) -> dict[str, Any]:
    from posttrain.apps.ship.pipeline.records import STAGES, read_iterations
    from posttrain.apps.ship.registry import Registry

    [iteration] = read_iterations(home)
    records = {name: iteration.record(name) for name in STAGES}
    assert all(record is not None for record in records.values()), f"stages are missing: {records}"
    return {
        "pairs": records["dataset"].path("file").read_bytes(),  # type: ignore[union-attr]
        "weights": (records["convert"].path("model") / "model.safetensors").read_bytes(),  # type: ignore[union-attr]
        "verdict": records["gate"].outcome.values["verdict"],  # type: ignore[union-attr]
        "versions": [(one.version, one.stage) for one in Registry(home / "registry").versions("tiny")],
    }
