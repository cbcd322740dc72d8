#!/usr/bin/env python3
"""vLLM as the sampler of a run on one GPU that it shares with the trainer: weights, sleep and wake, memory, short runs.

    python bench/vllm_cycles.py --python /path/to/vllm/python --out vllm.json  sync, cycles, grpo; 8 minutes
    python bench/vllm_cycles.py --python ... --parts sync --shape llama-8b  seconds to hand over weights and to wake up
    python bench/vllm_cycles.py --python ... --parts cycles --cycles 200  sleep, wake, new weights; memory
    python bench/vllm_cycles.py --python ... --parts grpo --steps 20  GRPO of a small random model, or of --model
    python bench/vllm_cycles.py --python ... --parts lora --steps 10  the same with adapters, which are sent alone
    python bench/vllm_cycles.py --python ... --parts dedicated --steps 6  an engine process with its own vLLM; needs Ray
    python bench/vllm_cycles.py --python ... --parts host --shape llama-1.5b  weights in host memory, by files
    python bench/vllm_cycles.py --python ... --tiny                              on a CPU: does it all run?

`dedicated` puts the engine on the GPU that trains, as a second place that Ray counts. `host` is how a vLLM of several
GPUs gets its weights, here with one GPU.

Each part is a process of its own with a time limit; one that fails is shown with its error and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SMALL = "llama-small"
LIMITS_S = {"sync": 130, "cycles": 120, "grpo": 200, "lora": 150, "dedicated": 180, "host": 180}
USUAL = ("sync", "cycles", "grpo")
_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}  # see decode_vllm.py
# CUDA graphs of decoding without torch.compile, which takes a minute: graphs must find the weights of every update.
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8, 16]}
_REWARD = """
def odd(prompt, response, reference):
    return sum(ord(c) % 2 for c in response) / max(1, len(response))
"""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment that has vLLM")
    parser.add_argument("--parts", nargs="+", choices=LIMITS_S, default=USUAL)
    parser.add_argument("--shape", default="llama-8b", help="of the parts sync and host (default llama-8b)")
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--model", type=Path, help="folder of the model of grpo, lora and dedicated; a small random one by default"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--part", choices=LIMITS_S, help=argparse.SUPPRESS)  # this process is that part
    args = parser.parse_args(words)
    if args.tiny:
        args.shape, args.cycles, args.steps = SMALL, min(args.cycles, 3), min(args.steps, 2)
    if args.part:
        result = PARTS[args.part](args)
        print("RESULT " + json.dumps(result), flush=True)
        return 0
    found = {part: run_part(part, args) for part in args.parts}
    if args.out:
        args.out.write_text(json.dumps(found, indent=2))
    for part, figures in found.items():
        print(f"\n== {part}")
        for name, value in figures.items():
            print(f"  {name}: {value}")
    return 0 if all("error" not in figures for figures in found.values()) else 1


def run_part(part: str, args: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, __file__, "--part", part, "--python", args.python, "--shape", args.shape]
    words += ["--cycles", str(args.cycles), "--steps", str(args.steps), *(["--tiny"] if args.tiny else [])]
    words += ["--model", str(args.model)] if args.model else []
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    limit_s = LIMITS_S[part] * (4 if args.tiny else 1)
    started = time.monotonic()
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
        error = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its vLLM ends with it
        output, _ = process.communicate()
        error = f"not done after {limit_s} s"
    result = next((json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")), None)
    found = {"error": f"{error}\n{output[-3000:]}"} if result is None else result
    return {"seconds": round(time.monotonic() - started, 1), **found}


# -- parts
# ---------------------------------------------------------------------------------------------------------------


def policy_for(args: argparse.Namespace, *extra: str) -> Any:
    from posttrain.config import load_config

    words = [
        f"policy.device={'cpu' if args.tiny else 'cuda'}",
        f"policy.precision={'float32' if args.tiny else 'bfloat16'}",
        "policy.max_total_sequence_length=2048",
        *(["policy.num_threads=1"] if args.tiny else []),
        "policy.generation.backend=vllm",
        f"policy.generation.vllm_cfg.python={args.python}",
        f"policy.generation.vllm_cfg.env_vars={json.dumps(_ENVIRONMENT)}",
        *extra,
    ]
    return load_config("grpo", None, words).config.policy


def open_sampler(
    args: argparse.Namespace, shape: str, policy: Any, *, in_host_memory: bool = False
) -> tuple[Any, Any, float]:
    """A model with random weights, the sampler over it, and the seconds that vLLM's start took."""
    import torch
    from shapes import make_model, make_tokenizer

    from posttrain.engines.vllm.sampler import VllmSampler
    from posttrain.policy.runtime import enable_expandable_segments

    device = torch.device("cpu") if args.tiny or in_host_memory else torch.device("cuda", 0)
    if device.type == "cuda":
        enable_expandable_segments()  # as a run does
    dtype = torch.float32 if args.tiny else torch.bfloat16
    model = make_model(shape, device, dtype, attention="sdpa")
    started = time.monotonic()
    sampler = VllmSampler(model, make_tokenizer(model.config.vocab_size), policy, device)
    return model, sampler, time.monotonic() - started


