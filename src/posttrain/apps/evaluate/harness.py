"""`posttrain eval --harness`: benchmarks of lm-evaluation-harness and Inspect, asked of our server.

A harness has an environment of its own: its Python is named, never imported here. It asks `posttrain serve`, which this
process starts for the model, or the server whose URL the model is. What it measured becomes the files of an evaluation
(`results.py`), one folder per task, so that `eval compare` and the gate work on it. Its own files stay in `harness/`.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain import processes
from posttrain.apps.evaluate.folder import EvaluationFolder
from posttrain.apps.evaluate.identity import digest, plain_identity, what_differs
from posttrain.apps.evaluate.model import EvaluatedModel
from posttrain.apps.evaluate.results import (
    SUMMARY_FILE,
    EvaluationError,
    EvaluationSummary,
    ProblemResult,
    SampleResult,
    hash_of,
    summary_text,
)
from posttrain.apps.evaluate.summary import summarise
from posttrain.config import EvalRunConfig, LoadedConfig
from posttrain.config.loader import DEFAULT
from posttrain.data.reward_values import MAX_REWARD
from posttrain.errors import InputError
from posttrain.files.durable import make_folder, write_text
from posttrain.files.json_files import JsonMapping, JsonObject, parse_json, read_json
from posttrain.files.redaction import redact, without_credentials

DEFAULT_FOLDER = Path("results/eval")
OUTPUT_FOLDER, ENDED_FILE, LOG_FILE = "harness", "harness.json", "harness.log"
_SERVED_NAME = "model"
_START_LIMIT_S, _KILL_WAIT_S, _NUM_CONCURRENT = 1800.0, 10.0, 16
# Run by the Python of a harness: it ends with this process, however that ends.
_START = """
import runpy, sys
runpy.run_path(sys.argv.pop(1))["die_with_parent"](int(sys.argv.pop()))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
# Settings of `posttrain eval` that a harness decides itself, or that our server does not take.
_WITHOUT_EFFECT = ("data.", "env.", "tokenizer.", "cluster.", "eval.max_rollout_turns", "generation.ignore_eos",
                   "generation.stop_", "generation.native_cfg", "generation.vllm_kwargs", "generation.top_k",
                   "generation.num_prompts_per_step")  # fmt: skip


@dataclass(frozen=True)
class TaskResult:
    """What a harness measured in one task."""

    name: str
    problems: list[ProblemResult]
    judge: JsonObject  # everything that decides the scores


@dataclass(frozen=True)
class Harness:
    """`words(endpoint, …)` are those of its command line; `read` its output folder, and the metric asked for."""

    module: str
    package: str  # as pip names it
    folder: str  # of its environment, where none is named
    variable: str  # names its Python
    words: Callable[[HarnessRun, str, str, Path], list[str]]
    read: Callable[[HarnessRun, Path], Iterator[TaskResult]]


