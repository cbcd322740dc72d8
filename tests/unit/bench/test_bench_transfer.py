"""bench/transfer_buckets.py: every byte travels once, digests notice damage, and sizes are those of shapes.py."""

import pytest
import torch
from shapes import make_model
from transfer_buckets import TINY, Copier, LlamaSizes, digest, plan, used_bytes


@pytest.mark.parametrize("bucket_bytes", [2048, 16384, 2**20])
def test_what_is_packed_arrives(bucket_bytes: int) -> None:
    sent = [torch.randn(shape).to(torch.bfloat16) for shape in TINY.weights()]
    received = [torch.full_like(weight, float("nan")) for weight in sent]
    planned = plan(TINY.weights(), bucket_bytes)
    buckets = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
    trainer, engine = Copier(sent, buckets, planned), Copier(received, buckets, planned)
    for index, pieces in enumerate(planned):
        assert used_bytes(pieces) <= bucket_bytes
        trainer.pack(index)
        engine.unpack(index)
    assert all(map(torch.equal, sent, received))


def test_a_digest_changes_with_a_bit_and_with_the_order_of_words() -> None:
    bucket = torch.randint(256, (4096,), dtype=torch.uint8)
    damaged, moved = bucket.clone(), bucket.view(torch.int64).flip(0).contiguous().view(torch.uint8)
    damaged[-1] ^= 1
    assert len({int(digest(each)) for each in (bucket, damaged, moved)}) == 3
    assert int(digest(bucket)) == int(digest(bucket.clone()))


@pytest.mark.parametrize(("shape", "sizes"), [("llama-8b", LlamaSizes()), ("tiny", TINY)])
def test_sizes_are_those_of_the_models(shape: str, sizes: LlamaSizes) -> None:
    model = make_model(shape, "meta", torch.bfloat16)
    assert sorted(tuple(weight.shape) for weight in model.parameters()) == sorted(sizes.weights())
