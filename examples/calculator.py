"""A small model finds out that asking a calculator pays. CPU, about a minute, no network.

    python examples/calculator.py

Makes a model and its data, teaches it to guess and to ask (configs/sft_calculator.yaml), lets GRPO find out which of
the two is rewarded (configs/grpo_calculator.yaml), and shows a conversation before and after.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

from calculator_task import build_model, write_data

from posttrain.cli.main import main as posttrain

FOLDER = Path("results/calculator")
CONFIGS = Path(__file__).parents[1] / "configs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="settings of the GRPO run, such as grpo.max_num_steps=20")
    overrides = parser.parse_args().overrides
    if not (FOLDER / "taught").exists():
        num_parameters = build_model(FOLDER / "model", seed=1)
        write_data(FOLDER / "data", seed=1)
        print(f"A model of {num_parameters:,} random weights, and products of two numbers to find.", flush=True)
        code = posttrain(["sft", "--config", str(CONFIGS / "sft_calculator.yaml")])
        if code:
            return code
    code = posttrain(["grpo", "--config", str(CONFIGS / "grpo_calculator.yaml"), *overrides])
    return code or show()


def show() -> int:
    steps = sorted(
        FOLDER.glob("grpo/rollouts/validation_step_*.jsonl.gz"),
        key=lambda path: int(path.name.split("_")[2].split(".")[0]),
    )
    for when, path in (("before", steps[0]), ("after", steps[-1])):
        with gzip.open(path, "rt") as lines:
            groups = [json.loads(line) for line in lines]
        right = sum(group["completions"][0]["reward"] or 0 for group in groups)
        asked = sum(group["completions"][0]["counts"].get("tool_calls", 0) > 0 for group in groups)
        print(
            f"\n{when}: {right / len(groups):.0%} right, {asked / len(groups):.0%} asked the calculator. For instance:"
        )
        for turn in groups[0]["completions"][0]["turns"]:
            print(f"  {turn['role']:>9}: {turn['text']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
