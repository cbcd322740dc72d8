"""Runs the demo: create a model, train it on mostly wrong answers (SFT), improve it with GRPO, and print the result."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.apps.demo.arithmetic import SHARE_RIGHT, build_model, run_settings, sft_settings, write_data
from posttrain.build import TrainingRun
from posttrain.config import load_config
from posttrain.errors import InputError
from posttrain.files.locks import locked
from posttrain.reporting.examination import errors_of_model
from posttrain.reporting.rows import read_rollouts
from posttrain.reporting.run_files import METRICS_FILE, read_rows

SFT_STEPS = 500
GRPO_STEPS = 100
VAL_PERIOD = 20


def show(folder: Path, seed: int, steps: int | None) -> int:
    steps = steps or GRPO_STEPS
    with _claimed(folder, {"seed": seed, "steps": steps}) as finish:
        code = _show(folder, seed, steps)
        if code == 0:
            finish()
    return code


def _show(folder: Path, seed: int, steps: int) -> int:
    started = time.monotonic()
    num_parameters = build_model(folder / "model", seed)
    write_data(folder / "data", seed)
    print(f"A model of {num_parameters / 1e6:.1f} million random weights, and sums of two numbers to learn.\n")

    print(
        f"1. Learning the format, from examples of which {SHARE_RIGHT:.0%} are right (SFT, {SFT_STEPS} steps)",
        flush=True,
    )
    code = _train("sft", folder, sft_overrides(folder, seed))
    if code:
        return code
    print(f"\n2. Learning which answers are right (GRPO, {steps} steps)", flush=True)
    code = _train("grpo", folder, grpo_overrides(folder, seed, steps))
    if code:
        return code
    _summarise(folder / "grpo", time.monotonic() - started)
    return 0


@contextmanager
def _claimed(folder: Path, settings: dict[str, int]) -> Iterator[Callable[[], object]]:
    """Lock the folder for this process. A stopped demo is resumed; other files of an earlier demo are removed.

    Other runs are not touched. Call the yielded function when the demo is over, so that the next one starts over.
    """
    marker = folder / ".posttrain-demo"
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise InputError(f"--folder {folder} holds something else than a demo; name an empty or a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
    busy = f"--folder {folder}: another demo is running there ({{holder}}); wait for it, or name a new folder"
    with locked(folder / ".lock", wait_s=0, refusal=busy):
        under_way = json.dumps(settings)
        if marker.read_text(encoding="utf-8") == under_way:
            print(f"Resuming the stopped demo in {folder}.")
        elif (folder / "taught").exists():
            print(f"Starting over: the results of the demo before, in {folder}, are removed.")
            for name in ("taught", "grpo"):
                shutil.rmtree(folder / name, ignore_errors=True)
        marker.write_text(under_way, encoding="utf-8")
        yield lambda: marker.write_text("", encoding="utf-8")


def _train(kind: str, folder: Path, overrides: list[str]) -> int:
    return TrainingRun(
        load_config(kind, None, overrides), title=f"posttrain demo: {kind.upper()} on arithmetic"
    ).execute()


def _schedule(warm_up: int, steps: int, final_share: float) -> str:
    """`final_share`: the last learning rate as a share of the first."""
    linear = "name: torch.optim.lr_scheduler.LinearLR"
    first = f"{{{linear}, kwargs: {{start_factor: 0.1, total_iters: {warm_up}}}}}"
    then = f"{{{linear}, kwargs: {{start_factor: 1.0, end_factor: {final_share}, total_iters: {steps}}}}}"
    return f"policy.scheduler=[{first}, {then}, {{milestones: [{warm_up}]}}]"


def sft_overrides(folder: Path, seed: int) -> list[str]:
    return [
        *sft_settings(folder / "model", folder / "data", folder / "taught", seed, SFT_STEPS),
        _schedule(warm_up=20, steps=SFT_STEPS, final_share=1.0),
        "sft.max_num_epochs=100",
        f"checkpointing.save_period={SFT_STEPS}",
    ]


def grpo_overrides(folder: Path, seed: int, steps: int) -> list[str]:
    taught = folder / f"taught/step_{SFT_STEPS}/policy"
    return [
        *run_settings(taught / "weights/model", folder / "grpo", 8e-4),
        _schedule(warm_up=5, steps=steps, final_share=0.05),
        f"policy.tokenizer.name={taught / 'tokenizer'}",
        f"grpo.max_num_steps={steps}",
        "grpo.max_num_epochs=1000",
        f"grpo.seed={seed}",
        "grpo.num_prompts_per_step=64",
        "grpo.num_generations_per_prompt=8",
        "policy.train_global_batch_size=256",  # two updates a step
        "grpo.use_leave_one_out_baseline=false",
        "grpo.val_at_start=true",
        "grpo.val_at_end=true",
        f"grpo.val_period={VAL_PERIOD}",
        "grpo.max_val_samples=250",
        "loss_fn.reference_policy_kl_penalty=0",  # the SFT model is no useful reference
        "policy.generation.max_new_tokens=8",
        f"data.train={{dataset_name: ResponseDataset, data_path: {folder / 'data/train.jsonl'}}}",
        f"data.validation={{dataset_name: ResponseDataset, data_path: {folder / 'data/unseen.jsonl'}}}",
        "data.default={env_name: math}",
        "env.math.num_workers=2",
        # About three times, at validated steps only: checkpoints are ranked by validation.
        f"checkpointing.save_period={VAL_PERIOD * max(1, round(steps / 3 / VAL_PERIOD))}",
        "checkpointing.keep_top_k=1",
    ]


def _summarise(run: Path, seconds: float) -> None:
    rows = read_rows(run / METRICS_FILE)
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    first, last = (read_rollouts(run / f"rollouts/step_{row['step']}.jsonl.gz") for row in (rows[1], rows[-1]))
    print("\nThree groups of answers to the same kind of question, before and after:")
    for when, groups in (("first step", first), ("last step", last)):
        for group in groups[:3]:
            answers = "  ".join(f"{_shown(c['text'])}{'✓' if c['reward'] else '✗'}" for c in group["completions"])
            question = group["prompt"].replace("<|ask|>", "").replace("<|answer|>", "")
            print(f"  {when:10}  {question}   {answers}")
    print(f"\nAccuracy on problems it has never seen: {accuracy[0]:.1%} before GRPO, {accuracy[-1]:.1%} after.")
    errors = errors_of_model(str(run))
    print(f"Doctor: {'; '.join(error.line for error in errors) if errors else 'no error found'}.")
    print(f"All of it took {seconds / 60:.1f} minutes. What to type next:")
    for command, what in (
        (f"posttrain watch {run}", "curves, and every answer of every step, in the browser"),
        (f"posttrain doctor {run}", "what is unusual about the run, and which setting would change it"),
        (f"posttrain chat {run}", 'ask the model a sum, e.g. "12 + 30 = ?"'),
        (f"posttrain convert {run} --to my-model", "the model as a Hugging Face folder"),
    ):
        print(f"  {command:<{len(str(run)) + 34}}{what}")
    print(f"The curves and the samples: {run / 'report.html'}")


def _shown(text: str) -> str:
    """The number in the box, or the text if there is none."""
    return text.removeprefix("\\boxed{").removesuffix("}") if text.startswith("\\boxed{") else text[:12]
