#!/usr/bin/env python3
"""The doctor on small runs that are healthy, and on runs made sick in twelve ways: what it finds, and whether its fix mends.

    python bench/doctor_runs.py --folder /tmp/doctor_runs                 all runs, on a CPU, in about a quarter of an hour
    python bench/doctor_runs.py --folder /tmp/doctor_runs --only lr grpo  those whose names begin with one of these
    python bench/doctor_runs.py --folder /tmp/doctor_runs --look          only look again at the runs that are there

The model is the demo's: it has learnt the format of an answer from examples that are mostly wrong. A healthy run should have no
error and at most one note. A sick run should have an error or a warning of one of the rules that are expected for it. Then the
first of its fixes that are settings is applied, and the mended run is looked at like a healthy one. A fix that is no setting
(mend the reward, remove duplicates) is made as the case says.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import table

from posttrain.cli.doctor_command import Report, examined
from posttrain.demo.arithmetic import answer, build_model, careless_answer, problems, question, write_data

SFT_STEPS, STEPS, GROUP = 300, 40, 8
LR = {"grpo": 4e-4, "dpo": 2e-5, "rm": 3e-4, "sft": 5e-4}
REWARDS = """
import random

def length(prompt, response, reference):
    return len(response) / 100

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
    expected: tuple[str, ...] = ()  # rules of which one has to speak; none: the run is healthy
    mend: tuple[str, ...] = ()  # in place of the doctor's fix, where that is no setting
    noisy_sampler: bool = False


def rewarded_by(name: str) -> tuple[str, ...]:
    return ("data.default.env_name=mine", f"env.mine.function={{folder}}/rewards.py:{name}", "env.mine.num_workers=2")


NO_VALIDATION = (
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.metric_name=null",
)
HEALTHY = (
    *(Case(f"grpo seed {seed}", "grpo", (f"seed={seed}",)) for seed in (1, 2, 3, 4)),
    *(Case(f"grpo with KL, seed {seed}", "grpo", (f"seed={seed}", "kl=0.01")) for seed in (1, 2)),
    Case("grpo with LoRA", "grpo", ("lora=16", "lr=2e-3")),
    Case("grpo with an own reward", "grpo", rewarded_by("right")),
    Case("grpo in rounds", "grpo", ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")),
    *(Case(f"{kind} seed {seed}", kind, (f"seed={seed}",)) for kind in ("sft", "dpo", "rm") for seed in (1, 2, 3)),
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
    Case("temperature 0", "grpo", ("policy.generation.temperature=0",), ("no-signal",)),
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
        ("lr=2e-3", "grpo.advantage_clip_low=0", "kl=0", *NO_VALIDATION),
        ("entropy-collapse", "no-signal"),
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
        rows.append([case.name, "sick" if case.expected else "healthy", verdict(found), judged(case, found)])
        false_alarms += not case.expected and not is_healthy(found)
        misses += bool(case.expected) and not is_found(case, found)
        if not case.expected:
            continue
        fix = case.mend or first_setting(found)
        mended = look(folder, case, (*case.settings, *fix), "-mended", args.look) if fix else None
        unmended += mended is None or not is_healthy(mended)
        rows.append([f"  with {' '.join(fix) or 'no fix'}", "mended", "" if mended is None else verdict(mended), ""])
        print(f"{case.name}: {rows[-2][2]}; {rows[-1][0].strip()}: {rows[-1][2]}", flush=True)
    print("\n" + table(["run", "is", "found", ""], rows))
    healthy = sum(not case.expected for case in cases)
    print(
        f"false alarms: {false_alarms} of {healthy} healthy runs; missed: {misses} of {len(cases) - healthy} sick runs; ",
        end="",
    )
    print(f"not healthy after the fix: {unmended}")
    return 0


def prepare(folder: Path) -> None:
    """The model that all runs start from, and their data."""
    if (folder / "taught" / f"step_{SFT_STEPS}").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    build_model(folder / "model", 1)
    write_data(folder, 1)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "other.jinja").write_text(
        "{% for message in messages %}### {{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}### assistant\n"
    )
    rng = random.Random(1)
    train, unseen = problems(1)

    def pairs(sums: Sequence[tuple[int, int]]) -> list[dict[str, str]]:
        """The right sum beside a careless one; in one of five pairs the other way round, so that they are not too easy."""
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

    write_rows(folder / "pairs.jsonl", pairs(train))
    write_rows(folder / "held_out_pairs.jsonl", pairs(unseen)[:64])
    write_rows(folder / "duplicates.jsonl", pairs(train[:8]) * 100)
    taught = [
        *common("sft", folder, "taught", folder / "model"),
        f"steps={SFT_STEPS}",
        "lr=1e-3",
        f"checkpointing.save_period={SFT_STEPS}",
    ]
    subprocess.run([sys.executable, "-m", "posttrain.cli.main", "sft", *taught, "--quiet"], check=True)


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
        "max_length=64",
        "epochs=1000",
        "policy.scheduler=null",
        f"lr={LR[kind]}",
        f"batch_size={64 if kind != 'grpo' else 16 * GROUP}",
        data.get(kind, f"data.train={pairs(folder / 'pairs.jsonl')}"),
        held_out.get(kind, f"data.validation={pairs(folder / 'held_out_pairs.jsonl')}"),
        f"folder={folder / name}",
        "checkpointing.save_period=1000",
        "checkpointing.save_consolidated=false",
        "cluster.launcher=local",
    ]


GRPO = ("grpo.num_prompts_per_step=16", f"grpo.num_generations_per_prompt={GROUP}", "policy.generation.max_new_tokens=8",
        "grpo.val_period=10", "grpo.val_at_start=true", "grpo.max_val_samples=64", "data.default.env_name=math",
        "env.math.num_workers=2", "kl=0")  # fmt: skip


def look(folder: Path, case: Case, settings: Sequence[str], suffix: str, only_look: bool) -> Report | None:
    """The report on a run, which is made unless it is there."""
    name = re.sub(r"[^a-z0-9]+", "-", case.name.lower()) + suffix
    run = folder / name
    if not only_look and not (run / "report.html").exists():
        start = folder / "taught" if case.kind != "sft" else folder / "model"
        words = [*common(case.kind, folder, name, start), f"steps={STEPS}"]
        words += GRPO if case.kind == "grpo" else (f"{case.kind}.val_period=10",)
        words += [text.replace("{folder}", str(folder)) for text in settings]
        program = (
            NOISY
            if case.noisy_sampler and not suffix
            else "import sys; from posttrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, case.kind, *words, "--quiet"], capture_output=True, text=True
        )
        if done.returncode not in (0, 65):
            print(
                f"{case.name}{suffix} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-2000:]}",
                flush=True,
            )
    return examined(run) if (run / "metrics.jsonl").exists() else None


# A sampler whose log-probabilities are not those of the trainer, as one of another precision or implementation has.
NOISY = """
import sys
import torch
from posttrain.algorithms import grpo
exact = grpo.rollout_batch
def noisy(groups, **options):
    batch = exact(groups, **options)
    generator = torch.Generator().manual_seed(0)
    logprobs = batch.columns["generation_logprobs"]
    return batch.with_columns(generation_logprobs=logprobs + 0.15 * torch.randn(logprobs.shape, generator=generator))
grpo.rollout_batch = noisy
from posttrain.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def first_setting(report: Report) -> tuple[str, ...]:
    settings = (fix for finding in report.findings for fix in finding.fixes if re.fullmatch(r"[\w.]+=[\w.\-]+", fix))
    return tuple(fix for _, fix in zip(range(1), settings, strict=False))


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
