"""TRL's side of `posttrain faults --against trl`: its GRPO trainer on the demo's problems.

Arguments: FOLDER NAME STEPS SAVE_PERIOD. Its defaults, but for sizes, the learning rate and the number of threads.
Resumes from its newest checkpoint.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from posttrain.files.digests import sha256_of
from posttrain.files.durable import write_text


def right(completions: list[Any], output: list[str], **columns: object) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    found = [re.search(r"\\boxed\{(\d+)\}", text) for text in texts]
    return [float(one is not None and int(one[1]) == int(answer)) for one, answer in zip(found, output, strict=True)]


class RewardRows(TrainerCallback):
    """A row per step. After a kill, a step that is done again replaces its row."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.rows = {row["step"]: row for row in map(json.loads, lines)}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            self.rows[state.global_step] = {"step": state.global_step, "train/reward": logs["reward"]}
            write_text(self.file, "".join(json.dumps(row) + "\n" for row in self.rows.values()))


def main(folder: Path, name: str, steps: int, save_period: int) -> None:
    from datasets import load_dataset

    torch.set_num_threads(1)
    taught = max(folder.glob("taught/step_*"))
    model = AutoModelForCausalLM.from_pretrained(taught / "policy/weights/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(taught / "policy/tokenizer")
    data = load_dataset("json", data_files=str(folder / "data/train.jsonl"), split="train")
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["input"]}]}, remove_columns=["input"])
    run = folder / name
    run.mkdir(exist_ok=True)
    settings = GRPOConfig(
        str(run),
        learning_rate=2e-4,
        max_steps=steps,
        per_device_train_batch_size=512,
        num_generations=8,
        max_completion_length=8,
        save_steps=save_period,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model,
        right,
        args=settings,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[RewardRows(run / "metrics.jsonl")],
    )
    trainer.train(resume_from_checkpoint=any(run.glob("checkpoint-*")) or None)
    weights = b"".join(value.contiguous().numpy().tobytes() for value in model.state_dict().values())
    (run / "weights.sha256").write_text(sha256_of(weights), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
