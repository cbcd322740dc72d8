"""Odd and damaged files in one run folder: `posttrain watch` shows the others, and its answers are no errors of the
server; `launch checkpoints` prints no control characters of theirs. In runs of other systems: `posttrain doctor` reads
or refuses them.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from api_server import ApiServer
from made_runs import append, make_run
from PIL import Image

from faults import processes
from faults.campaign import Case, Part
from faults.inputs import worker_of
from faults.lab import Lab, assert_no_traceback
from faults.mutations import mutated

IMAGE = f"images/{'0' * 64}.png"
FOREIGN_RUNS = Path(__file__).parents[1] / "foreign_runs"
FILES = (
    IMAGE,
    "metrics.jsonl",
    "run.json",
    "findings.jsonl",
    "workers.jsonl",
    "config.yaml",
    "attempts/0001.json",
    "rollouts/step_1.jsonl.gz",
    "rollouts/step_10.tokens.npz",
)
PAGES = (
    "",
    "/curves?key=train/reward",
    "/doctor?again=true",
    "/cluster",
    "/config",
    "/rollouts/train",
    "/rollouts/train/1?sort=reward&q=the",
    "/rollouts/train/1/0",
    "/rollouts/train/search?q=the",
    "/tokens/10/54/0",
    f"/{IMAGE}",
)
LIMIT_S = 60.0  # for all pages of two runs
MUTATIONS = 25  # of each file
HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m"


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": _pipe,
    "folder": Path.mkdir,
    "link": _link,
    "loop": lambda path: path.symlink_to(path),
    "nuls": lambda path: path.write_bytes(b"\0" * 100_000),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "long-line": lambda path: path.write_bytes(b'{"step": 1, "a": "' + b"a" * 10_000_000),
    "no-text": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "empty": lambda path: path.write_bytes(b""),
    "sparse": lambda path: (path.write_bytes(b"{"), os.truncate(path, 2**40)),
}


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    kinds, times = (("pipe", "link"), 1) if short else (tuple(KINDS), MUTATIONS)
    for file in FILES:
        for kind in kinds:
            yield Case(f"{kind}:{file}", partial(odd_file, file, KINDS[kind]))
        yield Case(f"mutated:{file}", partial(mutated_file, file, times), tries=times)
    for path in sorted(path.relative_to(FOREIGN_RUNS) for path in FOREIGN_RUNS.glob("*/**/*") if path.is_file()):
        yield Case(f"doctor:{path}", partial(foreign_run, lab, path, kinds, times), tries=len(kinds) + times)
    yield Case("launch-checkpoints", checkpoints)
    if not short:  # eight starts of the client of Kubernetes
        yield Case("launch-logs", logs)


PART = Part("watch", "one odd file harms the pages of its own run only, and steers no terminal", cases, 4)


def assert_shown(home: Path) -> None:
    """In a thread: a page that hangs fails the case."""
    from fastapi.testclient import TestClient

    from posttrain.apps.watch.access import Access
    from posttrain.apps.watch.app import create_app
    from posttrain.apps.watch.catalogue import Catalogue
    from posttrain.apps.watch.places import LocalPlace

    problems: list[str] = ["no answer"]

    def visit() -> None:
        app = create_app(Catalogue([LocalPlace(home)]), Access(None))
        client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
        runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
        found = [] if runs["good"]["status"] == "finished" else [str(runs["good"])]
        for name, accepted in (("good", (200,)), ("odd", (200, 404, 422))):
            for page in PAGES if name in runs else ():
                answer = client.get(f"/api/runs/{runs[name]['id']}{page}")
                if answer.status_code not in accepted or "root:" in answer.text:
                    found.append(f"{name}{page}: {answer.status_code} {answer.text[:300]}")
        problems[:] = found

    visiting = threading.Thread(target=visit, daemon=True)
    visiting.start()
    visiting.join(LIMIT_S)
    assert not visiting.is_alive(), f"no answer within {LIMIT_S:g} s"
    assert problems == [], problems


def made(folder: Path) -> Path:
    for name in ("good", "odd"):
        make_run(folder / name, steps=10, sick=name == "odd")
        (folder / name / "images").mkdir()
        (folder / name / IMAGE).write_bytes(_png())
    return folder


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    return buffer.getvalue()


def odd_file(file: str, make: Callable[[Path], Any], folder: Path, chance: random.Random) -> None:
    path = made(folder) / "odd" / file
    path.unlink()
    make(path)
    assert_shown(folder)


def mutated_file(file: str, times: int, folder: Path, chance: random.Random) -> None:
    path = made(folder) / "odd" / file
    content = path.read_bytes()
    for _ in range(times):
        path.write_bytes(mutated(content, chance))
        assert_shown(folder)


def foreign_run(lab: Lab, file: Path, kinds: Sequence[str], times: int, folder: Path, chance: random.Random) -> None:
    """One file of another system's run is odd."""
    run = shutil.copytree(FOREIGN_RUNS / file.parts[0], folder / "run")
    path = folder / "run" / Path(*file.parts[1:])
    content = path.read_bytes()

    def assert_read_or_refused(what: object) -> None:
        finished = worker_of(lab).run(["doctor", str(run)], folder)
        assert finished.code in (0, 3, 64), f"{what}: {finished}"
        assert_no_traceback(finished)

    for name in kinds:
        path.unlink()
        KINDS[name](path)
        assert_read_or_refused(name)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.touch()
    for _ in range(times):
        path.write_bytes(mutated(content, chance))
        assert_read_or_refused("mutated")