def difference(model: Any, sampler: Any, *, seed: int) -> tuple[float, float]:
    """(mean of exp(|difference of log-probabilities|), largest difference) over answers that vLLM samples now."""
    import torch

    from posttrain.types import NoiseKey, Sampling, Task

    tasks = [Task(draw, f"t:{draw}", "", tuple(range(3 + draw, 35 + draw))) for draw in range(4)]
    found = []
    for task, answers in zip(
        tasks, sampler.generate(tasks, 2, Sampling(16, ignore_eos=True), NoiseKey(seed, 1)), strict=True
    ):
        for answer in answers:
            ids = torch.tensor([[*task.prompt_ids, *answer.token_ids]], device=model.device)
            with torch.no_grad():
                logits = model(ids).logits[0, len(task.prompt_ids) - 1 : -1].float()
            own = logits.log_softmax(-1).gather(1, ids[0, len(task.prompt_ids) :, None])[:, 0].cpu()
            found.append((own - torch.tensor(answer.logprobs)).abs())
    apart = torch.cat(found)
    return float(apart.exp().mean()), float(apart.max())


def change(model: Any, start: list[Any]) -> None:
    """Every row of the weights within 10 % of `start`: what a stale copy computes is then far away, and
    nothing grows.
    """
    import torch

    with torch.no_grad():
        for parameter, first in zip(model.parameters(), start, strict=True):
            factors = 0.9 + 0.2 * torch.rand(parameter.shape[:1], device=parameter.device)
            parameter.copy_(first * factors.view(-1, *[1] * (parameter.dim() - 1)))


def copy_of(model: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in model.parameters()]


class Timed:
    """Seconds of every request to vLLM's process, by operation."""

    def __init__(self, process: Any) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._call: Callable[..., Any] = process.call
        process.call = self

    def __call__(self, operation: str, **fields: Any) -> Any:
        started = time.monotonic()
        answer = self._call(operation, **fields)
        self.seconds[operation].append(time.monotonic() - started)
        return answer

    def take(self) -> dict[str, float]:
        totals = {name: round(sum(values), 3) for name, values in self.seconds.items()}
        self.seconds.clear()
        return totals


