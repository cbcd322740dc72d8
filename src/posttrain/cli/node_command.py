"""`posttrain node`: the first process of the pods that `posttrain launch render` writes."""

from __future__ import annotations

import argparse
import os

from posttrain.cli.overrides_parser import OverridesParser, Subparsers, add_command

SUMMARY = "the first process of a pod; the manifests of `posttrain launch` start it"
EPILOG = """\
It has no settings: rank, sizes and ports are in environment variables (docs/decisions/0040). It checks the machine, joins the
other pods of the run, starts Ray and on rank 0 the driver, watches for the end of the machine, and lets the run save.

  posttrain node            in every pod
  posttrain node driver     entrypoint of a RayJob or Ray job, in the head's pod

exit codes: that of the run, the same in all pods: 0 done · 64 bad config, or a machine without what it needs · 65 three
attempts without a new checkpoint · 85 interrupted: start all pods again
"""


def add_parser(commands: Subparsers) -> None:
    parser: OverridesParser = add_command(commands, "node", SUMMARY, epilog=EPILOG)
    parser.add_argument("part", nargs="?", choices=["driver"], help="only the driver, beside the head of a Ray cluster")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from posttrain.apps.launch.node.contract import read_settings
    from posttrain.apps.launch.node.driver import DriverMember
    from posttrain.apps.launch.node.head import HeadMember
    from posttrain.apps.launch.node.member import Member

    settings = read_settings(os.environ)
    if args.part == "driver":
        return DriverMember(settings, os.environ).run()
    return (HeadMember if settings.rank == 0 else Member)(settings, os.environ).run()
