"""GRPO with a reward of your own. `posttrain models fetch smollm2` fetches the model; six_lines_trl.py is the same with
TRL.
"""

import posttrain as pt


def right(completions, output, **columns):
    return [float(answer in text) for text, answer in zip(completions, output, strict=True)]


run = pt.grpo("models/smollm2-135m-instruct", "examples/data/prompts.jsonl", reward=right, prompts=4, lr=1e-5, steps=20)
print(run.metrics["train/reward"], run.doctor(), sep="\n")
