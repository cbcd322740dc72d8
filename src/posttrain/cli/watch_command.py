"""`posttrain watch`: runs in the browser."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path

from posttrain.apps.serve.options import is_loopback
from posttrain.apps.watch import MIN_TOKEN_CHARACTERS
from posttrain.cli.overrides_parser import OverridesParser, read_secret
from posttrain.errors import InputError
from posttrain.files.redaction import name_secret

TOKEN_VARIABLE = "POSTTRAIN_WATCH_TOKEN"
DEFAULT_FOLDER = "results"
_MAX_TOKEN_BYTES = 4096


def add_arguments(parser: OverridesParser) -> None:
    places = f"a run, or a folder that holds runs; a path or a URL such as s3://bucket/runs (default: {DEFAULT_FOLDER})"
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=places)
    parser.option("--host", "address to listen at", default="127.0.0.1")
    parser.option("--port", "0 takes a free one", default=8411)
    parser.option("--token-file FILE", f"file with the access token (default: {TOKEN_VARIABLE})", type=Path)
    further = "a registry to show, beside those in the folders; may be repeated"
    parser.option("--registry WHERE", further, action="append", default=[])
    parser.switch("--open", "open a browser")
    parser.set_defaults(run=run, output_is_result=False, interrupted="watch ended")


def run(args: argparse.Namespace) -> int:
    token = _token(args.token_file)
    if token is None and not is_loopback(args.host):
        raise InputError(
            f"--host {args.host}: other machines could read the runs. Give a token (--token-file FILE or "
            f"{TOKEN_VARIABLE}), or stay on this machine and use a tunnel (ssh -L)"
        )
    try:
        from posttrain.apps.watch.access import Access
        from posttrain.apps.watch.app import run as serve
        from posttrain.apps.watch.catalogue import Catalogue
        from posttrain.apps.watch.places import place_of
    except ModuleNotFoundError as error:
        raise InputError(f'posttrain watch needs {error.name}: pip install "posttrain[ui]"') from error
    folders = args.folders or [DEFAULT_FOLDER]
    if not args.folders and not Path(DEFAULT_FOLDER).is_dir():
        raise InputError(f"there is no folder {DEFAULT_FOLDER}/ here; name one that holds runs: posttrain watch FOLDER")
    catalogue = Catalogue([place_of(text) for text in folders], registries=args.registry)
    num_runs = len(catalogue.runs)

    def ready(address: str) -> None:
        found = f"{num_runs} run{'' if num_runs == 1 else 's'} in {', '.join(folders)}"
        print(f"posttrain watch: {address}  ({found}; Ctrl-C ends)", file=sys.stderr, flush=True)
        if args.open:
            webbrowser.open(address)

    return serve(catalogue, Access(token, [args.host]), args.host, args.port, on_ready=ready)


def _token(file: Path | None) -> str | None:
    text = os.environ.get(TOKEN_VARIABLE, "") if file is None else read_secret("--token-file", file, _MAX_TOKEN_BYTES)
    token = text.strip()
    if file is None and not token:
        return None
    where = f"--token-file {file}" if file else TOKEN_VARIABLE
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isprintable():
        raise InputError(
            f"{where}: a token has at least {MIN_TOKEN_CHARACTERS} printable characters on one line; "
            "make one with: openssl rand -hex 24"
        )
    name_secret(token)
    return token