@dataclass
class HarnessRun:
    loaded: LoadedConfig[EvalRunConfig]
    name: str  # a key of HARNESSES
    tasks: Sequence[str]
    say: Callable[[str], None]
    python: str | None = None
    metric: str | None = None  # None: the first of the task
    arguments: Sequence[str] = ()  # further ones of its command line
    version: str = field(default="", init=False)

    @property
    def config(self) -> EvalRunConfig:
        return self.loaded.config

    @property
    def harness(self) -> Harness:
        return HARNESSES[self.name]

    def is_set(self, key: str) -> bool:
        return self.loaded.origins.get(key, DEFAULT) != DEFAULT

    def given(self, **names: str) -> dict[str, object]:
        """Values of `generation` that the user has set, by the harness's name of them."""
        found = {theirs: getattr(self.config.generation, ours) for theirs, ours in names.items()}
        return {theirs: found[theirs] for theirs, ours in names.items() if self.is_set(f"generation.{ours}")}

    def execute(self) -> list[tuple[EvalRunConfig, EvaluationSummary, list[ProblemResult], Path]]:
        """One evaluation per task."""
        self._check()
        python = self._find_python()
        model = EvaluatedModel(self.config, self.say)
        model.check()
        identity = self._identity(model)
        root = self._root(identity)
        with ExitStack() as cleanup:
            if model.server is not None:
                cleanup.callback(model.server.close)
            if not self._has_ended(root, identity):
                began = time.perf_counter()
                self._run(python, model, root, cleanup)
                done = {**identity, "wall_s": time.perf_counter() - began}
                write_text(root / ENDED_FILE, json.dumps(done, indent=2) + "\n")
            wall_s = float(str(read_json(root / ENDED_FILE, EvaluationError)["wall_s"]))
            results = list(self.harness.read(self, root / OUTPUT_FOLDER))
            if not results:
                raise EvaluationError(f"{root / OUTPUT_FOLDER}: {self.name} has left no results; see {root / LOG_FILE}")
            return [
                self._save(root if len(results) == 1 else root / _plain(result.name), result, identity, model, wall_s)
                for result in results
            ]

    # -- before ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self.tasks:
            raise InputError(f"--harness {self.name} needs --tasks, such as --tasks gsm8k,ifeval")
        for key in self.loaded.origins:
            if key.startswith(_WITHOUT_EFFECT) and self.is_set(key):
                raise InputError(
                    f"{key} has no effect with --harness {self.name}, which brings its own problems and scores: leave "
                    "it out; --harness-args has further options of the harness"
                )
        if self.name == "lm-eval" and self.config.eval.num_tests_per_prompt > 1:
            raise InputError(
                "eval.num_tests_per_prompt: lm-eval draws as many samples as its tasks say (`repeats`); set 1"
            )

    def _find_python(self) -> str:
        """Its interpreter, which has the package; sets `version`."""
        harness = self.harness
        named = self.python or os.environ.get(harness.variable)
        python = named or str(Path(harness.folder, "bin", "python"))
        words = ["-c", f"import importlib.metadata as m; print(m.version({harness.module!r}))"]
        try:
            found = subprocess.run([python, *words], capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired):
            found = None
        if found is None or found.returncode:
            make = f"python3 -m venv {harness.folder} && {harness.folder}/bin/pip install {harness.package}"
            raise InputError(
                f"--harness {self.name}: {python} has no module {harness.module}. It has an environment of its "
                f"own: {make}; --harness-python or {harness.variable} names another"
            )
        self.version = found.stdout.strip()
        return python

    def _identity(self, model: EvaluatedModel) -> JsonObject:
        config = self.config
        found = {
            **model.identity(),
            "harness": f"{self.name} {self.version}",
            "tasks": list(self.tasks),
            "arguments": list(self.arguments),
            "sampling": self.given(temperature="temperature", top_p="top_p", max_tokens="max_new_tokens"),
            "seed": config.eval.seed,
            "max_problems": config.eval.max_problems,
            "num_tests_per_prompt": config.eval.num_tests_per_prompt,
        }
        return plain_identity(without_credentials(found))

    def _root(self, identity: JsonObject) -> Path:
        if self.config.eval.save_path is not None:
            return Path(self.config.eval.save_path)
        model = _plain(redact(self.config.generation.model_name))[-60:]
        return DEFAULT_FOLDER / _plain(f"{self.name}-{'-'.join(self.tasks)}")[:80] / f"{model}-{digest(identity)[:8]}"

    def _has_ended(self, root: Path, identity: JsonObject) -> bool:
        file = root / ENDED_FILE
        if not file.exists():
            return False
        before = {key: value for key, value in read_json(file, EvaluationError).items() if key != "wall_s"}
        if differing := what_differs(before, identity):
            raise EvaluationError(f"{root} holds another evaluation: {differing}. Choose another eval.save_path")
        self.say(f"{self.name} had finished before; {root}")
        return True

    # -- the two processes -------------------------------------------------------------------------------------------

    def _run(self, python: str, model: EvaluatedModel, root: Path, cleanup: ExitStack) -> None:
        make_folder(root)
        output, log = root / OUTPUT_FOLDER, root / LOG_FILE
        shutil.rmtree(output, ignore_errors=True)  # of an attempt that did not end
        url, name, key = self._endpoint(model, root, cleanup)
        words = [*self.harness.words(self, url, name, output), *self.arguments]
        self.say(f"{self.name} {self.version}: {', '.join(self.tasks)}; its output is in {log}")
        variables = processes.with_direct_loopback({**os.environ, "OPENAI_API_KEY": key, "POSTTRAIN_API_KEY": key})
        with log.open("wb") as file:
            child = processes.Child(_command(python, self.harness.module, words), (), file, variables)
            cleanup.callback(child.kill_group, _KILL_WAIT_S)
            code = child.wait()
        if code:
            raise InputError(f"{self.name} ended with {processes.ending_of(code)}: {_last_line(log)} ({log})")

    def _endpoint(self, model: EvaluatedModel, root: Path, cleanup: ExitStack) -> tuple[str, str, str]:
        """Address, name of the model and key of a server: that of the config, or one for the time of this call."""
        generation = self.config.generation
        if model.server is not None:
            key = os.environ.get(generation.openai_cfg.api_key_env_var, "none")
            return model.server.url, model.server.model, key
        words = ["serve", generation.model_name, "--port", "0", "--served-model-name", _SERVED_NAME]
        words += ["--backend", generation.backend]
        for option, value in (("--precision", generation.precision), ("--device", generation.device)):
            words += [option, value] if value != "auto" else []
        if self.is_set("generation.vllm_cfg.max_model_len"):
            words += ["--max-model-len", str(generation.vllm_cfg.max_model_len)]
        key, log = secrets.token_urlsafe(24), root / "server.log"
        threads = {} if generation.num_threads is None else {"OMP_NUM_THREADS": str(generation.num_threads)}
        variables = {**os.environ, "POSTTRAIN_API_KEY": key, **threads}
        with log.open("wb") as file:
            child = processes.Child(_command(sys.executable, "posttrain.cli.main", words), (), file, variables)
        cleanup.callback(child.kill_group, _KILL_WAIT_S)
        end = time.monotonic() + _START_LIMIT_S
        while not (ready := re.search(r"ready: (\S+)", log.read_text(errors="replace"))):
            if child.poll() is not None or time.monotonic() > end:
                raise InputError(f"generation.model_name: the model cannot be served: {_last_line(log)} ({log})")
            time.sleep(0.1)
        return ready[1], _SERVED_NAME, key

    # -- after -------------------------------------------------------------------------------------------------------

    def _save(
        self, path: Path, result: TaskResult, identity: JsonObject, model: EvaluatedModel, wall_s: float
    ) -> tuple[EvalRunConfig, EvaluationSummary, list[ProblemResult], Path]:
        data = self.config.data.model_copy(update={"dataset_name": f"{self.name}/{result.name}"})
        config = self.config.model_copy(update={"data": data})
        about = {
            **identity,
            "dataset": data.dataset_name,
            "problem_set_hash": hash_of(result.problems),
            "prompts_hash": digest([problem.prompt for problem in result.problems]),
            "judge": {"harness": f"{self.name} {self.version}", **result.judge},
        }
        folder = EvaluationFolder.open(path, about, replace(self.loaded, config=config).to_yaml())
        try:
            if missing := [problem for problem in result.problems if problem.id not in folder.finished]:
                lengths = [sample.num_tokens or 0 for problem in missing for sample in problem.samples]
                timing = {"wall_s": wall_s, "num_tokens": float(sum(lengths))}
                folder.append(missing, timing)
            summary = summarise(config, result.problems, model.fingerprint, folder.timings())
            write_text(path / SUMMARY_FILE, summary_text(summary))
        finally:
            folder.close()
        return config, summary, result.problems, path

    def main_metric(self, task: str, names: Sequence[str]) -> str:
        if self.metric is None or self.metric in names:
            return self.metric or names[0]
        raise InputError(f"--harness-metric {self.metric}: {task} has {', '.join(names)}")


