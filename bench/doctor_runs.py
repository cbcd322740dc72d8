#!/usr/bin/env python3
"""The doctor on small healthy runs, and on runs made sick in twelve ways: what it finds, and whether its fix works.

    python bench/doctor_runs.py --folder /tmp/doctor_runs                 all runs, on one core, in about half an hour
    python bench/doctor_runs.py --folder /tmp/doctor_runs --only lr grpo  those whose names begin with one of these
    python bench/doctor_runs.py --folder /tmp/doctor_runs --look          only look again at the runs that are there

The model is the demo's: it has learnt the format of an answer from examples that are mostly wrong. A healthy run should
have no error and at most one note. A sick run should have an error or a warning of one of the rules that are expected
for it. Then the first fix of its first finding is applied, and the run with it is looked at like a healthy one; what is
found there is fixed in the same way, three times at most. A fix that is no setting (fix the reward, remove duplicates)
is made as the case says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tables import table

from posttrain.algorithms import grpo
from posttrain.apps.demo.arithmetic import answer, build_model, careless_answer, problems, question, write_data
from posttrain.build import TrainingRun  # noqa: F401  imported here for the processes that are forked
from posttrain.cli.main import main as posttrain
from posttrain.cli.run_commands import Report, examined
from posttrain.reporting.run_files import FINISHED, read_info
from posttrain.types import TokenBatch

SFT_STEPS, STEPS, PROMPTS, GROUP = 600, 40, 8, 8
MAX_FIXES = 3  # one after the other, each from what is found in the run with those before
LR = {"grpo": 4e-4, "dpo": 2e-5, "rm": 3e-4, "sft": 5e-4}
REWARDS = """
import random

def length(prompt, response, reference):
    return len(response) / 100

def near_fifty(prompt, response, reference):  # the same answer to every question is best
    digits = "".join(c for c in response if c.isdigit())
    return 1 - abs(int(digits) - 50) / 50 if len(digits) == 2 else -1.0

def constant(prompt, response, reference):
    return 1.0

def flaky(prompt, response, reference):
    if random.Random(prompt + response).random() < 0.3:
        raise RuntimeError("no connection")
    return float(str(reference) in response)

def right(prompt, response, reference):
    return float("{" + str(reference).zfill(2) + "}" in response)
