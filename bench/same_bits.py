"""Two versions of posttrain, the same tiny runs: are metrics and weights equal to the last bit?

    python bench/same_bits.py OLD NEW [--only grpo-fresh dpo] [--cache FOLDER]

OLD and NEW are commits, or folders with a checkout. Each side runs on this machine, in one process with one thread,
from its own sources. Metrics that only NEW writes are listed and no difference. Three comparisons per run:

    metrics   every number under train/ and validation/ of metrics.jsonl
    weights   the bytes of the last checkpoint's weights
    resumed   NEW resumes OLD's run from the checkpoint half way, and the result equals OLD's uninterrupted run

The results of a commit are kept in --cache, so that comparing many trees with one commit runs that commit once. Exits
with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]
STEPS = 6

REWARDS = """
def odd(prompt, response, reference):
    return sum(ord(c) % 2 for c in response) / max(1, len(response))

def first_is_odd(prompt, response, reference):
    return float(bool(response) and ord(response[0]) % 2)
"""

TALK = """
from posttrain.environments.turns import Turn, TurnEnvironment

class Talk(TurnEnvironment):
    def reset(self, task):
        return (0, 0.0)

    def step(self, state, response):
        turn, total = state
        total += sum(ord(c) % 2 for c in response) / max(1, len(response))
        if turn == 2:
            return Turn(reward=total, done=True)
        return Turn((turn + 1, total), f"{len(response)}!", counts={"replies": 1})

    def end(self, state, reason):
        return state[1]
"""

# Runs in one process of one side: builds the inputs if they are missing, then each run.
DRIVER = """
import json, sys
from pathlib import Path
job = json.loads(sys.argv[1])
inputs = Path(job["inputs"])
if not (inputs / "model" / "config.json").exists():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    try:
        from posttrain.apps.demo.arithmetic import build_tokenizer
    except ImportError:  # before the apps had a folder
        from posttrain.demo.arithmetic import build_tokenizer
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )).save_pretrained(inputs / "model")
    tokenizer.save_pretrained(inputs / "model")