def _command(python: str, module: str, words: Sequence[str]) -> list[str]:
    return [python, "-c", _START, processes.__file__, module, *words]


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-./")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return redact(lines[-1][:300]) if lines else "it has written nothing"


def _sample(text: str, value: float | None, metric: str, **more: object) -> SampleResult:
    """`reward` is the value of the metric, if it is a number."""
    is_number = value is not None and math.isfinite(value) and abs(value) <= MAX_REWARD
    problem = None if is_number else f"the harness gave no number for {metric}"
    known: JsonObject = {"num_tokens": None, "finish_reason": None, "error": problem, **more}
    return SampleResult(text=text, reward=value if is_number and known["error"] is None else None, **known)


# -- lm-evaluation-harness ---------------------------------------------------------------------------------------------


def _lm_eval_words(run: HarnessRun, url: str, model: str, output: Path) -> list[str]:
    about = f"base_url={url.rstrip('/')}/chat/completions,model={model},num_concurrent={_NUM_CONCURRENT}"
    words = ["run", "--model", "local-chat-completions", "--model_args", f"{about},tokenizer_backend=None"]
    words += ["--apply_chat_template", "--log_samples", "--output_path", str(output), "--tasks", ",".join(run.tasks)]
    words += ["--seed", str(run.config.eval.seed)]
    if run.config.eval.max_problems is not None:
        words += ["--limit", str(run.config.eval.max_problems)]
    given = run.given(temperature="temperature", top_p="top_p", max_gen_toks="max_new_tokens")
    if given.get("temperature"):
        given["do_sample"] = True
    return words + (["--gen_kwargs", ",".join(f"{key}={value}" for key, value in given.items())] if given else [])


