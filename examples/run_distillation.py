"""`python examples/run_distillation.py [--config FILE] [key=value …]`: the same as `posttrain distill`."""

import sys

from posttrain.cli.main import run_as_script

if __name__ == "__main__":
    sys.exit(run_as_script("distill"))
