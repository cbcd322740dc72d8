"""What `posttrain convert` says of the comparison of a converted model with its source."""

from __future__ import annotations

import torch

from posttrain.apps.export.verification import compare


def test_rounding_is_named_with_the_bound_that_it_has_and_the_agreement_of_the_top_tokens() -> None:
    torch.manual_seed(0)
    reference = torch.randn(1, 24, 50)
    found = reference.clone()
    found[0, 0, :2] += 0.05
    said = str(compare(reference, found, how="loaded", rounded=True, without_adapter=None))
    assert said.startswith("the most likely token is the same at 24 of 24 positions; ")
    assert "at most 0.05, where rounding to 16 bits may change them by up to 0.1" in said
    reference[0, 1], found[0, 1] = 0.0, 0.0
    reference[0, 1, 3], found[0, 1, 4] = 1e-4, 1e-4
    assert "23 of 24" in str(compare(reference, found, how="loaded", rounded=True, without_adapter=None))
    assert str(compare(reference, reference, how="loaded", rounded=False, without_adapter=None)).startswith(
        "its logits equal the source's within 0; the most likely token is the same at 24 of 24"
    )