def _read_lm_eval(run: HarnessRun, output: Path) -> Iterator[TaskResult]:
    files = sorted(output.rglob("results_*.json"))
    about = read_json(files[-1], EvaluationError) if files else {"configs": {}}
    for task, config in about["configs"].items():
        # A time follows the name, which may be how that of another task begins.
        named = re.compile(rf"samples_{re.escape(task)}_\d{{4}}-\d\d-\d\dT[^/]*\.jsonl")
        samples = sorted(path for path in output.rglob("samples_*.jsonl") if named.fullmatch(path.name))
        if not samples:
            raise EvaluationError(f"lm-eval has written no samples of the task {task!r} below {output}")
        rows = [parse_json(line) for line in samples[-1].read_bytes().splitlines()]
        by_document: dict[int, list[JsonObject]] = {}
        for row in rows:
            by_document.setdefault(row["doc_id"], []).append(row)
        names = list(dict.fromkeys(name for row in rows for name, _ in _lm_eval_values(row)))
        metric = run.main_metric(task, names)
        problems: list[ProblemResult] = []
        for place, same in sorted(by_document.items()):
            first, parts = same[0], {name: value for row in same for name, value in _lm_eval_values(row)}
            chosen = next((row for row in same if metric in dict(_lm_eval_values(row))), first)
            answers, texts = chosen["filtered_resps"], [text for samples in first["resps"] for text in samples]
            sample = _sample(
                str(texts[0]) if texts else "",
                parts.get(metric),
                metric,
                answer=str(answers[0]) if answers else None,
                parts={name: value for name, value in parts.items() if math.isfinite(value)},
            )
            prompt = _text_of(first["arguments"]["gen_args_0"]["arg_0"])
            index = len(problems)
            problems.append(ProblemResult(f"{task}/{place}", index, task, prompt, first["target"], (sample,)))
        kept = {key: value for key, value in config.items() if key != "metadata"}  # which has the address of the server
        shown = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(kept, sort_keys=True, default=str))
        judge = {"task": task, "version": about["versions"].get(task), "config": digest(shown), "metric": metric}
        yield TaskResult(task, problems, judge)


def _lm_eval_values(row: JsonMapping) -> Iterator[tuple[str, float]]:
    """The metrics of a row that are numbers, by name and filter; a list of them is averaged."""
    for name in row["metrics"]:
        value = row.get(name)
        numbers = [
            one for one in (value if isinstance(value, list) else [value]) if isinstance(one, bool | int | float)
        ]
        if numbers:
            filtered = row["filter"] if row["filter"] != "none" else ""
            yield f"{name},{filtered}".rstrip(","), math.fsum(map(float, numbers)) / len(numbers)


