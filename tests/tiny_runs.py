"""Whole training runs that take seconds: a model of some ten thousand parameters, its data, and ways to start a run.

A run can be started in this process (`run`), as a user starts it (`command`), or in a process forked from one that has
imported everything already (`start`): that one is there half a second later instead of six, so that tests can afford to
kill many.
"""

from __future__ import annotations

import functools
import gzip
import json
import logging
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from posttrain.apps.demo.arithmetic import build_tokenizer
from posttrain.cli.main import main

Row = dict[str, Any]

# torch logs a line for every tensor that it saves; in the output of a failed test they would hide everything else.
logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True

# The share of characters with an odd code: differs between almost any two answers, and can be raised by training.
ODD_CHARACTERS = """
def odd(prompt, response, reference):
    return sum(ord(c) % 2 for c in response) / max(1, len(response))
"""


def save_model(
    folder: Path,
    *,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_length: int = 128,
    seed: int = 0,
    num_heads: int = 2,
    num_kv_heads: int = 1,
) -> Path:
    """A random Llama with the demo's tokenizer, as a Hugging Face folder."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            max_position_embeddings=max_length,
            initializer_range=0.2,  # far from uniform: a wrong weight or position shows in every number
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_reward_model(model: Path, folder: Path) -> Path:
    """A random one with the body's sizes and the tokenizer of `model`."""
    shutil.copytree(model, folder)
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(model, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def save_expert_model(folder: Path) -> Path:
    """The same of a Qwen3-MoE with eight experts, of which a token uses two."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), head_dim=16, initializer_range=0.2, **sizes, **experts, **ids)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    sums = [(rng.randrange(50), rng.randrange(50)) for _ in range(count)]
    return [{"input": f"{a} + {b} = ?", "output": str(a + b)} for a, b in sums]


def preferences(count: int, seed: int = 0) -> list[Row]:
    """The better answer is written with the first letters of the alphabet, the worse with the last."""
    rng = random.Random(seed)

    def word(letters: str) -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randrange(3, 8)))

    return [
        {"prompt": row["input"], "chosen": word("abcdefgh"), "rejected": word("stuvwxyz")}
        for row in questions(count, seed)
    ]


def traces(count: int, per_prompt: int, seed: int = 0) -> list[Row]:
    """Answers in the first letters of the alphabet were liked, those in the last were not."""
    rng = random.Random(seed)

    def word(letters: str) -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randrange(3, 6)))

    return [
        {"input": row["input"], "output": word("abcdefgh" if k % 2 else "stuvwxyz"), "final_reward": float(k % 2)}
        for row in questions(count, seed)
        for k in range(per_prompt)
    ]


def common(model: Path, folder: Path) -> list[str]:
    """Settings that every tiny run needs. One thread: sums of floats must be taken in the same order every time."""
    return [
        f"policy.model_name={model}",
        "policy.precision=float32",
        "policy.device=cpu",
        "policy.num_threads=1",
        "policy.max_total_sequence_length=64",
        "checkpointing.save_consolidated=false",  # auto would depend on how long steps take
        f"checkpointing.checkpoint_dir={folder}",
    ]


def grpo(model: Path, data: Path, folder: Path, *, steps: int = 8, reward: str = "") -> list[str]:
    """Two updates a step, KL, warm-up, validation, more steps than an epoch has. `reward`: file.py:name."""
    return [
        "grpo",
        *common(model, folder),
        f"grpo.max_num_steps={steps}",
        "grpo.max_num_epochs=100",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=8",
        "policy.generation.max_new_tokens=12",
        "policy.optimizer.kwargs.lr=1e-2",
        "grpo.val_period=2",
        f"data.train={{dataset_name: ResponseDataset, data_path: {data / 'questions.jsonl'}}}",
        f"data.validation={{dataset_name: ResponseDataset, data_path: {data / 'held_out_questions.jsonl'}}}",
        "data.default.env_name=mine",
        f"env.mine.function={reward or data / 'rewards.py:odd'}",
        "env.mine.num_workers=1",
        "checkpointing.save_period=2",
        "checkpointing.keep_top_k=null",
    ]


def recorded(model: Path, data: Path, folder: Path, *extra: str, steps: int = 8) -> list[str]:
    """GRPO from labelled traces."""
    return [
        "grpo",
        *common(model, folder),
        f"grpo.max_num_steps={steps}",
        "grpo.max_num_epochs=100",
        "grpo.num_prompts_per_step=5",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=20",
        "policy.generation.max_new_tokens=8",
        "policy.optimizer.kwargs.lr=5e-3",
        "loss_fn.reference_policy_kl_penalty=0",
        "grpo.use_leave_one_out_baseline=false",
        "grpo.val_period=0",
        f"data.train={{dataset_name: TraceGroups, data_path: {data / 'traces.jsonl'}}}",
        "data.validation=null",
        "data.default.env_name=mine",
        f"env.mine.function={data / 'rewards.py:odd'}",
        "env.mine.num_workers=1",
        "checkpointing.save_period=4",
        "checkpointing.metric_name=null",
        *extra,
    ]


def dpo(model: Path, data: Path, folder: Path, *, steps: int = 8, kind: str = "dpo") -> list[str]:
    return [
        kind,
        *common(model, folder),
        f"{kind}.max_num_steps={steps}",
        f"{kind}.max_num_epochs=100",
        "policy.train_global_batch_size=6",
        "policy.train_micro_batch_size=2",
        "policy.optimizer.kwargs.lr=1e-2",
        f"{kind}.val_period=2",
        f"data.train={{dataset_name: PreferenceDataset, data_path: {data / 'pairs.jsonl'}}}",
        f"data.validation={{dataset_name: PreferenceDataset, data_path: {data / 'held_out_pairs.jsonl'}}}",
        "checkpointing.save_period=2",
        "checkpointing.keep_top_k=null",
    ]


rm = functools.partial(dpo, kind="rm")


def sft(model: Path, data: Path, folder: Path, *, steps: int = 8) -> list[str]:
    return [
        "sft",
        *common(model, folder),
        f"sft.max_num_steps={steps}",
        "sft.max_num_epochs=100",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=4",
        "policy.optimizer.kwargs.lr=1e-2",
        "sft.val_period=10",
        f"data.train={{dataset_name: ResponseDataset, data_path: {data / 'questions.jsonl'}}}",
        f"data.validation={{dataset_name: ResponseDataset, data_path: {data / 'held_out_questions.jsonl'}}}",
        "checkpointing.save_period=100",
    ]


def evaluation(model: Path, dataset: Path, folder: Path, *settings: str) -> list[str]:
    return [
        "eval",
        str(model),
        f"data.dataset_name={dataset}",
        f"eval.save_path={folder}",
        "eval.bootstrap_resamples=200",
        "generation.device=cpu",
        "generation.num_threads=1",
        "generation.vllm_cfg.max_model_len=64",
        "generation.max_new_tokens=12",
        "env.mine.num_workers=1",
        *settings,
    ]


LORA = [
    "policy.dtensor_cfg.lora_cfg.enabled=true",
    "policy.dtensor_cfg.lora_cfg.dim=4",
    "policy.dtensor_cfg.lora_cfg.alpha=16",
]


def save_data(folder: Path) -> Path:
    """Questions and pairs to train on and to validate with, and a file with a reward function."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "questions.jsonl", questions(22))
    write_rows(folder / "held_out_questions.jsonl", questions(3, seed=1))
    write_rows(folder / "traces.jsonl", traces(20, 6))
    write_rows(folder / "pairs.jsonl", preferences(22))
    write_rows(folder / "held_out_pairs.jsonl", preferences(5, seed=1))
    (folder / "rewards.py").write_text(ODD_CHARACTERS)
    return folder


def save_image_data(folder: Path) -> Path:
    """Questions and pairs about images of several sizes, with the same text."""
    from tiny_vision import picture

    questions: list[dict[str, Any]] = []
    for index in range(8):
        picture(8 + 8 * (index % 3), 8 + 4 * (index % 4), index).save(folder / f"{index}.png")
        questions.append({"input": "What?", "output": str(index % 3), "images": [f"{index}.png"]})
    pairs = [
        {"prompt": one["input"], "chosen": one["output"], "rejected": "no", "images": one["images"]}
        for one in questions
    ]
    for name, rows in (("questions", questions), ("pairs", pairs)):
        write_rows(folder / f"{name}.jsonl", rows)
        write_rows(folder / f"held_out_{name}.jsonl", rows[:3])
    (folder / "rewards.py").write_text(ODD_CHARACTERS)
    return folder


FORKED = "forked\n"


# -- ways to start a run -----------------------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> int:
    """In this process; the exit code."""
    return main([*arguments, "--quiet"])


def run_as_printed(kind: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """`posttrain init KIND` in the working directory, and what it prints to type next; the kinds that were trained. A
    tiny model is where `models fetch` puts one.
    """
    save_model(Path("models/smollm2-135m-instruct"), max_length=1024)
    assert main(["init", kind]) == 0
    lines = [line.split("#")[0].split() for line in capsys.readouterr().out.splitlines()]
    words = [line[1:] for line in lines if line[:1] == ["posttrain"] and line[1] not in ("models", "config")]
    for arguments in words:
        assert run(arguments) == 0
    return [arguments[0] for arguments in words]


def command(arguments: Sequence[str]) -> list[str]:
    """As a user starts it."""
    return [sys.executable, "-m", "posttrain.cli.main", *arguments]


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["posttrain.build", "tiny_runs"])
    return context


def start(arguments: Sequence[str], log: Path, hold: Path | None = None) -> BaseProcess:
    """In a process of its own, forked from one that has imported everything. What it prints goes to `log`.

    No checkpoint is completed while the file `hold` exists: it keeps the name that it has while it is being written.
    """
    log.touch()
    process: BaseProcess = _context().Process(target=_main_with_log, args=(list(arguments), str(log), hold))
    process.start()
    assert wait_until(lambda: log.read_text().startswith(FORKED), process), "the process did not get as far as main"
    return process


def _main_with_log(arguments: list[str], log: str, hold: Path | None) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.write(1, FORKED.encode())
    if hold is not None:
        _hold_checkpoints(hold)
    os.setsid()  # so that a signal can be sent to the whole of it, as a terminal does
    sys.exit(main(arguments))


def _hold_checkpoints(hold: Path) -> None:
    rename = os.rename

    def held_rename(source: Any, target: Any, **options: Any) -> None:
        while Path(source).name.startswith("tmp_step_") and hold.exists():
            time.sleep(0.005)
        rename(source, target, **options)

    os.rename = held_rename


def wait_until(condition: Callable[[], Any], process: BaseProcess | None = None, limit_s: float = 120.0) -> bool:
    """Whether `condition` came true (while the process lived)."""
    end = time.monotonic() + limit_s
    while process is None or process.is_alive():
        if condition():
            return True
        assert time.monotonic() < end, "there was no progress"
        time.sleep(0.002)
    return bool(condition())


def same_up_to_rounding(expected: Any) -> Any:
    """For numbers of two runs that add up in different orders, in float32.

    A step of these runs adds up about 200 tokens, whose terms are of order 1: a sum errs by up to 200 * eps = 2.4e-5,
    which is the bound for sums that cancel. Updates pass errors on to later steps, hence ten times as much relative to
    sums that do not cancel. Errors in the code that these comparisons look for (a wrong denominator, a lost token) are
    of some percent.
    """
    return pytest.approx(expected, rel=2e-4, abs=2.4e-5)


# -- what a run has written --------------------------------------------------------------------------------------------


def rows_of(folder: Path) -> list[Row]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count_rows(folder: Path) -> int:
    """Lines so far, of a file that may be cut or replaced meanwhile."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def results_of(folder: Path) -> list[Row]:
    """The rows without clocks: what must not depend on when and where a run ran."""
    return [
        {key: value for key, value in row.items() if key == "step" or key.startswith(("train/", "validation/"))}
        for row in rows_of(folder)
    ]


def trained_draws(folder: Path, steps: int) -> list[int]:
    """Which draws of prompts the samples of a run come from, in the order in which they were trained."""
    files = [folder / "rollouts" / f"step_{step}.jsonl.gz" for step in range(1, steps + 1)]
    return [json.loads(line)["draw"] for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def weights_of(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of the weight files."""
    files = sorted((checkpoint / "policy" / "weights" / "model").glob("*.safetensors"))
    assert files, f"no weights in {checkpoint}"
    return {file.name: file.read_bytes() for file in files}


def assert_same_curves(folder: Path, expected: Path, *, but: str | None = None) -> None:
    """Every number of every step up to rounding, except those with `but` in their name."""

    def rows(of: Path) -> list[Row]:
        return [{key: value for key, value in row.items() if but is None or but not in key} for row in results_of(of)]

    ours, theirs = rows(folder), rows(expected)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            assert value == same_up_to_rounding(other[key]), f"{key} at step {row['step']}"


def copy_until(step: int, source: Path, target: Path) -> Path:
    """A run's folder as it was when checkpoint `step` was the newest; what else it wrote is still there."""
    shutil.copytree(source, target)
    for checkpoint in target.glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    assert (target / f"step_{step}").is_dir()
    return target


def assert_resumes(arguments: Callable[[Path], list[str]], whole: Path, resumed: Path, *steps: int) -> None:
    """A copy of the finished run that lost these last checkpoints ends with the same rows and the same weights."""
    shutil.copytree(whole, resumed)
    for step in steps:
        shutil.rmtree(resumed / f"step_{step}")
    assert run(arguments(resumed)) == 0
    assert results_of(resumed) == results_of(whole)
    for step in steps:
        assert weights_of(resumed / f"step_{step}") == weights_of(whole / f"step_{step}")
