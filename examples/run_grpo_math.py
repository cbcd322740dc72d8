"""`python examples/run_grpo_math.py [--config FILE] [key=value …]`: the same as `posttrain grpo`."""

import sys

from posttrain.cli.main import run_as_script

if __name__ == "__main__":
    sys.exit(run_as_script("grpo"))