def _text_of(given: object) -> str:
    """A prompt: a text, messages, or messages as JSON in a list."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str):
        given = given[0]
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.startswith("[{") else given
        except ValueError:
            return str(given)
    if not isinstance(given, list):
        return str(given)
    return "\n\n".join(_content(message) for message in given)


def _content(message: JsonMapping) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


# -- Inspect -----------------------------------------------------------------------------------------------------------

_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # correct, partial, incorrect, no answer


def _inspect_words(run: HarnessRun, url: str, model: str, output: Path) -> list[str]:
    tasks = [os.path.relpath(task) if os.path.isabs(task) else task for task in run.tasks]  # it takes no other paths
    words = ["eval", *tasks, "--model", f"openai-api/posttrain/{model}", "--model-base-url", url.rstrip("/")]
    words += ["--log-dir", str(output), "--log-format", "json", "--display", "plain", "--no-fail-on-error"]
    epochs, limit = run.config.eval.num_tests_per_prompt, run.config.eval.max_problems
    words += ["--epochs", str(epochs)] if run.is_set("eval.num_tests_per_prompt") else []
    words += ["--seed", str(run.config.eval.seed)] if epochs == 1 else []  # with one seed all epochs would be equal
    words += ["--limit", str(limit)] if limit is not None else []
    given = run.given(temperature="temperature", top_p="top_p", max_tokens="max_new_tokens")
    return words + [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def _read_inspect(run: HarnessRun, output: Path) -> Iterator[TaskResult]:
    for file in sorted(output.glob("*.json")):
        log = read_json(file, EvaluationError)
        about, samples = log["eval"], log.get("samples") or []
        task = str(about["task"])
        if log["status"] != "success" or not samples:
            problem = str((log.get("error") or {}).get("message", "it has no samples"))
            raise InputError(f"inspect: {task} ended with status {log['status']}: {problem.strip()[:300]} ({file})")
        names = list(dict.fromkeys(name for sample in samples for name in _inspect_values(sample)))
        metric = run.main_metric(task, names or ["a score"])
        by_id: dict[str, list[JsonObject]] = {}
        for sample in samples:
            by_id.setdefault(str(sample["id"]), []).append(sample)
        problems = [
            ProblemResult(
                f"{task}/{name}",
                index,
                task,
                _text_of(same[0]["input"]),
                same[0]["target"],
                tuple(_inspect_sample(sample, metric) for sample in sorted(same, key=lambda one: int(one["epoch"]))),
            )
            for index, (name, same) in enumerate(by_id.items())
        ]
        scorers = digest([about.get("scorers"), about.get("task_args"), about.get("solver"), about.get("solver_args")])
        yield TaskResult(
            task, problems, {"task": task, "version": about["task_version"], "scorers": scorers, "metric": metric}
        )


def _inspect_sample(sample: JsonMapping, metric: str) -> SampleResult:
    values, output = _inspect_values(sample), sample.get("output") or {}
    stop = next((choice.get("stop_reason") for choice in output.get("choices") or ()), None)
    usage = sample.get("model_usage") or {}
    messages = sample.get("messages") or []
    score = (sample.get("scores") or {}).get(metric.partition("/")[0]) or {}
    error = (sample.get("error") or {}).get("message")
    more: JsonObject = {"error": f"inspect: {error}".strip()[:2000]} if error else {}
    return _sample(
        str(output.get("completion") or ""),
        values.get(metric),
        metric,
        num_tokens=sum(int(one.get("output_tokens", 0)) for one in usage.values()) if usage else None,
        finish_reason=None if error or stop is None else "length" if stop in ("max_tokens", "model_length") else "stop",
        answer=None if score.get("answer") is None else str(score["answer"]),
        parts={name: value for name, value in values.items() if math.isfinite(value)},
        turns=tuple({"role": str(one["role"]), "text": _content(one)} for one in messages) if len(messages) > 2 else (),
        **more,
    )


def _inspect_values(sample: JsonMapping) -> dict[str, float]:
    """The scores that are numbers or letters, by scorer; of a scorer with several, by scorer/name."""
    found: dict[str, float] = {}
    for scorer, score in (sample.get("scores") or {}).items():
        value = score.get("value")
        named = {f"{scorer}/{key}": one for key, one in value.items()} if isinstance(value, dict) else {scorer: value}
        for name, one in named.items():
            number = _LETTERS.get(one) if isinstance(one, str) else one
            if isinstance(number, bool | int | float):
                found[name] = float(number)
    return found


HARNESSES = {
    "lm-eval": Harness(
        "lm_eval", "'lm-eval[api]'", ".lm-eval-venv", "POSTTRAIN_LM_EVAL_PYTHON", _lm_eval_words, _read_lm_eval
    ),
    "inspect": Harness(
        "inspect_ai", "inspect-ai openai", ".inspect-venv", "POSTTRAIN_INSPECT_PYTHON", _inspect_words, _read_inspect
    ),
}


def split_words(text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise InputError(f"--harness-args {text!r}: {error}") from None
