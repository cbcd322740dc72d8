"""`python examples/run_rm.py [--config FILE] [key=value …]`: the same as `posttrain rm`."""

import sys

from posttrain.cli.main import run_as_script

if __name__ == "__main__":
    sys.exit(run_as_script("rm"))
