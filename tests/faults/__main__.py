"""`make faults`: the long form of the campaign. Exit code 0: all held. 1: something failed, or time was over."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# No part of it reaches a network. Set before transformers and datasets are imported, which read it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from faults.campaign import read_results, run_part, table, write_result, write_whole
from faults.lab import Lab
from faults.parts import PARTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    names = ", ".join(PARTS)
    parser.add_argument(
        "--only", default="", metavar="PARTS", help=f"parts, separated by commas: {names} (default: all)"
    )
    parser.add_argument("--case", help="only this case of the part")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("results/faults"), help="folder for the tables (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run at the same time (default: 1)")
    parser.add_argument("--minutes", type=float, default=150, help="begin no case after that long (%(default)s)")
    parser.add_argument("--short", action="store_true", help="the cases that CI runs")
    parser.add_argument("--keep", action="store_true", help="leave the folders of the last case where they are")
    args = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and children inherit that
    chosen = [name.strip() for name in args.only.split(",") if name.strip()] or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {names}")
    if args.case and len(chosen) != 1:
        parser.error("--case needs --only with its part")

    if not args.case and not args.short:
        estimate = sum(PARTS[name].minutes for name in chosen)
        print(
            f"{len(chosen)} parts, about {estimate:.0f} minutes on two idle cores; no case begins after "
            f"{args.minutes:g}"
        )
    if args.jobs > 1 and len(chosen) > 1:
        failed = run_together(chosen, args)
        print(f"\n{(args.out / 'table.md').read_text()}\nwritten to {args.out}")
        return int(failed)
    give_up_at = time.monotonic() + args.minutes * 60
    folder = Path(tempfile.mkdtemp(prefix="posttrain-faults-"))
    failed = False
    with Lab(folder, keep=args.keep) as lab:
        for name in chosen:
            part = PARTS[name]
            print(f"{name}: {part.promise}", flush=True)
            result = run_part(
                part,
                lab,
                args.seed,
                short=args.short,
                only_case=args.case,
                give_up_at=give_up_at,
                say=lambda line: print(line, flush=True),
            )
            failed |= bool(result.count("failed") or result.not_tried)
            if args.case:
                print(*(f"{one.verdict}: {one.message}" for one in result.outcomes), sep="\n")
            else:
                write_result(result, args.out)
                write_whole(args.out / "table.md", table(read_results(args.out, list(PARTS))))
    if not args.case:
        print(f"\n{(args.out / 'table.md').read_text()}\nwritten to {args.out}")
    return 1 if failed else 0


def run_together(chosen: list[str], args: argparse.Namespace) -> bool:
    """Each part in a process of its own, the longest first. Whether one failed."""
    ends_at = time.monotonic() + args.minutes * 60

    def run(name: str) -> int:
        minutes = max(0.0, ends_at - time.monotonic()) / 60
        options = ["--seed", str(args.seed), "--out", str(args.out), "--minutes", f"{minutes:.2f}"]
        command = [sys.executable, "-m", "faults", "--only", name, *options, *["--short"] * args.short]
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode

    with ThreadPoolExecutor(args.jobs) as pool:
        codes = list(pool.map(run, sorted(chosen, key=lambda name: -PARTS[name].minutes)))
    write_whole(args.out / "table.md", table(read_results(args.out, list(PARTS))))
    return any(codes)


if __name__ == "__main__":
    sys.exit(main())
