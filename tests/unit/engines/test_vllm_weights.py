"""Weights in buckets, and the order in which vLLM's process lets them change."""

from __future__ import annotations

import pytest
import torch

from posttrain.engines.vllm.side.posttrain_vllm import Lease
from posttrain.engines.vllm.side.posttrain_weights import digest, layout, lots_of, views

WEIGHTS = [
    ("a.weight", torch.arange(6, dtype=torch.float32).view(2, 3)),
    ("b.weight", torch.ones(5, dtype=torch.bfloat16)),
    ("c.weight", torch.full((40,), 2.0)),
]


def test_tensors_keep_their_order_and_a_bucket_its_limit() -> None:
    names = [[name for name, _ in lot] for lot in lots_of(WEIGHTS, limit=128)]
    assert names == [["a.weight", "b.weight"], ["c.weight"]]  # c is larger than the limit: a bucket of its own


def test_what_is_packed_comes_out_again() -> None:
    bucket = layout(7, 0, WEIGHTS)
    flat = torch.zeros(bucket.size, dtype=torch.uint8)
    for (_, tensor), (_, view) in zip(WEIGHTS, views(bucket, flat), strict=True):
        view.copy_(tensor)
    for (name, tensor), (same, view) in zip(WEIGHTS, views(bucket, flat), strict=True):
        assert name == same
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)


def test_a_digest_shows_any_flipped_bit() -> None:
    flat = torch.randint(0, 255, (256,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    right = digest(flat)
    for place in range(256):
        for bit in (1, 128):
            flat[place] ^= bit
            assert digest(flat) != right
            flat[place] ^= bit
    assert digest(flat) == right


def test_a_digest_shows_words_that_changed_places() -> None:
    words = torch.tensor([1, 2, 3])
    assert digest(words.view(torch.uint8)) != digest(words.flip(0).view(torch.uint8))


def test_the_whole_order_of_an_update_is_allowed() -> None:
    lease = Lease()
    for action in ("sample", "sleep", "pause", "update", "bucket", "bucket", "finish", "clean", "resume", "sample"):
        lease.take(action)


@pytest.mark.parametrize(
    ("done", "action"),
    [
        ([], "update"),  # without a pause
        (["pause"], "sample"),  # no answer from weights that are about to change
        (["pause", "update"], "resume"),
        (["pause", "update", "finish"], "resume"),  # before the cache is emptied
        (["pause", "update", "finish", "clean"], "sample"),  # before its memory is back
        (["sleep"], "sample"),
        (["sleep"], "resume"),  # its weights are gone
        (["pause", "update"], "sleep"),
    ],
)
def test_another_order_is_refused_with_both_names(done: list[str], action: str) -> None:
    lease = Lease()
    for earlier in done:
        lease.take(earlier)
    with pytest.raises(RuntimeError, match=f"`{action}` in state `{lease.state}`"):
        lease.take(action)
