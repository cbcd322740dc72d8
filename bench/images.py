#!/usr/bin/env python3
"""Sampling from prompts with one image each: the native engine beside vLLM, and how long the engine waits for pixels.

    python bench/images.py --shape qwen-vl-3b --prompts 256 --engines native vllm --out images.json
    python bench/images.py --shape tiny              on a CPU, in seconds: does it all run?

Images are noise of `--side` pixels, each another; an image and its prompt are computed once for their samples on both
sides. Weights are random, of the shape alone. "waits for pixels" is the time in which the engine has nothing else to do
while an image is resized and cut into patches, which threads do ahead of it; "pixels, one thread" is that work
itself. A GRPO step is longer than its sampling, so its share of the step is smaller than the one shown.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import decode_vllm
from machine import GIB, dtype_name, facts, peak_bytes, reset_peak, resolve_device, resolve_dtype, seconds_of
from shapes import FIRST_WORD, make_tokenizer, randomise
from side_process import Result, run_side, serve_side, show_failures
from tables import ratio, table, write_json

_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_QWEN: dict[str, Any] = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
# Of Qwen2.5-VL: sizes of the language model, of the tower, and the first id of the special tokens.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "qwen-vl-3b": (
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        {
            **_QWEN, "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": 2048, "fullatt_block_indexes": [7, 15, 23, 31],
        },
        151652,
    ),
    "tiny": (
        {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        {
            **_QWEN, "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        500,
    ),
}  # fmt: skip


def write_folder(folder: Path, shape: str, dtype: str) -> None:
    """config.json, tokenizer and image processor of the shape; no weights."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text, vision, first = SHAPES[shape]
    ids = dict(zip(_SPECIAL, range(first, first + len(_SPECIAL)), strict=True))
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "torch_dtype": dtype,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {"model_type": "qwen2_5_vl_text", "max_position_embeddings": 32768, **text},
        "vision_config": {"model_type": "qwen2_5_vl", **vision},
    }
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(text["vocab_size"], {number: token for token, number in ids.items()}).save_pretrained(folder)
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    names = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    Qwen2VLImageProcessorPil(size=size, **names).save_pretrained(folder)
    made = json.loads((folder / "preprocessor_config.json").read_text())
    # The name that every version of transformers knows.
    made["image_processor_type"] = "Qwen2VLImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(made))


def pictures(args: argparse.Namespace) -> list[bytes]:
    """PNG files, each another."""
    from PIL import Image

    files = []
    for index in range(args.prompts):
        noise = random.Random(index).randbytes(args.side * args.side * 3)
        buffer = io.BytesIO()
        Image.frombytes("RGB", (args.side, args.side), noise).save(buffer, "PNG")
        files.append(buffer.getvalue())
    return files


def prompt_of(args: argparse.Namespace, index: int, placeholders: int) -> list[int]:
    text, _vision, first = SHAPES[args.shape]
    rng, words = random.Random(index), range(FIRST_WORD, min(first, text["vocab_size"]))
    half = args.words // 2
    return [*rng.choices(words, k=half), first, *[first + 3] * placeholders, first + 1, *rng.choices(words, k=half)]


def native(args: argparse.Namespace, folder: Path) -> Result:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    from posttrain.data.images import image_of
    from posttrain.engines.native import NativeEngine, NativeSettings
    from posttrain.models.attention_interface import ATTENTION
    from posttrain.models.vision import add_tower, image_tokens, tower_of
    from posttrain.types import NoiseKey, Sampling, Task

    config = AutoConfig.from_pretrained(folder)
    with torch.device(args.device):
        model = AutoModelForImageTextToText.from_config(
            config, dtype=resolve_dtype(args.dtype, args.device), attn_implementation=ATTENTION
        )
    randomise(model, args.seed)
    model.config.use_cache = False
    add_tower(model.eval().requires_grad_(False), image_tokens(str(folder), config))
    tower = tower_of(model)
    assert tower is not None
    refs = [image_of(data, f"image {index}") for index, data in enumerate(pictures(args))]
    tasks = [
        Task(index, f"bench:{index}", "", tuple(prompt_of(args, index, tower.tokens.num_tokens(ref))), images=(ref,))
        for index, ref in enumerate(refs)
    ]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.decode = lambda *_, **__: ""  # no engine turns tokens into text here
    longest = max(len(task.prompt_ids) for task in tasks) + args.new
    settings = NativeSettings(max_batch_size=args.max_batch_size, max_total_tokens=longest)
    engine = NativeEngine(model, tokenizer, settings)
    waited, take = [0.0], tower.ahead.take

    def timed_take(image: Any) -> Any:
        begin = time.perf_counter()
        taken = take(image)
        waited[0] += time.perf_counter() - begin
        return taken

    tower.ahead.take = timed_take  # type: ignore[method-assign]
    runs: list[tuple[float, float]] = []

    def sample() -> None:
        tower.forget()
        groups = engine.generate(tasks, args.samples, Sampling(args.new, ignore_eos=True), NoiseKey(0, len(runs)))
        assert all(len(completion.token_ids) == args.new for group in groups for completion in group)

    sample()  # compiles, and makes the cache
    reset_peak()
    for _ in range(args.repeats):
        waited[0] = 0.0
        runs.append((seconds_of(sample), waited[0]))
    seconds, waiting = min(runs)
    alone = seconds_of(lambda: [tower.tokens.pixels(ref) for ref in refs])
    return {**rate(args, seconds), "waiting_s": waiting, "pixels_s": alone, "peak_gib": peak_bytes(args.device) / GIB}


