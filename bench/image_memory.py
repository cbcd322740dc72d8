#!/usr/bin/env python3
"""Resident memory of a long GRPO run on images and of its children, by step, on a CPU: does it grow?

    python bench/image_memory.py                     500 steps, the model of examples/red_square.py, 800 pictures
    python bench/image_memory.py policy.vision.train_tower=true      each picture is computed in every pass

The first epoch ends at step 200: until then each step has new pictures, whose features are kept.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import red_square  # noqa: E402

NUM_STEPS, NUM_PICTURES, SIDE = 500, 800, 112
AT = (10, 50, 100, 200, 300, 400, 450, 490, 500)
REWARD = "def odd(prompt, response, reference):\n    return sum(ord(c) % 2 for c in response) / max(1, len(response))\n"


def command(folder: Path) -> list[str]:
    red_square.FOLDER, red_square.NUM_TRAINED, red_square.NUM_UNSEEN = folder, NUM_PICTURES, 1
    red_square.write_data(folder / "data")
    for path in (folder / "data").glob("*.png"):
        red_square.Image.open(path).resize((SIDE, SIDE)).save(path)
    red_square.build_model(folder / "model")
    (folder / "rewards.py").write_text(REWARD)  # random weights get none for right answers, and would not be trained
    reward = ["env.look.num_workers=1", f"env.look.function={folder / 'rewards.py'}:odd"]
    sizes = ["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=16"]
    lengths = ["policy.generation.max_new_tokens=4", "data.default.env_name=look", "policy.num_threads=1"]
    words = red_square.settings("grpo", folder / "model", NUM_STEPS, 1e-4)
    return [sys.executable, "-m", "posttrain", *words, *reward, *sizes, *lengths, "checkpointing.save_period=50"]


def resident(process: psutil.Process) -> float:
    """MiB of the run, and of its children."""
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) / 2**20


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="image-memory-") as name, open(Path(name) / "log", "w") as log:
        folder = Path(name)
        run = psutil.Popen([*command(folder), *sys.argv[1:]], stdout=log, stderr=subprocess.STDOUT)
        metrics, asked = folder / "grpo" / "metrics.jsonl", list(AT)
        while run.poll() is None and asked:
            steps = metrics.read_text().count('"train/loss"') if metrics.exists() else 0
            if steps >= asked[0]:
                asked.pop(0)
                own = run.memory_info().rss / 2**20
                print(f"step {steps:3}: {own:.0f} MiB, with its children {resident(run):.0f} MiB", flush=True)
            time.sleep(0.1)
        if code := run.wait():
            print((folder / "log").read_text()[-2000:], file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main())
