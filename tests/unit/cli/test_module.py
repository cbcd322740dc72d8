"""`python -m posttrain` is the command."""

import subprocess
import sys

from posttrain import __version__


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "posttrain", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout
