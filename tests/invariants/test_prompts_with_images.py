"""Images in prompts: sampler, trainer and transformers compute the same, and what an image shows changes everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from float64 import TOLERANCE
from tiny_vision import (
    VISION_FAMILIES,
    engine_of,
    image_ref,
    make_chat,
    make_task,
    save_vision_model,
    vision_inputs,
)
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from posttrain.models.attention_interface import attention_context
from posttrain.models.loading import load_model
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.packed import PackedRow
from posttrain.types import Completion, NoiseKey, Sampling, Task, TokenBatch

CPU = torch.device("cpu")
SAMPLING = Sampling(9, temperature=0.8)
FAMILIES = list(VISION_FAMILIES)

pytestmark = pytest.mark.invariant


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


def make_tasks(folder: Path) -> list[Task]:
    """Images of several sizes, two in one prompt, and a prompt without any."""
    chat = make_chat(folder)
    wide, high, small = image_ref(40, 16, 1), image_ref(9, 31, 2), image_ref(8, 8, 3)
    return [
        make_task(chat, 0, [wide], "?"),
        make_task(chat, 1, [high, small], "and then?"),
        make_task(chat, 2, [], "no image"),
        make_task(chat, 3, [small], "?"),
    ]


def batch_of(tasks: Sequence[Task], answers: Sequence[Sequence[Completion]], *, shared: bool = True) -> TokenBatch:
    rows = [(task, answer.token_ids) for task, group in zip(tasks, answers, strict=True) for answer in group]
    prompts = list(tasks) if shared else [task for task, _ in rows]
    prompt_of = [prompts.index(task) for task, _ in rows] if shared else range(len(rows))
    return TokenBatch.build(
        [task.prompt_ids for task in prompts],
        [ids for _, ids in rows],
        prompt_of,
        {"mask": torch.ones(sum(len(ids) for _, ids in rows))},
        [task.images for task in prompts],
    )


@torch.no_grad()
def logprobs(model: nn.Module, batch: TokenBatch, temperature: float = 1.0) -> Tensor:
    forward = TokenLogprobs(model)
    row = PackedRow.build(batch, CPU, image_tokens=forward.head.image_tokens)
    with attention_context(row.attention):
        return forward(row, temperature)


@torch.no_grad()
def transformers_logprobs(folder: Path, task: Task, answer: Sequence[int]) -> Tensor:
    """Of one sequence alone, by the model's own forward pass, positions and attention."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    ids = torch.tensor([[*task.prompt_ids, *answer]])
    logits = model(ids, **vision_inputs(folder, task, ids)).logits[0]
    start = len(task.prompt_ids) - 1
    return logits[start:-1].log_softmax(-1).gather(1, ids[0, start + 1 :, None])[:, 0]


def test_sampled_logprobs_are_the_trainers_and_those_of_transformers(folder: Path) -> None:
    tasks = make_tasks(folder)
    model = load_model(str(folder), torch.float32, CPU).double().eval()
    answers = engine_of(model, folder).generate(tasks, 3, SAMPLING, NoiseKey(4, 2))
    sampled = torch.tensor([p for group in answers for one in group for p in one.logprobs], dtype=torch.float64)
    torch.testing.assert_close(logprobs(model, batch_of(tasks, answers), 0.8).double(), sampled, rtol=0, atol=1e-5)
    for task in tasks:
        fixed = replace(answers[0][0], token_ids=(65, 84, 66, 65, 90))  # transformers would look for more images
        own = logprobs(model, batch_of([task], [[fixed]])).double()
        expected = transformers_logprobs(folder, task, fixed.token_ids)
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)


def test_packed_shared_unshared_and_alone_are_equal(folder: Path, in_float64: None) -> None:
    tasks = make_tasks(folder)
    model = load_model(str(folder), torch.float32, CPU).double().eval()
    answers = engine_of(model, folder).generate(tasks, 3, SAMPLING, NoiseKey(4, 2))
    shared = logprobs(model, batch_of(tasks, answers))
    torch.testing.assert_close(logprobs(model, batch_of(tasks, answers, shared=False)), shared, rtol=0, atol=TOLERANCE)
    batch = batch_of(tasks, answers)
    alone = [logprobs(model, batch.select([row])) for row in range(len(batch.responses))]
    torch.testing.assert_close(torch.cat(alone), shared, rtol=0, atol=TOLERANCE)


