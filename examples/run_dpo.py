"""`python examples/run_dpo.py [--config FILE] [key=value …]`: the same as `posttrain dpo`."""

import sys

from posttrain.cli.main import run_as_script

if __name__ == "__main__":
    sys.exit(run_as_script("dpo"))
