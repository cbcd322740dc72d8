"""`posttrain push`: uploads what `posttrain convert` wrote to a repository of the Hugging Face hub."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from rich.filesize import decimal

from posttrain.checkpointing.integrity import CHECKSUMS, find_damage
from posttrain.cli.overrides_parser import OverridesParser
from posttrain.errors import ExitCode, InputError, reason_of
from posttrain.files.json_files import read_json
from posttrain.run import quieten_libraries


def add_arguments(parser: OverridesParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what `posttrain convert --to` wrote")
    parser.add_argument("repository", metavar="OWNER/NAME", help="the repository of the hub")
    parser.switch("--public", "everybody may read it (default: a new one is private, a public one is refused)")
    parser.switch("--dry-run", "list the files and their sizes, and send nothing")
    parser.option("--message TEXT", "of the commit", default="Upload a model of posttrain")
    parser.set_defaults(run=_run, output_is_result=False)


def _run(args: argparse.Namespace) -> int:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    quieten_libraries()
    try:
        validate_repo_id(args.repository)
    except HFValidationError as error:
        raise InputError(f"{args.repository!r} is no name of a repository: give OWNER/NAME ({error})") from error
    if "/" not in args.repository:
        raise InputError(f"{args.repository!r} names no owner: give OWNER/NAME")
    files = _verified_export(args.folder)
    sizes = {name: (args.folder / name).stat().st_size for name in files}
    print("\n".join(f"{decimal(size):>10}  {name}" for name, size in sizes.items()))
    what = f"{len(files)} files, {decimal(sum(sizes.values()))}"
    if args.dry_run:
        print(f"{what}: nothing was sent (--dry-run)")
        return ExitCode.DONE
    return _upload(args, files, what)


def _verified_export(folder: Path) -> list[str]:
    """Its files, by their paths in it."""
    wanted = "a folder that `posttrain convert --to` wrote"
    if not (folder / "conversion.json").is_file():
        raise InputError(f"{folder} has no conversion.json: give {wanted}")
    if problems := find_damage(folder):
        raise InputError(f"{folder} is not as it was written: {problems[0]}; convert the checkpoint again")
    if not read_json(folder / "conversion.json").get("verification"):
        raise InputError(f"{folder} was not verified (--no-verify, --for-vllm): give {wanted} without these")
    if not re.match(r"---\n(?:(?!---).*\n)*?license: ", (folder / "README.md").read_text("utf-8")):
        print("warning: the model card names no licence; `posttrain convert --license ID` writes it", file=sys.stderr)
    return [*sorted(read_json(folder / CHECKSUMS)["files"]), CHECKSUMS]


def _upload(args: argparse.Namespace, files: list[str], what: str) -> int:
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if get_token() is None:
        raise InputError("no token for the hub: set HF_TOKEN, or run `hf auth login`")
    api, name = HfApi(library_name="posttrain"), args.repository
    try:
        try:
            is_public = not api.model_info(name).private
        except RepositoryNotFoundError:
            api.create_repo(name, private=not args.public)
            is_public = args.public
        if is_public and not args.public:
            raise InputError(f"{name} is public, and everybody could read the model: confirm with --public")
        operations = [CommitOperationAdd(file, str(args.folder / file)) for file in files]
        commit = api.create_commit(name, operations, commit_message=args.message)
    except HfHubHTTPError as error:
        said = (error.server_message or str(error)).strip().splitlines()
        raise InputError(f"the hub refused {name}: {said[0] if said else type(error).__name__}") from error
    except InputError:
        raise
    except Exception as error:  # of whichever HTTP library the hub's client is built on
        print(f"posttrain: error: {api.endpoint} was not reached: {reason_of(error)}", file=sys.stderr)
        return ExitCode.CRASHED
    print(f"Uploaded {what}, {'public' if is_public else 'private'}: {commit.commit_url}")
    return ExitCode.DONE
