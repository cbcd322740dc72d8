"""Every causal language model of the installed transformers, tiny and random, also inside a model with towers for
images: it is loaded, proved, sampled and trained by one step, and the sampler's log-probabilities are the trainer's; or
it is refused with a reason.

No run is started. `tests/every_family.json` has the outcomes that docs/models.md shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from every_family import FAMILIES, FAMILIES_WITH_IMAGES, recorded, transformers_version, try_family

from posttrain.errors import ExitCode, InputError


@pytest.mark.parametrize("family", [*FAMILIES, *FAMILIES_WITH_IMAGES])
def test_family_agrees_or_is_refused(family: str, tmp_path: Path) -> None:
    outcome = try_family(family, tmp_path)
    assert outcome.kind in ("agrees", "refused", "not made"), outcome.reason
    assert outcome.kind == "agrees" or outcome.reason
    record = recorded()
    if record["transformers"] == transformers_version:
        documented = record["families"][family]["kind"]
        assert outcome.kind == documented, f"{outcome.reason}: run tests/every_family.py, then make pages"


def test_a_refusal_is_bad_input() -> None:
    assert InputError.exit_code == ExitCode.BAD_INPUT == 64
