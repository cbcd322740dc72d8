"""The files of the pipeline's demo: a small model trained on mostly wrong answers, labelled traces, unseen problems.

    FOLDER/model          a Hugging Face folder; its answers have the right format and are sometimes right
    FOLDER/traces.jsonl   answers of the same quality, each with a reward of 1 or 0
    FOLDER/unseen.jsonl   problems that are in no trace

`num_prompts` is the number of prompts in the traces. Raising it simulates new data.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from posttrain.apps.ship.pipeline.stage import Stop
from posttrain.apps.ship.pipeline.training_process import run_training
from posttrain.config.pipeline import DemoSection
from posttrain.errors import ExitCode
from posttrain.files import durable
from posttrain.files.digests import digest

MARK = "world.json"
MODEL, TRACES, UNSEEN = "model", "traces.jsonl", "unseen.jsonl"


def unmade(demo: DemoSection) -> tuple[str, ...]:
    """Files that are missing, or were made with other settings."""
    folder = Path(demo.folder)
    files = {TRACES: demo_traces(demo), UNSEEN: _unseen(demo)}
    others = [name for name, text in files.items() if not _holds(folder / name, text)]
    return (*([] if _has_model(demo) else [MODEL]), *others)


def _has_model(demo: DemoSection) -> bool:
    folder = Path(demo.folder)
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(mark == _mark(demo) and (folder / MODEL / "config.json").is_file())


def make_world(demo: DemoSection, say: Callable[[str], None], *, quiet: bool, lock: int | None) -> None:
    """Make the files that are missing, or were made with other settings."""
    folder = Path(demo.folder)
    durable.make_folder(folder)
    if not _has_model(demo):
        say(f"demo      makes a model and trains it on the format: SFT, {demo.sft_steps} steps")
        _make_model(demo, folder, say, quiet=quiet, lock=lock)
        durable.write_text(folder / MARK, json.dumps(_mark(demo)) + "\n")
    _write_if_other(folder / TRACES, demo_traces(demo))
    _write_if_other(folder / UNSEEN, _unseen(demo))


def _mark(demo: DemoSection) -> dict[str, int]:
    return {"seed": demo.seed, "sft_steps": demo.sft_steps}


def _make_model(demo: DemoSection, folder: Path, say: Callable[[str], None], *, quiet: bool, lock: int | None) -> None:
    from posttrain.apps.demo.arithmetic import build_model, write_data
    from posttrain.apps.export.convert import ConversionSettings, convert
    from posttrain.config import load_config

    taught = folder / f"taught-{digest(_mark(demo))[:8]}"
    if not (taught / "sft.yaml").is_file():
        shutil.rmtree(taught, ignore_errors=True)
        build_model(taught / "fresh", demo.seed)
        write_data(taught / "data", demo.seed)
        loaded = load_config("sft", None, _sft_settings(demo, taught))
        durable.write_text(taught / "sft.yaml", loaded.to_yaml())
    if code := run_training("sft", taught / "sft.yaml", quiet=quiet, lock=lock):
        raise Stop(code if code in set(ExitCode) else ExitCode.CRASHED, f"demo: SFT ended with exit code {code}")
    settings = ConversionSettings(force=True, verify=False)
    convert(str(taught / "run"), folder / MODEL, settings, shown_as="careless arithmetic", say=say)


def _sft_settings(demo: DemoSection, taught: Path) -> list[str]:
    return [
        f"policy.model_name={taught / 'fresh'}",
        "policy.precision=float32",
        "policy.device=cpu",
        "policy.num_threads=1",
        "policy.max_total_sequence_length=64",
        "policy.sequence_packing={enabled: true, train_mb_tokens: 8192, logprob_mb_tokens: 8192}",
        "policy.train_global_batch_size=64",
        "policy.optimizer={name: torch.optim.AdamW, kwargs: {lr: 1e-3, weight_decay: 0.01, betas: [0.9, 0.98]}}",
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 20}}]",
        f"sft.max_num_steps={demo.sft_steps}",
        "sft.max_num_epochs=1000",
        f"sft.seed={demo.seed}",
        "sft.val_at_start=false",
        "sft.val_period=0",
        f"data.train={{dataset_name: ResponseDataset, data_path: {taught / 'data/examples.jsonl'}}}",
        "data.validation=null",
        "cluster.launcher=local",
        f"checkpointing.checkpoint_dir={taught / 'run'}",
        "checkpointing.save_period=100",
        "checkpointing.metric_name=null",
        "checkpointing.keep_top_k=1",
    ]


def demo_traces(demo: DemoSection) -> str:
    from posttrain.apps.demo.arithmetic import answer, careless_answer, problems, question

    lines = []
    train, _ = problems(demo.seed)
    for a, b in train[: demo.num_prompts]:
        rng = random.Random(
            f"{demo.seed}/{a}/{b}"
        )  # one per prompt: more prompts do not change the answers to the others
        for _ in range(demo.answers_per_prompt):
            result = careless_answer(a, b, rng)
            row = {"input": question(a, b), "output": answer(result), "final_reward": float(result == a + b)}
            lines.append(json.dumps({**row, "reference": str(a + b)}) + "\n")
    return "".join(lines)


def _unseen(demo: DemoSection) -> str:
    from posttrain.apps.demo.arithmetic import problems, question

    _, unseen = problems(demo.seed)
    return "".join(json.dumps({"problem": question(a, b), "answer": str(a + b)}) + "\n" for a, b in unseen)


def _write_if_other(file: Path, text: str) -> None:
    if not _holds(file, text):
        durable.write_text(file, text)


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text
