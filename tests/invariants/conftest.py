"""What comparisons with the formulas of others share."""

import pytest

from posttrain.policy.objectives import clipped


@pytest.fixture
def no_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our denominators have an epsilon of 1e-8, as in NeMo RL. TRL's have none, and in float64 the difference shows."""
    monkeypatch.setattr(clipped, "EPS", 0.0)
