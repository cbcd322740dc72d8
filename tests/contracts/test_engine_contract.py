"""What every Engine does, whichever engine is behind it. A new engine adds itself to `ENGINES`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB_SIZE, byte_tokenizer, tiny_model

from posttrain.engines.native import NativeEngine, NativeSettings
from posttrain.roles import Engine
from posttrain.types import Completion, NoiseKey, Sampling, Task

TOKENIZER = byte_tokenizer()
SAMPLING = Sampling(24, temperature=0.9, ignore_eos=True)
KEY = NoiseKey(seed=1, step=0)
EOS = 2  # of the tiny models


def native() -> Engine:
    return NativeEngine(tiny_model("llama"), TOKENIZER, NativeSettings(page_size=4, max_batch_size=6))


ENGINES: dict[str, Callable[[], Engine]] = {"native": native}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]()


def make_tasks(count: int = 3) -> list[Task]:
    random = torch.Generator().manual_seed(7)
    lengths = [5, 12, 2, 9][:count]
    prompts = [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=random).tolist()) for n in lengths]
    return [Task(100 + draw, f"t:{draw}", TOKENIZER.decode(ids), ids) for draw, ids in enumerate(prompts)]


def flat(completions: list[list[Completion]]) -> list[Completion]:
    return [completion for group in completions for completion in group]


def test_one_group_per_task_and_one_completion_per_sample(engine: Engine) -> None:
    completions = engine.generate(make_tasks(), 4, SAMPLING, KEY)
    assert [len(group) for group in completions] == [4, 4, 4]
    for completion in flat(completions):
        assert len(completion.token_ids) == len(completion.logprobs) == 24
        assert all(isinstance(token, int) and 0 <= token < VOCAB_SIZE for token in completion.token_ids)
        assert all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in completion.logprobs)
        assert completion.finish_reason == "length"
        assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)


def test_no_tasks_give_no_groups(engine: Engine) -> None:
    assert engine.generate([], 4, SAMPLING, KEY) == []


def test_the_same_key_gives_the_same_completions(engine: Engine) -> None:
    assert engine.generate(make_tasks(), 3, SAMPLING, KEY) == engine.generate(make_tasks(), 3, SAMPLING, KEY)


def test_samples_of_a_group_differ(engine: Engine) -> None:
    for group in engine.generate(make_tasks(), 4, SAMPLING, KEY):
        assert len({completion.token_ids for completion in group}) == 4


@pytest.mark.parametrize("key", [NoiseKey(seed=2, step=0), NoiseKey(seed=1, step=1)])
def test_another_seed_or_step_gives_other_completions(engine: Engine, key: NoiseKey) -> None:
    ours = flat(engine.generate(make_tasks(), 2, SAMPLING, KEY))
    theirs = flat(engine.generate(make_tasks(), 2, SAMPLING, key))
    assert not {completion.token_ids for completion in ours} & {completion.token_ids for completion in theirs}


def test_the_same_prompt_drawn_twice_is_sampled_twice(engine: Engine) -> None:
    task = make_tasks(1)[0]
    again = Task(task.draw + 1, task.id, task.prompt, task.prompt_ids)
    first, second = engine.generate([task, again], 1, SAMPLING, KEY)
    assert first[0].token_ids != second[0].token_ids


def test_completions_do_not_depend_on_the_other_tasks(engine: Engine) -> None:
    tasks = make_tasks(4)
    together = engine.generate(tasks, 3, SAMPLING, KEY)
    for place in (2, 0, 3, 1):
        alone = engine.generate([tasks[place]], 3, SAMPLING, KEY)[0]
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[place]]


def test_a_later_turn_goes_on_with_the_noise_of_its_sample(engine: Engine) -> None:
    """Asked for the rest of each sample as a task of its own, the engine draws the very same rest."""
    task = make_tasks(1)[0]
    for sample, whole in enumerate(engine.generate([task], 3, SAMPLING, KEY)[0]):
        ids = (*task.prompt_ids, *whole.token_ids[:10])
        later = replace(task, prompt_ids=ids, first_sample=sample, first_token=10)
        rest = engine.generate([later], 1, replace(SAMPLING, max_new_tokens=14), KEY)[0][0]
        assert rest.token_ids == whole.token_ids[10:]


def test_greedy_ignores_the_noise(engine: Engine) -> None:
    greedy = Sampling(10, temperature=0.0, ignore_eos=True)
    first = engine.generate(make_tasks(), 2, greedy, KEY)
    second = engine.generate(make_tasks(), 1, greedy, NoiseKey(9, 9))
    for group, other in zip(first, second, strict=True):
        assert group[0].token_ids == group[1].token_ids == other[0].token_ids


def test_top_k_of_one_is_greedy(engine: Engine) -> None:
    greedy = engine.generate(make_tasks(), 1, Sampling(10, temperature=0.0, ignore_eos=True), KEY)
    narrow = engine.generate(make_tasks(), 1, Sampling(10, top_k=1, ignore_eos=True), KEY)
    assert [c.token_ids for c in flat(greedy)] == [c.token_ids for c in flat(narrow)]


def test_a_stop_token_ends_the_completion_and_is_kept(engine: Engine) -> None:
    free = flat(engine.generate(make_tasks(), 4, SAMPLING, KEY))
    stop = free[0].token_ids[6]
    sampling = Sampling(24, temperature=0.9, stop_token_ids=(stop,))
    for completion, whole in zip(flat(engine.generate(make_tasks(), 4, sampling, KEY)), free, strict=True):
        ends = [place for place, token in enumerate(whole.token_ids) if token in (stop, EOS)]
        if ends:
            assert completion.token_ids == whole.token_ids[: ends[0] + 1]
            assert completion.finish_reason == "stop"
        else:
            assert completion.token_ids == whole.token_ids
            assert completion.finish_reason == "length"


def test_the_models_end_of_sequence_stops_unless_ignored(engine: Engine) -> None:
    sampling = Sampling(200, temperature=1.5)
    completions = flat(engine.generate(make_tasks(), 8, sampling, KEY))
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == EOS
        assert EOS not in completion.token_ids[:-1]
    unstopped = flat(engine.generate(make_tasks(), 8, Sampling(200, temperature=1.5, ignore_eos=True), KEY))
    assert all(len(completion.token_ids) == 200 for completion in unstopped)


def test_a_stop_string_ends_the_completion_and_is_kept(engine: Engine) -> None:
    free = flat(engine.generate(make_tasks(), 4, SAMPLING, KEY))
    # What the tokens 9 to 11 of the first completion say: most likely it stands nowhere before.
    stop = TOKENIZER.decode(free[0].token_ids[9:12])
    sampling = Sampling(24, temperature=0.9, stop_strings=("not there", stop), stop_token_ids=(EOS,))
    completion = engine.generate(make_tasks(1), 1, sampling, KEY)[0][0]
    assert completion.finish_reason == "stop"
    assert completion.text.endswith(stop)
    assert completion.token_ids == free[0].token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) <= 12


def test_progress_counts_every_completion_once(engine: Engine) -> None:
    received: list[int] = []
    engine.generate(make_tasks(), 5, SAMPLING, KEY, received.append)
    assert sum(received) == 15
    assert all(count > 0 for count in received)
