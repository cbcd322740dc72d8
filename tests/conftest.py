"""Settings of every test. Being here also puts `tests/` on the path, for shared modules such as `tiny_models`."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import local_ray
import pytest
from hypothesis import settings

pytest_plugins = ["tiers", "distribution"]
# Without a GPU its tests are not collected.
collect_ignore = [] if any(Path("/dev").glob("nvidia[0-9]*")) else ["gpu"]

# No test reaches a network. Set before transformers and datasets are imported, which read it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["RAY_ADDRESS"] = "local"  # nor a Ray cluster that runs on this machine

# A busy machine is no bug: no deadlines. The same examples every time: a red test stays red until it is fixed.
settings.register_profile("posttrain", deadline=None, derandomize=True, database=None)
settings.load_profile("posttrain")

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP ignored, and children inherit that. Some tests
# send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """What the code under test computes in float32 is computed in float64."""
    from float64 import float64  # torch is imported by the tests that need it

    with float64():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of `tiny_runs`."""
    from tiny_runs import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of `tiny_runs`."""
    from tiny_runs import save_data

    return save_data(tmp_path_factory.mktemp("data"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ray is started once for all tests marked `ray`: they run in one worker, one after the other."""
    if item.get_closest_marker("ray"):
        local_ray.start()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    local_ray.stop_unless_needed(nextitem)