def test_sampler_and_trainer_agree_in_float32(folder: Path) -> None:
    tasks = make_tasks(folder)
    model = load_model(str(folder), torch.float32, CPU).eval()
    answers = engine_of(model, folder).generate(tasks, 3, Sampling(9), NoiseKey(4, 2))
    sampled = torch.tensor([p for group in answers for one in group for p in one.logprobs])
    gap = (logprobs(model, batch_of(tasks, answers)) - sampled).abs().exp().mean()
    assert float(gap) <= 1.000001


def test_greedy_tokens_are_those_of_generate(folder: Path) -> None:
    model = load_model(str(folder), torch.float32, CPU).eval()
    own = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    for task in make_tasks(folder):
        [[answer]] = engine_of(model, folder).generate([task], 1, Sampling(12, temperature=0.0), NoiseKey(0, 0))
        ids = torch.tensor([task.prompt_ids])
        inputs = vision_inputs(folder, task, ids)
        whole = own.generate(ids, **inputs, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
        assert list(answer.token_ids) == whole[0, ids.shape[1] :].tolist()


def test_another_image_changes_samples_and_log_probabilities(folder: Path) -> None:
    """The placeholder tokens stay the same: whatever drops the image would compute the same."""
    chat = make_chat(folder)
    seen, other = (make_task(chat, 0, [image_ref(24, 16, seed)], "?") for seed in (1, 2))
    assert seen.prompt_ids == other.prompt_ids
    model = load_model(str(folder), torch.float32, CPU).eval()
    engine = engine_of(model, folder)
    answers = engine.generate([seen, other], 4, SAMPLING, NoiseKey(4, 2))
    assert [one.token_ids for one in answers[0]] != [one.token_ids for one in answers[1]]
    first = logprobs(model, batch_of([seen], answers[:1]))
    second = logprobs(model, batch_of([other], answers[:1]))
    assert float((first - second).abs().max()) > 0.01


def test_cached_prefixes_of_different_images_are_not_mixed(folder: Path, in_float64: None) -> None:
    chat = make_chat(folder)
    tasks = [make_task(chat, 0, [image_ref(24, 16, seed)], "?") for seed in (1, 2, 1)]
    model = load_model(str(folder), torch.float32, CPU).double().eval()
    engine = engine_of(model, folder)
    alone = [engine.generate([task], 2, SAMPLING, NoiseKey(4, 2))[0] for task in tasks]
    engine.keep_prefixes(True)
    cached = [engine.generate([task], 2, SAMPLING, NoiseKey(4, 2))[0] for task in tasks]
    prefilled = engine.keep_prefixes(False)
    assert prefilled.reused > 0, "the third prompt is the first"
    for own, found in zip(alone, cached, strict=True):
        assert [one.token_ids for one in own] == [one.token_ids for one in found]
        for one, two in zip(own, found, strict=True):
            torch.testing.assert_close(
                torch.tensor(one.logprobs).double(), torch.tensor(two.logprobs).double(), rtol=0, atol=TOLERANCE
            )


def test_a_later_turn_continues_a_cached_image(folder: Path, in_float64: None) -> None:
    """As a conversation does: the prompt of the second turn is the first with its answer; the answer may hold a
    placeholder, which is a token like any other."""
    [task] = [make_task(make_chat(folder), 0, [image_ref(24, 16, 1)], "?")]
    model = load_model(str(folder), torch.float32, CPU).double().eval()
    engine = engine_of(model, folder)
    placeholder = next(token for token in task.prompt_ids if task.prompt_ids.count(token) > 5)
    engine.keep_prefixes(True)
    [[first]] = engine.generate([task], 1, SAMPLING, NoiseKey(4, 2))
    later = replace(task, prompt_ids=(*task.prompt_ids, *first.token_ids, placeholder, 7))
    [[second]] = engine.generate([later], 1, SAMPLING, NoiseKey(4, 2))
    assert engine.keep_prefixes(False).reused >= len(task.prompt_ids)
    trained = logprobs(model, batch_of([later], [[second]]), 0.8)
    torch.testing.assert_close(torch.tensor(second.logprobs, dtype=torch.float64), trained, rtol=0, atol=TOLERANCE)
    joined = replace(first, token_ids=(*first.token_ids, placeholder, 7, *second.token_ids))
    whole = logprobs(model, batch_of([task], [[joined]]), 0.8)
    torch.testing.assert_close(whole[-len(second.token_ids) :], trained, rtol=0, atol=TOLERANCE)
