"""The short form of the campaign: a few cases of every part, the same every time. `make faults` runs all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.campaign import run_part
from faults.lab import Lab
from faults.parts import PARTS

SEED = 0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


# Of spot: integration/test_spot_is_exact.py. Those of ranks start Ray, those of clock new interpreters.
@pytest.mark.parametrize("name", [name for name in PARTS if name not in ("spot", "ranks", "clock")])
def test_promises_hold(name: str, lab: Lab) -> None:
    result = run_part(PARTS[name], lab, SEED, short=True)
    failed = [f"{one.case}: {one.message}\n{result.repro(one)}" for one in result.outcomes if one.verdict == "failed"]
    assert not failed, f"{PARTS[name].promise}:\n\n" + "\n\n".join(failed)
    assert result.tried > 0, f"nothing could be tried here: {[one.message for one in result.outcomes]}"
