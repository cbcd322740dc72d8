"""`python -m posttrain` is the command."""

import subprocess
import sys

from posttrain import __version__


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "posttrain", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout


def test_a_signal_while_python_ends_does_not_replace_the_exit_code() -> None:
    """As when a machine is taken away while a finished run closes down."""
    program = (
        "import atexit, os, sys\n"
        "atexit.register(os.kill, os.getpid(), 15)\n"
        "sys.argv = ['posttrain', 'doctor', '--rules']\n"
        "from posttrain.cli.main import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
