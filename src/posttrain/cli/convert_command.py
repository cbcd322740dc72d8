"""`posttrain convert`: a checkpoint to a Hugging Face folder, to GGUF, or both."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from posttrain.cli.overrides_parser import OverridesParser, pairs
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject
from posttrain.run import quieten_libraries, refuse_missing_model

if TYPE_CHECKING:
    from posttrain.apps.export.convert import Advance, Converted

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: OverridesParser) -> None:
    parser.meant_by_a_word = "a folder to write is named by --to {}"
    parser.add_argument("model", metavar="MODEL", help="what to convert")
    parser.option("--to FOLDER", "the folder to write; must not exist, or be empty", type=Path)
    parser.option("--gguf FILE", "also, or only, write a GGUF file for llama.cpp", type=Path)
    parser.option("--gguf-type", "format of the GGUF file", choices=("f32", "f16", "bf16", "q8_0"), default="f16")
    parser.option("--gguf-pre NAME", "llama.cpp's name of the pre-tokenizer, if it is not recognised")
    parser.config_file("the run's config.yaml (default: the checkpoint's)")
    parser.option("--base MODEL", "folder or hub name of the model that was trained, if it has moved")
    parser.option("--eval NAME=FOLDER", "evaluation of it, for the model card", action="append", default=[])
    parser.option("--gate FILE", "what `posttrain gate --json FILE` wrote, for the model card", type=Path)
    parser.option("--license ID", "licence for the model card, such as apache-2.0 (default: the base model's)")
    _add_settings(parser)
    parser.set_defaults(run=run, output_is_result=False)


def _add_settings(parser: OverridesParser) -> None:
    parser.switch("--merge-lora", "merge a LoRA adapter into the model's weights")
    parser.switch("--for-vllm", "an adapter of experts with matrices for each of them, as vLLM loads it")
    parser.option("--dtype", "format of the weights (default: as saved)", choices=("float32", "bfloat16", "float16"))
    parser.option("--max-shard-size SIZE", "largest weight file", type=_size, default="5GB")
    parser.switch("--no-verify", "do not compare the result with its source")
    parser.switch("--force", "replace what is at the target")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; accepted: a number with B, KB, MB, GB, MiB or GiB, e.g. 5GB"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def run(args: argparse.Namespace) -> int:
    if args.to is None and args.gguf is None:
        raise InputError("give a target: --to FOLDER for a Hugging Face folder, --gguf FILE for llama.cpp, or both")
    refuse_missing_model(args.model)
    quieten_libraries()
    if args.gguf is None:
        run_conversion(args, args.model, args.to)
        return 0
    from posttrain.apps.export.gguf_export import GgufSettings, check_gguf_target, export_gguf, folder_to_export

    check_gguf_target(args.gguf, args.force)
    args.merge_lora = True  # GGUF files are written for full models
    settings = GgufSettings(args.gguf_type, args.gguf_pre)
    if args.to is not None:
        run_conversion(args, args.model, args.to)
        _export(export_gguf, args.to, args.gguf, settings)
        return 0
    with folder_to_export(args.model, args.gguf, lambda target: _convert(args, args.model, target)) as folder:
        _export(export_gguf, folder, args.gguf, settings)
    return 0


def run_conversion(args: argparse.Namespace, model: str, target: Path) -> None:
    done = _convert(args, model, target)
    what = "adapter" if done.is_adapter else f"model, {done.num_files} weight file{'s' * (done.num_files != 1)}"
    print(f"Wrote {done.folder}: {what}, {decimal(done.num_bytes)}")
    if (check := done.verification) is not None:
        print(f"Verified: {check.how} again, {check}")
    else:
        print("Not verified")
    if done.is_adapter:
        print("It is a LoRA adapter on its base model; --merge-lora writes a full model")


def _convert(args: argparse.Namespace, model: str, target: Path) -> Converted:
    from posttrain.apps.export.convert import ConversionSettings, convert

    settings = ConversionSettings(
        merge_lora=args.merge_lora,
        dtype=args.dtype,
        max_shard_bytes=args.max_shard_size,
        verify=not args.no_verify,
        force=args.force,
        for_vllm=args.for_vllm,
    )
    with _progress("Writing weights") as advance:
        return convert(
            model,
            target,
            settings,
            config=args.config,
            base=args.base,
            measured=_measured(args, model),
            say=_say,
            advance=advance,
        )


def _measured(args: argparse.Namespace, model: str) -> JsonObject:
    """The evaluations and the verdict that the card shows, with a warning for those of other files."""
    evaluations = {name: Path(path) for name, path in pairs("--eval", getattr(args, "eval", [])).items()}
    found: JsonObject = {"license": named} if (named := getattr(args, "license", None)) else {}
    if evaluations:
        from posttrain.apps.evaluate.results import read_summary
        from posttrain.apps.ship.registry.lineage import doubtful_evaluations

        doubts = doubtful_evaluations(model, evaluations)
        for name, why in doubts.items():
            _say(f"warning: --eval {name} {why}")
        found["evaluations"] = {}
        for name, folder in evaluations.items():
            summary = asdict(read_summary(folder))
            kept = {key: summary[key] for key in ("model", "dataset", "metric", "metrics", "intervals")}
            found["evaluations"][name] = {**kept, "problems": summary["counts"]["problems"], "doubt": doubts.get(name)}
    if gate := getattr(args, "gate", None):
        from posttrain.apps.ship.registry.lineage import read_verdict

        found["gate"] = read_verdict(model, gate)
    return found


def _export(export: Any, folder: Path, file: Path, settings: Any) -> None:
    with _progress("Writing GGUF") as advance:
        written = export(folder, file, settings, say=_say, advance=advance)
    print(f"Wrote {written.file}: {written.num_tensors} tensors, {settings.type}, {decimal(written.num_bytes)}")
    print(f"Verified: read back, every tensor equals its source within {written.max_error:.2g}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def _progress(title: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def advance(count: int, total: int) -> None:
            progress.update(task, advance=count, total=total)

        yield advance


def run_as_script(arguments: list[str] | None = None) -> int:
    """For `examples/converters/convert_dcp_to_hf.py`."""
    from posttrain.cli.main import report_errors

    parser = OverridesParser(description="Convert a checkpoint's weights to a Hugging Face folder.")
    parser.config_file("the run's config: step_N/config.yaml", required=True)
    parser.option("--dcp-ckpt-path FOLDER", "the weights: step_N/policy/weights", required=True)
    parser.option("--hf-ckpt-path FOLDER", "the folder to write", type=Path, required=True)
    parser.option("--base MODEL", "another place of the model that the config names")
    parser.add_argument("--adapter-only", dest="merge_lora", action="store_false", help="do not merge a LoRA adapter")
    _add_settings(parser)
    parser.set_defaults(merge_lora=True)

    def work() -> int:
        args = parser.parse_args(arguments)
        quieten_libraries()
        run_conversion(args, args.dcp_ckpt_path, args.hf_ckpt_path)
        return 0

    return report_errors(work)
