"""`python examples/run_ppo.py [--config FILE] [key=value …]`: the same as `posttrain ppo`."""

import sys

from posttrain.cli.main import run_as_script

if __name__ == "__main__":
    sys.exit(run_as_script("ppo"))
