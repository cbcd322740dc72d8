"""`posttrain watch` on a large run: 10,000 steps and 5 GB of rollouts. First paint, times of the API, memory.

    python bench/watch_large_run.py --folder /tmp/large             makes the run the first time: minutes, and the disk
    python bench/watch_large_run.py --folder /tmp/large --gigabytes 0.5

The run is made of text that packs like text (words of Zipf's law). The server is a process of its own, and its memory
is that of the process. The page is opened in Chromium, if there is one, in a fresh browser each time.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browsers import find_chromium
from made_runs import CONFIG, append, metrics_row, write_attempt, write_info, write_step

NUM_DIFFERENT = 64  # steps of text that are made; the others repeat them
NUM_SAMPLES = 16
NUM_REQUESTS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--gigabytes", type=float, default=5.0, help="of packed rollouts")
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    args = parser.parse_args()
    make(args.folder / "large", args.steps, args.gigabytes)
    with serving(args.folder) as (address, process):
        results = measure(address, process, args.folder / "large", args.steps)
    for name, value in results.items():
        print(f"{name:<46} {value}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


def make(folder: Path, num_steps: int, gigabytes: float) -> None:
    if (folder / "run.json").exists():
        return
    started = time.monotonic()
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(lr=1e-6))
    packed = [packed_step(index, int(gigabytes * 1e9 / num_steps)) for index in range(NUM_DIFFERENT)]
    for step in range(1, num_steps + 1):
        (folder / "rollouts" / f"step_{step}.jsonl.gz").write_bytes(packed[step % NUM_DIFFERENT])
    extra = {f"train/extra_{index}": 0.5 for index in range(35)}  # a row of a real run has about 60 metrics
    rows = (metrics_row(step, noise=random.Random(step)) | extra for step in range(1, num_steps + 1))
    append(folder / "metrics.jsonl", *rows)
    write_attempt(folder, ended=False, heartbeat=4e9)
    write_info(folder, title="A large run", status="running", max_steps=2 * num_steps)
    print(f"made in {time.monotonic() - started:.0f} s")


def packed_step(seed: int, num_bytes: int) -> bytes:
    """A file of about `num_bytes`: groups until there are enough."""
    noise = random.Random(seed)
    words = [f"w{index:x}" for index in range(20_000)]
    weights = [1 / (index + 5) for index in range(len(words))]
    totals = list(itertools.accumulate(weights))
    lines: list[bytes] = []
    for draw in itertools.count():
        answers = [
            {
                "text": " ".join(noise.choices(words, cum_weights=totals, k=150)),
                "reward": float(noise.random() < 0.5),
                "parts": {"correct": 1.0},
                "advantage": 0.1,
                "error": None,
                "finish_reason": "stop",
                "num_tokens": 180,
                "versions": [[0, 1]],
            }
            for _ in range(NUM_SAMPLES)
        ]
        prompt = " ".join(noise.choices(words, cum_weights=totals, k=60))
        group = {"draw": draw, "id": f"set:{seed}-{draw}", "prompt": prompt, "reference": "1", "completions": answers}
        lines.append((json.dumps(group) + "\n").encode())
        if draw % 8 == 7 and len(found := gzip.compress(b"".join(lines), 5)) >= num_bytes:
            return found
    raise AssertionError


class serving:
    """The command as a user starts it."""

    def __init__(self, folder: Path) -> None:
        self._command = [sys.executable, "-m", "posttrain", "watch", str(folder), "--port", "0"]

    def __enter__(self) -> tuple[str, psutil.Process]:
        self._server = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._server.stderr is not None
        line = self._server.stderr.readline()
        return line.split()[2], psutil.Process(self._server.pid)

    def __exit__(self, *error: object) -> None:
        self._server.terminate()
        self._server.wait()


def measure(address: str, process: psutil.Process, folder: Path, num_steps: int) -> dict[str, object]:
    def get(path: str, **params: object) -> object:
        query = urllib.parse.urlencode(params, doseq=True)
        with urllib.request.urlopen(f"{address}api/{path}?{query}") as answer:
            return json.load(answer)

    results: dict[str, object] = {"memory at start, MiB": mebibytes(process)}
    results |= paints(address, "")
    run = get("runs")["runs"][0]["id"]  # type: ignore[index]
    results |= paints(address, f"#/run/{run}", "run page")
    page = get(f"runs/{run}")
    keys = [curve[0] for chart in page["charts"] for curve in chart["curves"]][:24]  # type: ignore[index]
    noise = random.Random(1)

    def any_step() -> int:
        return noise.randrange(1, num_steps + 1)

    requests: dict[str, Callable[[], object]] = {
        "list of runs": lambda: get("runs"),
        "run": lambda: get(f"runs/{run}"),
        f"{len(keys)} curves": lambda: get(f"runs/{run}/curves", key=keys, points=300),
        "steps with rollouts": lambda: get(f"runs/{run}/rollouts/train"),
        "groups of a step, unread": lambda: get(f"runs/{run}/rollouts/train/{any_step()}"),
        "group of a step, unread": lambda: get(f"runs/{run}/rollouts/train/{any_step()}/3"),
        "group of a step, read before": lambda: get(f"runs/{run}/rollouts/train/7/3"),
        "a slice of a search": lambda: get(f"runs/{run}/rollouts/train/search", q="not there"),
    }
    every: list[float] = []
    for name, request in requests.items():
        times = sorted(timed(request) for _ in range(NUM_REQUESTS))
        every += times
        results[f"API, {name}: median, p95 ms"] = f"{statistics.median(times):.0f}, {percentile(times, 0.95):.0f}"
    results["API, all: p95 ms"] = round(percentile(sorted(every), 0.95))
    results["search of the whole run, s"] = round(timed(lambda: search_all(get, run)) / 1000, 1)
    results["memory after, MiB"] = mebibytes(process)
    results |= live(address, run, folder, num_steps)
    return results


def search_all(get: Callable[..., object], run: str) -> None:
    cursor: dict[str, int] | None = {}
    while cursor is not None:
        cursor = get(f"runs/{run}/rollouts/train/search", q="not there", **cursor)["cursor"]  # type: ignore[index]


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def mebibytes(process: psutil.Process) -> int:
    return process.memory_info().rss // 2**20


PAINT = """() => new Promise((done) => {
  const look = () => {
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    if (!paint || !document.querySelector("SELECTOR")) requestAnimationFrame(look);
    else done([Math.round(paint.startTime), Math.round(performance.now())]);
  };
  look();
})"""


def pages() -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1440, "height": 900})
        browser.close()


def paints(address: str, path: str, name: str = "runs page") -> dict[str, object]:
    """The first paint, and when the data is drawn; of the first visit, for which the server reads its files."""
    if find_chromium() is None:
        return {}
    for page in pages():
        page.goto(address + path)  # type: ignore[attr-defined]
        selector = ".chart svg path" if path else ".runs .who"
        first, drawn = page.evaluate(PAINT.replace("SELECTOR", selector))  # type: ignore[attr-defined]
    return {f"{name}: first paint, data drawn, ms": f"{first}, {drawn}"}


def live(address: str, run: str, folder: Path, num_steps: int) -> dict[str, object]:
    """From the append of a row to the new number on the page."""
    if find_chromium() is None:
        return {}
    found = []
    for page in pages():
        page.goto(f"{address}#/run/{run}")  # type: ignore[attr-defined]
        page.locator("#live.on").wait_for()  # type: ignore[attr-defined]
        page.locator(".chart svg path").first.wait_for()  # type: ignore[attr-defined]
        for step in range(num_steps + 1, num_steps + 4):
            write_step(folder, step)
            started = time.perf_counter()
            page.locator(".tile .value", has_text=f"{step:,}").first.wait_for()  # type: ignore[attr-defined]
            found.append(time.perf_counter() - started)
        keep_rows(folder / "metrics.jsonl", num_steps)
    return {"a new step is visible after, s": ", ".join(f"{seconds:.2f}" for seconds in found)}


def keep_rows(path: Path, count: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)[:count]
    path.with_suffix(".partial").write_bytes(b"".join(lines))
    os.replace(path.with_suffix(".partial"), path)


if __name__ == "__main__":
    main()
