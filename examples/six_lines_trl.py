"""The job of six_lines.py with TRL (`pip install trl`)."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def right(completions, output, **columns):
    return [float(answer in text) for text, answer in zip(completions, output, strict=True)]


data = load_dataset("json", data_files="examples/data/prompts.jsonl", split="train").rename_column("input", "prompt")
settings = GRPOConfig("results/trl", learning_rate=1e-5, max_steps=20)
trainer = GRPOTrainer("models/smollm2-135m-instruct", right, args=settings, train_dataset=data)
trainer.train()
