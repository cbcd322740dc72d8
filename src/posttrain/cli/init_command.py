"""`posttrain init`: a config, data and, for GRPO, a reward function to start from, in a folder of the user's."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from posttrain.cli.overrides_parser import Subparsers, add_command
from posttrain.errors import InputError
from posttrain.recipes import KINDS

SUMMARY = "write a config and data to start from"
EPILOG = """\
examples:
  posttrain init grpo                 grpo.yaml, prompts.jsonl and rewards.py in this folder
  posttrain init dpo my-model         dpo.yaml and pairs.jsonl in the folder my-model, which is made if it is not there
  posttrain init all                  configs/ and examples/: every config and example that the documentation names

Nothing is overwritten. The rows show the shape of data and are enough to try a command; they are too few to improve a model.
"""


EVERYTHING = "all"


def add_parser(commands: Subparsers) -> None:
    parser = add_command(commands, "init", SUMMARY, epilog=EPILOG)
    parser.add_argument("kind", choices=(*KINDS, EVERYTHING), metavar="KIND", help=f"{', '.join(KINDS)} or all")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help="default: this folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.words:
        raise InputError(f"init takes a kind and one FOLDER; unexpected: {args.words[0]!r}")
    source = bundled_folder()
    files = _everything(source) if args.kind == EVERYTHING else _starter(source, args.kind)
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
    print("\n".join(_next_commands(args.kind, args.folder, list(files))))
    return 0


def bundled_folder() -> Path:
    """The folder with `configs` and `examples`: in the installed package, or the root of a clone."""
    package = Path(__file__).parents[1]
    return package / "bundled" if (package / "bundled").is_dir() else package.parents[1]


def _everything(source: Path) -> dict[str, str | Path]:
    paths = [path for folder in ("configs", "examples") for path in sorted((source / folder).rglob("*"))]
    return {str(path.relative_to(source)): path for path in paths if path.is_file() and "__pycache__" not in path.parts}


def _starter(source: Path, kind: str) -> dict[str, str | Path]:
    """The files name each other without folders, so that commands are given in that folder."""
    found: dict[str, str | Path] = {f"{kind}.yaml": source / "configs" / f"{kind}.yaml"}
    found |= {Path(name).name: source / "examples" / name for name in KINDS[kind].examples}
    for name in found:
        if name.endswith((".yaml", ".py")):
            found[name] = re.sub(r"\b(examples/data/|examples/|configs/)", "", Path(found[name]).read_text("utf-8"))
    return found


def _next_commands(kind: str, folder: Path, names: list[str]) -> list[str]:
    here = [] if folder == Path() else [f"  cd {folder}"]
    if kind == EVERYTHING:
        return [f"wrote configs/ and examples/, {len(names)} files. What to type next:", *here, "  ls configs"]
    return [
        f"wrote {', '.join(names)}. What to type next:",
        *here,
        "  posttrain models fetch smollm2        # a small model (needs posttrain[gguf]); or name one of the Hugging Face hub",
        f"  posttrain {kind} --config {kind}.yaml model=models/smollm2-135m-instruct precision=float32 steps=2",
        f"  posttrain config show {kind} --config {kind}.yaml       # every setting",
    ]