def sync(args: argparse.Namespace, *, in_host_memory: bool = False) -> dict[str, Any]:
    """Hand over the weights of a large model: wake for weights, buckets, reload, wake of the cache."""
    policy = policy_for(
        args, "policy.generation.vllm_cfg.enforce_eager=true", "policy.generation.vllm_cfg.gpu_memory_utilization=0.5"
    )
    model, sampler, start_s = open_sampler(args, args.shape, policy, in_host_memory=in_host_memory)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    start, timed, rounds = copy_of(model), Timed(sampler.process), []
    for version in range(4):
        if version:
            change(model, start)
        started = time.monotonic()
        sampler.take_weights(version)
        handed_over = time.monotonic()
        sampler._be_ready()
        ready = time.monotonic()
        error, largest = difference(model, sampler, seed=version)
        before_sleep = time.monotonic()
        sampler.release()
        rounds.append(
            {
                "sync_s": round(handed_over - started, 3),
                "wake_cache_s": round(ready - handed_over, 3),
                "sync_and_wake_s": round(ready - started, 3),
                "sleep_s": round(time.monotonic() - before_sleep, 3),
                "mult_prob_error": round(error, 5),
                "largest_difference": round(largest, 4),
                "operations_s": timed.take(),
            }
        )
    sampler.close()
    later = [one["sync_and_wake_s"] for one in rounds[1:]]
    return {
        "vllm": sampler.process.version,
        "start_s": round(start_s, 1),
        "gb": round(num_bytes / 1e9, 2),
        "median_sync_and_wake_s": statistics.median(later),
        "goal": "none: through files" if in_host_memory else "1.5 s or less",
        **{f"version {index}": one for index, one in enumerate(rounds)},
    }


