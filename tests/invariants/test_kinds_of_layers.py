"""One model of each kind of layer: packing, shared prompts, sessions, rounds with unfinished answers, `kill -9`.

In float64 where the claim is algebra. The same for every family, against `transformers`, is in
`unit/policy/test_packed_rows.py` and `test_sampler_equals_trainer.py`; whole runs are in
`integration/test_model_families.py`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from float64 import assert_same_gradients
from test_resume_is_exact import kill_and_compare
from test_rounds_are_exact import rounds
from tiny_models import gradients, packed_logprobs, tiny_model
from tiny_runs import rows_of, run
from torch import Tensor

from posttrain.apps.demo.arithmetic import build_tokenizer
from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.engines.native.session import GenerationSession, SessionRequest, TokenEvent
from posttrain.types import Completion, NoiseKey, OpenGroup, Quota, Sampling, Task, TokenBatch, Unfinished

KINDS = {
    "gated delta net": "qwen3.5",
    "sinks": "gpt-oss",
    "Mamba-2": "nemotron-h",
    "short convolution": "lfm2",
    "latent attention": "deepseek-v3",
    "experts": "qwen3-moe",
}
TOKENIZER = build_tokenizer()
VOCAB = len(TOKENIZER)
EXACT = 1e-10  # of numbers of order 1 to 10 that float64 adds up in two orders


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(family: str, **settings: float) -> NativeEngine:
    model = tiny_model(family, dtype=torch.float64, vocab_size=VOCAB)
    sizes = {"page_size": 4, "max_batch_size": 6, "max_prefill_tokens": 16, "max_total_tokens": 48}
    return NativeEngine(model, TOKENIZER, NativeSettings(**{**sizes, **settings}))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("are_shared", [True, False], ids=["shared prompts", "packed sequences"])
def test_a_sequence_does_not_depend_on_what_it_is_packed_with(family: str, are_shared: bool) -> None:
    """Log-probabilities and gradients: all in one row with shared prompts, all in one row, and one row for each."""
    chance = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (length,), generator=chance).tolist() for length in (70, 1, 9)]
    of = [0, 2, 0, 1, 2]
    responses = [torch.randint(VOCAB, (length,), generator=chance).tolist() for length in (5, 66, 1, 8, 3)]

    def logprobs_and_gradients(batches: list[TokenBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        model = tiny_model(family, dtype=torch.float64, vocab_size=VOCAB)
        found = torch.cat([packed_logprobs(model, batch) for batch in batches])
        found.square().sum().backward()
        return found.detach(), gradients(model)

    def batch(rows: list[int]) -> TokenBatch:
        own = [prompts[of[row]] for row in rows]
        answers = [responses[row] for row in rows]
        places = list(range(len(rows)))
        if are_shared and len(rows) > 1:
            own, places = prompts, [of[row] for row in rows]
        return TokenBatch.build(own, answers, places, {"mask": torch.ones(sum(map(len, answers)))})

    together, of_all = logprobs_and_gradients([batch(list(range(5)))])
    alone, of_each = logprobs_and_gradients([batch([row]) for row in range(5)])
    torch.testing.assert_close(together, alone, rtol=0, atol=EXACT)
    assert_same_gradients(of_all, of_each)


@pytest.mark.usefixtures("in_float64")
def test_a_session_under_load_draws_what_the_engine_draws(family: str) -> None:
    """Requests come while others run, several samples share a prompt, and a small cache preempts some."""
    chance = random.Random(0)
    wanted = [
        SessionRequest(
            f"r{index}",
            tuple(chance.randrange(VOCAB) for _ in range(chance.randrange(1, 20))),
            Sampling(chance.randrange(12, 28), temperature=1.0, ignore_eos=True),
            seed=index,
            num_samples=chance.randrange(1, 4),
        )
        for index in range(10)
    ]
    native = engine(family)
    page_bytes = 2 * native.settings.page_size * sum(s.bytes_per_token for s in native.forward.shapes().layers.values())
    native.settings = native.settings.model_copy(update={"kv_cache_gib": 16 * page_bytes / 2**30})
    session, waiting = GenerationSession(native), list(wanted)
    found: dict[tuple[str, int], list[TokenEvent]] = {}
    for _ in range(2000):
        if waiting:
            session.add(waiting.pop(0))
        for event in session.step():
            assert isinstance(event, TokenEvent), event
            found.setdefault((event.request_id, event.sample), []).append(event)
        if not waiting and not session.unfinished:
            break
    assert not session.unfinished
    assert session.counts.num_preemptions > 0
    alone = engine(family)
    for request in wanted:
        task = Task(0, request.id, "", request.prompt_ids)
        [answers] = alone.generate([task], request.num_samples, request.sampling, NoiseKey(request.seed, 0))
        for sample, answer in enumerate(answers):
            events = found[request.id, sample]
            assert tuple(event.token_id for event in events) == answer.token_ids
            assert [event.logprob for event in events] == pytest.approx(answer.logprobs, abs=EXACT)


@pytest.mark.usefixtures("in_float64")
def test_answers_of_several_rounds_equal_those_of_one_call(family: str) -> None:
    native = engine(family)
    tasks = [Task(draw, f"t:{draw}", "?", tuple(range(5, 7 + 2 * draw))) for draw in range(5)]
    sampling = Sampling(30, temperature=1.2, stop_token_ids=tuple(range(3, VOCAB, 11)))
    expected = native.generate(tasks, 3, sampling, NoiseKey(5, 1))
    groups, num_rounds = [OpenGroup(task, 1, (Unfinished(),) * 3) for task in tasks], 0
    while not all(group.is_whole for group in groups):
        num_whole = sum(group.is_whole for group in groups)
        groups = native.sample_round(groups, sampling, 5, Quota(num_whole + 1, 1, max_age=100))
        num_rounds += 1
    assert num_rounds > 2, "answers are continued"
    for group, whole in zip(groups, expected, strict=True):
        for answer, other in zip(group.answers, whole, strict=True):
            assert isinstance(answer, Completion)
            assert answer.token_ids == other.token_ids
            assert answer.logprobs == pytest.approx(other.logprobs, abs=EXACT)


@pytest.mark.full
def test_a_killed_run_with_unfinished_answers_equals_the_uninterrupted_one(
    family: str, data: Path, tmp_path: Path
) -> None:
    model, whole = tmp_path / "model", tmp_path / "whole"
    special = {f"{kind}_token_id": getattr(TOKENIZER, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    tiny_model(family, vocab_size=VOCAB, **special).save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    assert run(rounds(model, data, whole, 2)) == 0
    ages = [row["train/trajectory_age_max"] for row in rows_of(whole) if "train/trajectory_age_max" in row]
    assert 0 < max(ages) <= 2, "groups are carried over"
    kill_and_compare(lambda folder: rounds(model, data, folder, 2), whole, tmp_path, num_kills=3, seed=7)