def checkpoints(folder: Path, chance: random.Random) -> None:
    run = folder / f"run {HOSTILE}"
    run.mkdir()
    for name in ("step_1", "step_2", f"step_3{HOSTILE}", "step_" + "9" * 200):
        (run / name).mkdir()
        (run / name / f"weights{HOSTILE}").write_bytes(b"1")
    (run / "step_4").symlink_to("nowhere")
    os.utime(run / "step_2", (1e13, 1e13))
    for value in (HOSTILE, [1], 10**400, True, {"a": 1}):
        append(run / "metrics.jsonl", {"step": 1, "train/reward": value, f"train/{HOSTILE}": 1, "train/loss": 0.5})
    for words in ([], ["--json"]):
        finished = processes.run(["launch", "checkpoints", "--folder", str(run), *words], folder / "log")
        assert finished.code == 0, finished
        assert_no_traceback(finished)
        assert not [mark for mark in ("\x1b", "\x07", "\x9b") if mark in finished.output], repr(finished.output)
        assert "0.5" in finished.output, finished


def logs(folder: Path, chance: random.Random) -> None:
    """Of a cluster whose pods choose their names, messages and output."""
    said = f"step 1\n{HOSTILE}\x1b[2A\x1b[Kall is well\rover\x1b[1G\n"
    labels = {"posttrain.dev/run": "mine", "batch.kubernetes.io/job-completion-index": "0"}
    server = ApiServer()
    try:
        server.put("/api/v1/namespaces/training")
        job = {"metadata": {"name": "mine", "namespace": "training", "labels": labels}}
        ended = {"type": "Failed", "status": "True", "reason": HOSTILE, "message": said}
        server.put("/apis/batch/v1/namespaces/training/jobs/mine", {**job, "status": {"conditions": [ended]}})
        state = {"waiting": {"reason": HOSTILE, "message": said}, "terminated": {"exitCode": 1, "message": said}}
        pod = {
            "metadata": {"name": "mine-0", "namespace": "training", "labels": labels, "creationTimestamp": HOSTILE},
            "spec": {"containers": [{"name": "posttrain"}], "nodeName": HOSTILE},
            "status": {"phase": "Failed", "containerStatuses": [{"state": state}]},
        }
        server.put("/api/v1/namespaces/training/pods/mine-0", pod)
        server.logs["mine-0"] = said
        surroundings = processes.Surroundings(
            {
                "KUBECONFIG": str(server.write_kubeconfig(folder / "kubeconfig")),
                "POSTTRAIN_LOCAL": str(folder / "local"),
            }
        )
        for words, codes in (
            (["logs", "mine"], (0,)),
            (["status", "mine"], (0,)),
            *(
                (["logs", name], (2, 64))
                for name in ("../../etc", HOSTILE, "a" * 10_000, "mine/../other", "", "%2e%2e")
            ),
        ):
            finished = processes.run(["launch", *words], folder / "log", surroundings)
            assert finished.code in codes, f"{words}: {finished}"
            assert_no_traceback(finished)
            assert not [mark for mark in ("\x1b", "\x07", "\x9b", "\rover") if mark in finished.output], (
                f"{words}: {finished.output!r}"
            )
            assert words != ["logs", "mine"] or "all is well" in finished.output, finished
    finally:
        server.close()