from posttrain.cli.main import main
for name, arguments in job["runs"]:
    if name.endswith("-fp8"):  # products and kernels by torch, as the tests do it on a CPU
        import pytest
        from fp8_references import use_torch_fp8
        with pytest.MonkeyPatch.context() as patch:
            use_torch_fp8(patch)
            code = main([*arguments, "--quiet"])
    else:
        code = main([*arguments, "--quiet"])
    if code:
        sys.exit(f"{name}: exit {code}")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="commit or folder")
    parser.add_argument("new", help="commit or folder")
    parser.add_argument("--only", nargs="+", metavar="RUN", choices=sorted(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "posttrain-same-bits")
    args = parser.parse_args()
    names = args.only or list(RUNS)
    inputs = args.cache / "inputs"
    write_inputs(inputs)
    with sources(args.old) as (old_source, commit):
        old = args.cache / commit if commit else args.cache / "working-tree-old"
        if commit is None:
            shutil.rmtree(old, ignore_errors=True)
        execute(old_source, inputs, [(name, old / name / "whole", STEPS) for name in names])
    with tempfile.TemporaryDirectory() as folder, sources(args.new) as (new_source, _):
        new = Path(folder)
        for name in names:
            shutil.copytree(old / name / "whole", new / name / "resumed")
            shutil.rmtree(new / name / "resumed" / f"step_{STEPS}")
        execute(new_source, inputs, [(name, new / name / "whole", STEPS) for name in names])
        execute(new_source, inputs, [(name, new / name / "resumed", STEPS) for name in names], force=True)
        return report(names, old, new)


# -- the runs ----------------------------------------------------------------------------------------------------------


def common(inputs: Path, kind: str, data: str) -> list[str]:
    return [
        kind,
        f"policy.model_name={inputs / 'model'}",
        "policy.precision=float32",
        "policy.device=cpu",
        "policy.num_threads=1",
        "policy.max_total_sequence_length=64",
        "policy.optimizer.kwargs.lr=1e-2",
        "policy.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 4}}",
        f"{kind}.max_num_epochs=100",
        f"{kind}.val_period=2",
        f"data.train={{dataset_name: {data}}}",
        "checkpointing.save_period=3",
        "checkpointing.keep_top_k=null",
    ]


def grpo(inputs: Path, reward: str = "odd") -> list[str]:
    return [
        *common(inputs, "grpo", f"ResponseDataset, data_path: {inputs / 'questions.jsonl'}"),
        f"data.validation={{dataset_name: ResponseDataset, data_path: {inputs / 'held_out.jsonl'}}}",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=8",
        "policy.generation.max_new_tokens=12",
        "data.default.env_name=mine",
        f"env.mine.function={inputs / 'rewards.py'}:{reward}",
        "env.mine.num_workers=1",
    ]


def multi_turn(inputs: Path) -> list[str]:
    kept = [argument for argument in grpo(inputs) if not argument.startswith("env.mine.function")]
    return [*kept, f"env.mine.turns={inputs / 'talk.py'}:Talk", "grpo.max_rollout_turns=4"]


def recorded(inputs: Path) -> list[str]:
    return [
        *common(inputs, "grpo", f"TraceGroups, data_path: {inputs / 'traces.jsonl'}"),
        "data.validation=null",
        "grpo.val_period=0",
        "grpo.num_prompts_per_step=5",
        "grpo.num_generations_per_prompt=4",
        "grpo.num_recorded_per_prompt=2",
        "policy.train_global_batch_size=10",
        "policy.generation.max_new_tokens=8",
        "grpo.use_leave_one_out_baseline=false",
        "data.default.env_name=mine",
        f"env.mine.function={inputs / 'rewards.py'}:odd",
        "env.mine.num_workers=1",
        "checkpointing.metric_name=null",
    ]


def dynamic_sampling(inputs: Path) -> list[str]:
    return [
        *grpo(inputs, "first_is_odd"),
        "grpo.use_dynamic_sampling=true",
        "grpo.batch_multiplier=1.5",
        "grpo.dynamic_sampling_max_gen_batches=20",
    ]


def pairs(inputs: Path, kind: str) -> list[str]:
    return [
        *common(inputs, kind, f"PreferenceDataset, data_path: {inputs / 'pairs.jsonl'}"),
        f"data.validation={{dataset_name: PreferenceDataset, data_path: {inputs / 'held_out_pairs.jsonl'}}}",
        "policy.train_global_batch_size=6",
        "policy.train_micro_batch_size=2",
    ]


def sft(inputs: Path) -> list[str]:
    return [
        *common(inputs, "sft", f"ResponseDataset, data_path: {inputs / 'questions.jsonl'}"),
        f"data.validation={{dataset_name: ResponseDataset, data_path: {inputs / 'held_out.jsonl'}}}",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=4",
    ]


ASYNCHRONOUS = ["grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2"]
IN_FP8 = ["policy.precision=bfloat16", "policy.fp8=true"]
LORA = [
    "policy.dtensor_cfg.lora_cfg.enabled=true",
    "policy.dtensor_cfg.lora_cfg.dim=4",
    "policy.dtensor_cfg.lora_cfg.alpha=16",
]

RUNS = {
    "grpo-fresh": grpo,
    "grpo-recorded": recorded,
    "grpo-multi-turn": multi_turn,
    "grpo-dynamic-sampling": dynamic_sampling,
    "grpo-lora": lambda inputs: [*grpo(inputs), *LORA],
    "grpo-asynchronous": lambda inputs: [*grpo(inputs), *ASYNCHRONOUS],
    "grpo-fp8": lambda inputs: [*grpo(inputs), *IN_FP8],
    "dpo": lambda inputs: pairs(inputs, "dpo"),
    "dpo-fp8": lambda inputs: [*pairs(inputs, "dpo"), *IN_FP8],
    "rm": lambda inputs: pairs(inputs, "rm"),
    "sft": sft,
}


def write_inputs(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    def word(letters: str) -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randrange(3, 8)))

    sums = [(rng.randrange(50), rng.randrange(50)) for _ in range(30)]
    questions = [{"input": f"{a} + {b} = ?", "output": str(a + b)} for a, b in sums]
    both = [{"prompt": q["input"], "chosen": word("abcdefgh"), "rejected": word("stuvwxyz")} for q in questions]
    traces = [
        {"input": q["input"], "output": word("abcdefgh" if k % 2 else "stuvwxyz"), "final_reward": float(k % 2)}
        for q in questions[:20]
        for k in range(6)
    ]
    files = {
        "questions.jsonl": questions[:22],
        "held_out.jsonl": questions[22:26],
        "pairs.jsonl": both[:22],
        "held_out_pairs.jsonl": both[22:27],
        "traces.jsonl": traces,
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "talk.py").write_text(TALK)