def vllm(args: argparse.Namespace, folder: Path) -> Result:
    import vllm
    from PIL import Image

    llm = vllm.LLM(
        model=str(folder), load_format="dummy", dtype=args.dtype, gpu_memory_utilization=0.9, max_model_len=4096,
        max_num_seqs=args.max_batch_size, limit_mm_per_prompt={"image": 1}, disable_log_stats=True, seed=args.seed,
    )  # fmt: skip
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pictures(args)]
    prompts = [
        {"prompt_token_ids": prompt_of(args, index, 1), "multi_modal_data": {"image": image}}
        for index, image in enumerate(images)
    ]
    sampling = vllm.SamplingParams(
        n=args.samples, temperature=1.0, max_tokens=args.new, ignore_eos=True, detokenize=False, logprobs=0
    )

    def sample() -> None:
        llm.reset_prefix_cache()
        if hasattr(llm, "reset_mm_cache"):
            llm.reset_mm_cache()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        assert all(len(one.token_ids) == args.new for output in outputs for one in output.outputs)

    sample()
    return {**rate(args, min(seconds_of(sample) for _ in range(args.repeats))), "version": vllm.__version__}


def rate(args: argparse.Namespace, seconds: float) -> Result:
    return {"seconds": seconds, "tokens_per_s": args.prompts * args.samples * args.new / seconds}


def do_job(job: dict[str, Any]) -> Result:
    args = argparse.Namespace(**job)
    with tempfile.TemporaryDirectory(prefix="bench-images-") as name:
        write_folder(Path(name), args.shape, args.dtype)
        return {"native": native, "vllm": vllm}[args.engine](args, Path(name))


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen-vl-3b", help="random weights (default qwen-vl-3b)")
    parser.add_argument("--prompts", type=int, help="each with an image of its own (default 256)")
    parser.add_argument("--samples", type=int, help="of each prompt (default 16)")
    parser.add_argument("--new", type=int, help="tokens of each sample (default 128)")
    parser.add_argument("--side", type=int, help="pixels of an image's side (default 448)")
    parser.add_argument("--words", type=int, default=32, help="tokens of text in a prompt (default 32)")
    parser.add_argument("--engines", nargs="+", choices=("native", "vllm"), default=["native"])
    parser.add_argument("--repeats", type=int, default=2, help="measured runs of each; the best counts (default 2)")
    parser.add_argument("--max-batch-size", type=int, default=512, help="sequences decoded together (default 512)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers to this JSON file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # one engine, in its own process
    args = parser.parse_args(words)
    usual = (4, 2, 8, 56) if args.shape == "tiny" else (256, 16, 128, 448)
    for name, number in zip(("prompts", "samples", "new", "side"), usual, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, number)
        if getattr(args, name) < 1:
            parser.error(f"--{name} is at least 1")
    return args


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    if args.job:
        return serve_side(args.job, do_job)
    device = resolve_device(args.device)
    job = {**vars(args), "device": device, "dtype": dtype_name(resolve_dtype(args.dtype, device))}
    kept = {key: value for key, value in job.items() if key not in ("out", "job", "engines")}
    results: dict[str, Result] = {}
    for engine in args.engines:
        print(f"{engine} …", file=sys.stderr, flush=True)
        environment = decode_vllm.ENVIRONMENT if engine == "vllm" else None
        results[engine] = run_side(__file__, {**kept, "engine": engine}, environment)
    ours = results.get("native", {})
    rows = []
    for engine, found in results.items():
        cells = [found.get(key) for key in ("tokens_per_s", "seconds", "waiting_s", "pixels_s", "peak_gib")]
        share = f"{100 * found['waiting_s'] / found['seconds']:.1f} %" if "waiting_s" in found else None
        faster = "" if engine == "native" else ratio(ours.get("tokens_per_s"), found.get("tokens_per_s"))
        rows.append([engine, *cells[:3], share, *cells[3:], faster])
    header = ["", "tokens/s", "seconds", "waits for pixels s", "share", "pixels, one thread s", "peak GiB", "native is"]
    print(f"{args.shape}: {args.prompts} prompts with an image of {args.side} x {args.side}, {args.samples} samples of "
          f"{args.new} tokens\n{table(header, rows)}")  # fmt: skip
    show_failures(results)
    write_json(args.out, {**facts(device), "benchmark": "images", "job": kept, "engines": results})
    return int(any("error" in found for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