"""


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    settings: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()  # rules of which one must report; none: the run is healthy
    fix: tuple[str, ...] = ()  # in place of the doctor's fix, where that is no setting
    noisy_sampler: bool = False


def rewarded_by(name: str) -> tuple[str, ...]:
    return ("data.default.env_name=mine", f"env.mine.function={{folder}}/rewards.py:{name}", "env.mine.num_workers=1")


NO_VALIDATION = (
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.metric_name=null",
)
HEALTHY = (
    *(Case(f"grpo seed {seed}", "grpo", (f"seed={seed}",)) for seed in (1, 2, 3, 4, 5, 6)),
    Case("grpo, 120 steps", "grpo", ("steps=120", "lr=8e-4")),
    *(Case(f"grpo with KL, seed {seed}", "grpo", (f"seed={seed}", "kl=0.01")) for seed in (1, 2)),
    Case("grpo with LoRA", "grpo", ("lora=16", "lr=2e-3")),
    Case("grpo with an own reward", "grpo", rewarded_by("right")),
    Case("grpo in rounds", "grpo", ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")),
    *(Case(f"{kind} seed {seed}", kind, (f"seed={seed}",)) for kind in ("sft", "dpo", "rm") for seed in (1, 2, 3, 4)),
)
SICK = (
    Case(
        "lr x 100",
        "grpo",
        ("lr=4e-2",),
        ("no-signal", "kl-runaway", "grad-spike", "entropy-collapse", "reward-collapse"),
    ),
    Case(
        "reward = length",
        "grpo",
        rewarded_by("length"),
        ("truncated", "reward-hacking", "kl-runaway"),
        rewarded_by("right"),
    ),
    Case("constant reward", "grpo", rewarded_by("constant"), ("no-signal",), rewarded_by("right")),
    Case(
        "wrong template",
        "grpo",
        ("policy.tokenizer.chat_template={folder}/other.jinja",),
        ("wrong-template", "no-signal", "truncated"),
    ),
    # Exactly 0 is refused before the run.
    Case("temperature 0.01", "grpo", ("policy.generation.temperature=0.01",), ("no-signal",)),
    Case(
        "no KL price, lr x 20",
        "grpo",
        ("kl=0", "lr=8e-3", "doctor.kl_period=5"),
        ("kl-runaway", "no-signal", "entropy-collapse"),
    ),
    Case("truncating length", "grpo", ("policy.generation.max_new_tokens=3",), ("truncated", "no-signal")),
    Case("flaky reward", "grpo", rewarded_by("flaky"), ("unscored",), rewarded_by("right")),
    Case("mismatched sampler", "grpo", (), ("sampler-mismatch",), ("seed=1",), noisy_sampler=True),
    Case(
        "stale rollouts",
        "grpo",
        ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=8", "lr=4e-3"),
        ("off-policy",),
    ),
    Case(
        "duplicated pairs",
        "dpo",
        ("data.train.data_path={folder}/duplicates.jsonl",),
        ("memorised", "too-easy", "equal-pairs"),
        ("data.train.data_path={folder}/pairs.jsonl",),
    ),
    Case(
        "collapsed entropy",
        "grpo",
        (*rewarded_by("near_fifty"), "lr=2e-3", *NO_VALIDATION),
        ("entropy-collapse",),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs go")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--look", action="store_true", help="run nothing; look at the runs that are there")
    args = parser.parse_args()
    folder = args.folder.absolute()
    if not args.look:
        prepare(folder)
    cases = [case for case in (*HEALTHY, *SICK) if not args.only or case.name.startswith(tuple(args.only))]
    rows, false_alarms, misses, unmended = [], 0, 0, 0
    for case in cases:
        found = look(folder, case, case.settings, "", args.look)
        if found is None:
            continue
        first_row = len(rows)
        rows.append([case.name, "sick" if case.expected else "healthy", verdict(found), judged(case, found)])
        false_alarms += not case.expected and not is_healthy(found)
        misses += bool(case.expected) and not is_found(case, found)
        if not case.expected:
            continue
        settings, report = case.settings, found
        for number in range(1, MAX_FIXES + 1):
            fix = case.fix if number == 1 and case.fix else first_setting(report)
            fixed = look(folder, case, (*settings, *fix), f"-fixed-{number}", args.look) if fix else None
            if fixed is None:
                break
            settings, report = (*settings, *fix), fixed
            rows.append([f"  {number}. {' '.join(fix)}".replace(str(folder), "."), "fixed", verdict(report), ""])
            if is_healthy(report):
                break
        unmended += not is_healthy(report)
        print("\n".join("; ".join(row) for row in rows[first_row:]), flush=True)
    print("\n" + table(["run", "is", "found", ""], rows))
    healthy = sum(not case.expected for case in cases)
    print(
        f"false alarms: {false_alarms} of {healthy} healthy runs; missed: {misses} of {len(cases) - healthy} sick "
        "runs; ",
        end="",
    )
    print(f"not healthy after the fix: {unmended}")
    return 0


def prepare(folder: Path) -> None:
    """The model that all runs start from, and their data."""
    if (folder / "taught" / f"step_{SFT_STEPS}").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    build_model(folder / "model", 1, hidden_size=64, intermediate_size=256)
    write_data(folder, 1)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "other.jinja").write_text(
        "{% for message in messages %}### {{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}### assistant\n"
    )
    rng = random.Random(1)
    seen, unseen = problems(1)

    def pairs(sums: Sequence[tuple[int, int]]) -> list[dict[str, str]]:
        """The right sum beside a careless one; in one of five pairs the other way round, so that they are
        not too easy.
        """
        found = []
        for a, b in sums:
            wrong = a + b
            while wrong == a + b:
                wrong = careless_answer(a, b, rng)
            answers = [answer(a + b), answer(wrong)]
            if rng.random() < 0.2:
                answers.reverse()
            found.append({"prompt": question(a, b), "chosen": answers[0], "rejected": answers[1]})
        return found

    write_rows(folder / "pairs.jsonl", pairs(seen))
    write_rows(folder / "held_out_pairs.jsonl", pairs(unseen)[:64])
    write_rows(folder / "duplicates.jsonl", pairs(seen[:8]) * 100)
    taught = [
        *common("sft", folder, "taught", folder / "model"),
        f"steps={SFT_STEPS}",
        "lr=3e-3",
        f"checkpointing.save_period={SFT_STEPS}",
    ]
    if train("sft", taught, folder / "taught.log"):
        sys.exit((folder / "taught.log").read_text())


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def common(kind: str, folder: Path, name: str, model: Path) -> list[str]:
    data = {
        "grpo": f"data.train={{dataset_name: ResponseDataset, data_path: {folder}/train.jsonl}}",
        "sft": f"data.train={{dataset_name: ResponseDataset, data_path: {folder}/examples.jsonl}}",
    }
    held_out = {
        "grpo": f"data.validation={{dataset_name: ResponseDataset, data_path: {folder}/unseen.jsonl}}",
        "sft": "data.validation=null",
    }
    pairs = "{{dataset_name: PreferenceDataset, data_path: {}}}".format
    return [
        f"model={model}",
        "precision=float32",
        "device=cpu",
        "policy.num_threads=1",
        "policy.train_micro_batch_size=64",
        "max_length=64",
        "epochs=1000",
        "policy.scheduler=null",
        f"lr={LR[kind]}",
        f"batch_size={64 if kind != 'grpo' else PROMPTS * GROUP}",
        data.get(kind, f"data.train={pairs(folder / 'pairs.jsonl')}"),
        held_out.get(kind, f"data.validation={pairs(folder / 'held_out_pairs.jsonl')}"),
        f"folder={folder / name}",
        "checkpointing.save_period=1000",
        "checkpointing.save_consolidated=false",
        "cluster.launcher=local",
    ]


GRPO = (
    f"grpo.num_prompts_per_step={PROMPTS}",
    f"grpo.num_generations_per_prompt={GROUP}",
    "policy.generation.max_new_tokens=8",
    "grpo.val_period=10",
    "grpo.val_at_start=true",
    "grpo.max_val_samples=64",
    "data.default.env_name=math",
    "env.math.num_workers=1",
    "kl=0",
)


def look(folder: Path, case: Case, settings: Sequence[str], suffix: str, only_look: bool) -> Report | None:
    """The report on a run, which is made unless it is there."""
    name = re.sub(r"[^a-z0-9]+", "-", case.name.lower()) + suffix
    run = folder / name
    if not only_look and read_info(run).get("status") != FINISHED:
        start = folder / "taught" if case.kind != "sft" else folder / "model"
        words = [*common(case.kind, folder, name, start), f"steps={STEPS}"]
        words += GRPO if case.kind == "grpo" else (f"{case.kind}.val_period=10",)
        shutil.rmtree(run, ignore_errors=True)
        words += [text.replace("{folder}", str(folder)) for text in settings]
        code = train(case.kind, words, folder / f"{name}.log", noisy_sampler=case.noisy_sampler and not suffix)
        if code not in (0, 65):
            print(f"{name} ended with {code}: {(folder / f'{name}.log').read_text()[-2000:]}", flush=True)
    return examined(run) if (run / "metrics.jsonl").exists() else None


def train(kind: str, words: Sequence[str], log: Path, *, noisy_sampler: bool = False) -> int:
    """A run in a process of its own, forked from this one: that has imported everything already. Its exit code."""
    child = multiprocessing.get_context("fork").Process(target=_train, args=(kind, words, log, noisy_sampler))
    child.start()
    child.join()
    return child.exitcode or 0


def _train(kind: str, words: Sequence[str], log: Path, noisy_sampler: bool) -> None:
    if noisy_sampler:
        grpo.rollout_batch = with_noise(grpo.rollout_batch)
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        code = posttrain([kind, *words, "--quiet"])
    sys.exit(code)


def with_noise(exact: Callable[..., TokenBatch]) -> Callable[..., TokenBatch]:
    """A sampler whose log-probabilities are not those of the trainer, as one of another precision or implementation
    has.
    """

    def noisy(*args: object, **options: object) -> TokenBatch:
        batch = exact(*args, **options)
        logprobs = batch.columns["generation_logprobs"]
        noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
        return batch.with_columns(generation_logprobs=logprobs + 0.15 * noise)

    return noisy


def first_setting(report: Report) -> tuple[str, ...]:
    """The first fix of the first finding; nothing if that is no setting."""
    fixes = report.findings[0].fixes if report.findings else ()
    return fixes[:1] if fixes and re.fullmatch(r"[\w.]+=[\w.\-]+", fixes[0]) else ()


def is_healthy(report: Report) -> bool:
    severities = [finding.severity for finding in report.findings]
    return set(severities) <= {"note"} and len(severities) <= 1


def is_found(case: Case, report: Report) -> bool:
    return any(finding.rule in case.expected and finding.severity != "note" for finding in report.findings)


def judged(case: Case, report: Report) -> str:
    if case.expected:
        return "" if is_found(case, report) else f"MISSED: {' or '.join(case.expected)}"
    return "" if is_healthy(report) else "FALSE ALARM"


def verdict(report: Report) -> str:
    return (
        ", ".join(f"{finding.rule} ({finding.severity}, step {finding.step})" for finding in report.findings)
        or "nothing"
    )


if __name__ == "__main__":
    sys.exit(main())
