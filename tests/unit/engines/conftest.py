"""What the tests of the native engine share."""

import pytest
from tiny_models import tiny_model
from torch import nn


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("llama")