# -- running one side --------------------------------------------------------------------------------------------------


@contextmanager
def sources(side: str) -> Iterator[tuple[Path, str | None]]:
    """The folder with the sources, and the commit if `side` is one."""
    if Path(side).is_dir():
        yield Path(side).absolute(), None
        return
    repository = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=repository, check=True, capture_output=True, text=True
        ).stdout.strip()

    commit = git("rev-parse", f"{side}^{{commit}}")
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "src", "tests"], cwd=repository, check=True, capture_output=True
        )
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder), commit


def execute(source: Path, inputs: Path, runs: Sequence[tuple[str, Path, int]], *, force: bool = False) -> None:
    """The runs that have not finished yet, all in one process; `force`: all of them."""
    todo = [(name, folder, steps) for name, folder, steps in runs if force or not (folder / "done").exists()]
    if not todo:
        return
    commands = [
        (name, [*RUNS[name](inputs), f"checkpointing.checkpoint_dir={folder}", f"{_kind(name)}.max_num_steps={steps}"])
        for name, folder, steps in todo
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{source / 'src'}:{source / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    job = json.dumps({"inputs": str(inputs), "runs": commands})
    ended = subprocess.run([sys.executable, "-c", DRIVER, job], env=environment, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{source}:\n{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}")
    for _, folder, _ in todo:
        (folder / "done").touch()


def _kind(name: str) -> str:
    return name.partition("-")[0]


# -- comparing ---------------------------------------------------------------------------------------------------------


def numbers_of(folder: Path) -> dict[int, Row]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        row["step"]: {key: value for key, value in row.items() if key.startswith(("train/", "validation/"))}
        for row in rows
    }


def weights_of(folder: Path) -> dict[str, bytes]:
    files = sorted((folder / f"step_{STEPS}" / "policy" / "weights" / "model").glob("*.safetensors"))
    assert files, f"no weights in {folder}"
    return {file.name: file.read_bytes() for file in files}


def differences(old: Path, new: Path) -> list[str]:
    found = []
    ours, theirs = numbers_of(old), numbers_of(new)
    for step in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(step, {}), theirs.get(step, {})
        found += [f"step {step} {k}: {one[k]} -> {other.get(k)}" for k in sorted(one) if one[k] != other.get(k)]
    if weights_of(old) != weights_of(new):
        found.append("weights of the last checkpoint differ")
    return found


def report(names: Sequence[str], old: Path, new: Path) -> int:
    num_different = 0
    for name in names:
        for which in ("whole", "resumed"):
            found = differences(old / name / "whole", new / name / which)
            num_different += bool(found)
            before, rows = numbers_of(old / name / "whole"), numbers_of(new / name / which)
            added = sorted({key for step, row in rows.items() for key in row.keys() - before.get(step, {}).keys()})
            numbers = sum(len(row) for row in rows.values())
            verdict = "DIFFERENT" if found else f"equal: {numbers} numbers, weights"
            print(f"{name:22} {'new run' if which == 'whole' else 'resumed from old':17} {verdict}")
            for line in found[:8]:
                print(f"    {line}")
            if added:
                print(f"    only in NEW: {', '.join(added)}")
    print("all equal" if not num_different else f"{num_different} of {2 * len(names)} differ")
    return int(bool(num_different))


if __name__ == "__main__":
    sys.exit(main())
