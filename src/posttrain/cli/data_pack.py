"""`posttrain data pack`: preference pairs to a file of tokens, sorted into packs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.apps.options import Option
from posttrain.cli.overrides_parser import Subparsers, add_command, add_option, number, yaml_value
from posttrain.errors import InputError
from posttrain.files.json_files import JsonObject

if TYPE_CHECKING:
    from posttrain.data.packed_file import PackedHeader

POSITIVE = number(int, Option(at_least=1))
NO_LIMIT = 2**31  # of one answer: what does not fit into a pack is counted when packs are made
ALGORITHMS = ("first_fit_shuffle", "first_fit_decreasing", "modified_first_fit_decreasing", "concatenative")


def add_parser(actions: Subparsers) -> None:
    parser = add_command(actions, "pack", "precompute packs of preference pairs")
    parser.set_defaults(run=run)
    sources = "pairs: a file, a folder or a pattern, in any shape that DPO reads"
    parser.add_argument("source", metavar="IN", help=sources)
    parser.add_argument("target", metavar="OUT", help="the file to write, NAME.parquet")
    which = parser.add_mutually_exclusive_group(required=True)
    add_option(which, "--model FOLDER", "the model whose tokenizer and chat template are used")
    add_option(which, "--tokenizer NAME", "a tokenizer by its folder or hub name")
    parser.option(
        "--chat-template TEMPLATE",
        "as policy.tokenizer.chat_template: default (the model's own), null, extra_id, a .jinja file, or a template",
        default="default",
    )
    parser.option("--chat-template-kwargs JSON", "variables for the template, as a map", type=_json_map, default={})
    parser.option("--pack-size N", "room of a pack, in tokens", type=POSITIVE, required=True)
    parser.option("--algorithm", "how pairs are placed", choices=ALGORITHMS, default=ALGORITHMS[0])
    parser.option("--seed N", "of the shuffling", default=0)
    parser.option(
        "--max-length N",
        "longest prompt with one answer, in tokens, as policy.max_total_sequence_length (default: what fits)",
        type=POSITIVE,
    )
    parser.switch("--json", "print the numbers as JSON")
    parser.words(help="keys of the dataset")


def run(args: argparse.Namespace) -> int:
    from posttrain.data.chat import ChatFormat
    from posttrain.data.datasets import load_pair_dataset
    from posttrain.data.packed_file import Packing, write_packed
    from posttrain.models.loading import load_tokenizer

    if args.model and not Path(args.model).expanduser().is_dir():
        raise InputError(f"--model: no folder {args.model!r}; a tokenizer on the hub is named with --tokenizer")
    if args.max_length and args.pack_size < 2 * args.max_length:
        raise InputError(
            f"--pack-size: {args.pack_size} tokens are less than twice --max-length {args.max_length}: a pack must "
            f"hold both answers of a pair with their prompt; give --pack-size {2 * args.max_length} or more, or a "
            "smaller --max-length"
        )
    template = None if args.chat_template == "null" else args.chat_template
    chat = ChatFormat(load_tokenizer(args.model or args.tokenizer), template, args.chat_template_kwargs)
    entry = {"data_path": args.source, **_keys(args.words)}
    pairs = load_pair_dataset(entry, None, chat, max_total_tokens=args.max_length or NO_LIMIT, seed=args.seed)
    header = write_packed(
        args.target,
        pairs,
        chat,
        Packing(args.pack_size, args.algorithm, args.seed),
        source=args.source,
        dropped=pairs.dropped,
    )
    if args.json:
        print(json.dumps({"file": args.target, **json.loads(header.to_json()), "noted": pairs.noted}))
    else:
        print(_report(args.target, header, pairs.noted))
    return 0


def _report(target: str, header: PackedHeader, noted: dict[str, int]) -> str:
    numbers = header.statistics
    lines = [f"{target}: {header.num_pairs} pairs in {header.num_packs} packs ({header.algorithm}, seed {header.seed})"]
    rows: JsonObject = {
        "packing_factor": f"{numbers.packing_factor:.2f} pairs in a pack on average",
        "packing_efficiency": f"{numbers.packing_efficiency:.2f} % of the packs' room is filled",
        "pack_size": f"{numbers.pack_size} tokens",
        "dataset_max_seqlen": f"{numbers.dataset_max_seqlen} tokens in the largest pair",
        "max_samples_per_bin": f"{numbers.max_samples_per_bin} pairs in the fullest pack",
        "min_packed_seqlen": f"{numbers.min_packed_seqlen} tokens in the emptiest pack",
    }
    lines += [f"  {name:<20} {value}" for name, value in rows.items()]
    lines += [f"  left out: {count} ({reason})" for reason, count in header.dropped.items()]
    lines += [f"  note: {count} ({reason})" for reason, count in noted.items()]
    return "\n".join(lines)


def _keys(words: list[str]) -> JsonObject:
    """`prompt_key=question` as an entry of `data.train` would hold it."""
    for word in words:
        if not word.partition("=")[0] or "=" not in word:
            raise InputError(f"{word!r} is not a key of a dataset; write KEY=VALUE, such as prompt_key=question")
    return {word.partition("=")[0]: yaml_value(word) for word in words}


def _json_map(text: str) -> JsonObject:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"must be a map such as '{{\"enable_thinking\": false}}', found {text}")
    return values