def cycles(args: argparse.Namespace) -> dict[str, Any]:
    """New weights, answers, sleep, many times over. Memory of the GPU while vLLM sleeps, and of its processes, must not
    grow.
    """
    import psutil  # type: ignore[import-untyped]
    import torch

    graphs = f"policy.generation.vllm_kwargs.compilation_config={json.dumps(_GRAPHS)}"
    usual = ["policy.generation.vllm_cfg.gpu_memory_utilization=0.2"]
    note = "CUDA graphs of decoding"
    try:
        model, sampler, start_s = open_sampler(args, SMALL, policy_for(args, *usual, graphs))
    except Exception as error:
        note = f"without CUDA graphs, because of {str(error).splitlines()[0][:300]}"
        eager = "policy.generation.vllm_cfg.enforce_eager=true"
        model, sampler, start_s = open_sampler(args, SMALL, policy_for(args, *usual, eager))
    start, seen, times, worst = copy_of(model), [], [], 0.0
    for cycle in range(args.cycles):
        change(model, start)
        started = time.monotonic()
        sampler.take_weights(cycle)
        worst = max(worst, difference(model, sampler, seed=cycle)[0])
        sampler.release()
        times.append(time.monotonic() - started)
        if cycle % max(1, args.cycles // 20) == 0 or cycle == args.cycles - 1:
            used = 0.0
            if model.device.type == "cuda":
                torch.cuda.synchronize()
                free, total = torch.cuda.mem_get_info()
                used = (total - free) / 2**20
            process = psutil.Process(sampler.process.pid)
            memory = sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
            seen.append((cycle, round(used), round(memory / 2**20)))
    sampler.close()
    later = seen[len(seen) // 5 :]
    return {
        "note": note,
        "start_s": round(start_s, 1),
        "cycles": args.cycles,
        "median_cycle_s": round(statistics.median(times), 3),
        "gpu_mib_asleep_growth_after_a_fifth": later[-1][1] - later[0][1],
        "host_mib_growth_after_a_fifth": later[-1][2] - later[0][2],
        "worst_mult_prob_error": round(worst, 5),
        "cycle_gpu_mib_host_mib": seen,
    }


def host(args: argparse.Namespace) -> dict[str, Any]:
    """The same with a model in host memory, as in an engine whose vLLM has several GPUs. Its log-probabilities are the
    CPU's.
    """
    return sync(args, in_host_memory=True)


def grpo(args: argparse.Namespace, *extra: str) -> dict[str, Any]:
    """A run as a user starts it."""

    def run(words: list[str]) -> tuple[int, str]:
        words = [sys.executable, "-m", "posttrain", *words]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout

    return trained(args, run, *extra)


def lora(args: argparse.Namespace) -> dict[str, Any]:
    return grpo(args, "policy.dtensor_cfg.lora_cfg.enabled=true")


def dedicated(args: argparse.Namespace) -> dict[str, Any]:
    """An engine that samples ahead, in a process of its own with a vLLM. Ray counts two GPUs; each process takes the
    first.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    from local_ray import local_ray

    from posttrain.cli.main import main

    places = ["cluster.gpus_per_node=2", "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"]
    with local_ray(num_gpus=0 if args.tiny else 2):
        return trained(args, lambda words: (main(words), ""), *places, "grpo.async_grpo.enabled=true")


def trained(args: argparse.Namespace, run: Callable[[list[str]], tuple[int, str]], *extra: str) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny_runs

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = args.model or tiny_runs.save_model(
            root / "model", hidden_size=128 if args.tiny else 512, num_layers=2 if args.tiny else 6
        )
        tiny_runs.write_rows(root / "questions.jsonl", tiny_runs.questions(400))
        (root / "rewards.py").write_text(_REWARD)
        code, output = run([*run_words(args, model, root), *extra])
        rows_file = root / "run" / "metrics.jsonl"
        if code or not rows_file.exists():
            raise SystemExit(f"posttrain grpo: exit code {code}\n{output[-3000:]}")
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    steps = [row for row in rows if "train/reward" in row]

    def column(end: str) -> list[float]:
        return [value for row in steps for name, value in row.items() if name.endswith(end)]

    return {
        "steps": len(steps),
        "reward": [round(value, 4) for value in column("train/reward")],
        "max_token_mult_prob_error": max(column("train/token_mult_prob_error")),
        "min_effective_sample_size": min(column("sampling_effective_sample_size"), default=None),
        "weights_s": [round(value, 3) for value in column("prepare_for_generation/transfer_and_update_weights")],
        "generation_s": [round(value, 3) for value in column("/generation")],
        "step_s": [round(value, 3) for value in column("total_step_time")],
    }


def run_words(args: argparse.Namespace, model: Path, root: Path) -> list[str]:
    return [
        "grpo",
        f"policy.model_name={model}",
        f"policy.device={'cpu' if args.tiny else 'cuda'}",
        f"policy.precision={'float32' if args.tiny else 'bfloat16'}",
        "policy.max_total_sequence_length=128",
        *(["policy.num_threads=1"] if args.tiny else []),
        "policy.generation.max_new_tokens=32",
        f"checkpointing.checkpoint_dir={root / 'run'}",
        "checkpointing.enabled=false",
        f"grpo.max_num_steps={args.steps}",
        "grpo.num_prompts_per_step=16",
        "grpo.num_generations_per_prompt=8",
        "policy.train_global_batch_size=128",
        f"policy.optimizer.kwargs.lr={1e-5 if args.model else 1e-3}",
        "policy.scheduler=null",
        "grpo.val_period=0",
        f"data.train={{dataset_name: ResponseDataset, data_path: {root / 'questions.jsonl'}}}",
        "data.validation=null",
        "data.default.env_name=mine",
        f"env.mine.function={root / 'rewards.py'}:odd",
        "policy.generation.backend=vllm",
        f"policy.generation.vllm_cfg.python={args.python}",
        f"policy.generation.vllm_cfg.env_vars={json.dumps(_ENVIRONMENT)}",
        "policy.generation.vllm_cfg.check_period=1",
        # The random model has far larger logits than a trained one, and so larger differences in bf16; they are
        # reported.
        *([] if args.model else ["policy.generation.vllm_cfg.max_prob_error=2.0"]),
        "policy.generation.vllm_cfg.enforce_eager=true",
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.3",
    ]


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "sync": sync, "cycles": cycles, "grpo": grpo, "lora": lora, "dedicated": dedicated, "host": host
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
