"""The cache of the reference's log-probabilities: what is computed, what is looked up, and what a resumed run finds."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from posttrain.policy.reference_cache import FILE_NAME, CachedReference, answer_keys, model_fingerprint
from posttrain.types import TokenBatch

LARGE = 2**30


class CountingPolicy:
    """Every call gives other bits, as other micro-batches would; so a looked-up value is recognised."""

    def __init__(self, fingerprint: str = "ab" * 32) -> None:
        self.asked: list[list[list[int]]] = []
        self.fingerprint = fingerprint

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        self.asked.append([response.tolist() for response in batch.responses])
        return torch.arange(sum(batch.response_lengths), dtype=torch.float32) / 10 - len(self.asked)

    def reference_fingerprint(self) -> str:
        return self.fingerprint


def batch_of(*answers: tuple[int, list[int]]) -> TokenBatch:
    """(prompt, response) each; prompts of one token."""
    prompts = sorted({prompt for prompt, _ in answers})
    return TokenBatch.build(
        [[prompt] for prompt in prompts],
        [response for _, response in answers],
        [prompts.index(prompt) for prompt, _ in answers],
        {"mask": torch.ones(sum(len(response) for _, response in answers))},
    )


A, B, C = (1, [5, 6, 7]), (1, [5]), (2, [5, 6, 7])


def test_an_answer_is_computed_once_and_comes_back_bit_for_bit() -> None:
    policy = CountingPolicy()
    reference = CachedReference(policy, LARGE)
    first, known = reference.logprobs(batch_of(A, B), 1)
    assert known == 0.0
    again, known = reference.logprobs(batch_of(B, A), 2)
    assert known == 1.0
    assert len(policy.asked) == 1
    assert torch.equal(again, torch.cat([first[3:], first[:3]]))


def test_only_what_is_missing_is_computed() -> None:
    policy = CountingPolicy()
    reference = CachedReference(policy, LARGE)
    first, _ = reference.logprobs(batch_of(A), 1)
    mixed, known = reference.logprobs(batch_of(A, B, C), 2)
    assert policy.asked[1] == [[5], [5, 6, 7]]
    assert known == pytest.approx(3 / 7)
    assert torch.equal(mixed[:3], first)
    assert mixed[3:].tolist() == pytest.approx([-2.0, -1.9, -1.8, -1.7])


def test_the_same_answer_to_another_prompt_is_another_answer() -> None:
    keys = answer_keys(batch_of(A, B, C))
    assert len(set(keys)) == 3
    # The boundary counts: [1] + [5, 6] is not [1, 5] + [6].
    moved = TokenBatch.build([[1, 5]], [[6, 7]], [0], {"mask": torch.ones(2)})
    assert answer_keys(moved)[0] not in keys


def test_what_changes_afterwards_does_not_change_what_is_known() -> None:
    reference = CachedReference(CountingPolicy(), LARGE)
    first, _ = reference.logprobs(batch_of(A), 1)
    expected = first.clone()
    first.zero_()
    assert torch.equal(reference.logprobs(batch_of(A), 2)[0], expected)


@pytest.mark.parametrize(("room", "keep"), [(0, True), (LARGE, False)])
def test_without_room_or_where_it_need_not_be_kept_all_is_computed_every_time(room: int, keep: bool) -> None:
    policy = CountingPolicy()
    reference = CachedReference(policy, room)
    for step in (1, 2):
        assert reference.logprobs(batch_of(A, B), step, keep=keep)[1] == 0.0
    assert len(policy.asked) == 2


# -- the file ----------------------------------------------------------------------------------------------------------


def run(folder: Path, steps: dict[int, TokenBatch], max_bytes: int = LARGE, **policy: str) -> dict[int, Tensor]:
    """One process: the steps it makes and what each of them gets. Only the first call of a process gives these bits."""
    reference = CachedReference(CountingPolicy(**policy), max_bytes, folder)
    return {step: reference.logprobs(batch, step)[0] for step, batch in steps.items()}


STEPS = {1: batch_of(A), 2: batch_of(B), 3: batch_of(A, B), 4: batch_of(C), 5: batch_of(A, C)}


def after(step: int) -> dict[int, TokenBatch]:
    return {number: batch for number, batch in STEPS.items() if number > step}


def test_a_resumed_run_finds_what_was_made_before_its_checkpoint(tmp_path: Path) -> None:
    whole = run(tmp_path, STEPS)
    resumed = run(tmp_path, after(2))
    assert torch.equal(resumed[3], whole[3])
    assert torch.equal(resumed[5][:3], whole[5][:3])  # made in step 1


def test_what_was_made_after_the_checkpoint_is_made_again(tmp_path: Path) -> None:
    """Otherwise it might hold what another config made, after the same checkpoint."""
    run(tmp_path, STEPS)
    policy = CountingPolicy()
    reference = CachedReference(policy, LARGE, tmp_path)
    reference.logprobs(STEPS[3], 3)
    assert policy.asked == []
    reference.logprobs(STEPS[4], 4)
    assert policy.asked == [[[5, 6, 7]]]


@pytest.mark.parametrize(("step", "fingerprint"), [(0, "ab" * 32), (1, "ab" * 32), (3, "cd" * 32)])
def test_a_fresh_run_and_another_reference_start_with_nothing(tmp_path: Path, step: int, fingerprint: str) -> None:
    run(tmp_path, STEPS)
    policy = CountingPolicy(fingerprint)
    assert CachedReference(policy, LARGE, tmp_path).logprobs(STEPS[max(1, step)], step)[1] == 0.0
    assert len(policy.asked) == 1


def test_a_record_torn_by_a_kill_is_cut_off_and_the_rest_survives(tmp_path: Path) -> None:
    whole = run(tmp_path, {1: STEPS[1], 2: STEPS[2]})
    path = tmp_path / FILE_NAME
    content = path.read_bytes()
    for cut in range(1, 40, 3):
        path.write_bytes(content[:-cut])
        reference = CachedReference(CountingPolicy(), LARGE, tmp_path)
        values, known = reference.logprobs(STEPS[3], 3)
        assert known == pytest.approx(3 / 4)
        assert torch.equal(values[:3], whole[1])
        again, known = CachedReference(CountingPolicy(), LARGE, tmp_path).logprobs(STEPS[3], 4)
        assert known == 1.0
        assert torch.equal(again, values)


@pytest.mark.parametrize("damage", ["missing", "empty", "flipped", "other reference"])
def test_a_resumed_run_says_that_the_file_was_lost(tmp_path: Path, damage: str) -> None:
    run(tmp_path, {1: STEPS[1], 2: STEPS[2]})
    path = tmp_path / FILE_NAME
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        content[-1] ^= 1
        path.write_bytes(bytes(content))
    said: list[str] = []
    policy = CountingPolicy("cd" * 32 if damage == "other reference" else "ab" * 32)
    known = CachedReference(policy, LARGE, tmp_path, said.append).logprobs(STEPS[3], 3)[1]
    assert known == (0.75 if damage == "flipped" else 0.0), "the record of step 2 was the last"
    assert len(said) == 1
    assert FILE_NAME in said[0]


def test_a_record_of_the_interrupted_step_is_no_damage(tmp_path: Path) -> None:
    run(tmp_path, STEPS)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-3])
    said: list[str] = []
    CachedReference(CountingPolicy(), LARGE, tmp_path, said.append).logprobs(STEPS[3], 3)
    assert said == []


def test_a_full_cache_stays_as_it_was_when_it_filled_up(tmp_path: Path) -> None:
    """A smaller answer that would still fit is not added later: it would be added at another step after a resume."""
    room = 250  # A, of 212 bytes, and nothing else
    whole = CachedReference(CountingPolicy(), room, tmp_path)
    whole.logprobs(batch_of(A), 1)
    whole.logprobs(batch_of((3, list(range(40)))), 2)
    assert whole.logprobs(batch_of(B), 3)[1] == 0.0
    assert whole.logprobs(batch_of(A), 3)[1] == 1.0

    larger = CachedReference(CountingPolicy(), LARGE, tmp_path)
    larger.logprobs(batch_of(B), 3)
    assert larger.logprobs(batch_of(B), 4)[1] == 0.0
    assert larger.logprobs(batch_of(A), 4)[1] == 1.0


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    reference = CachedReference(CountingPolicy(), LARGE, tmp_path / "file", said.append)
    reference.logprobs(batch_of(A), 1)
    assert reference.logprobs(batch_of(A), 2)[1] == 1.0
    assert len(said) == 1
    assert FILE_NAME in said[0]


# -- the fingerprint ---------------------------------------------------------------------------------------------------


def test_a_fingerprint_covers_all_that_decides_a_logprob() -> None:
    model = tiny_model()
    config = model.config.to_dict()
    fingerprint = model_fingerprint(model, config, 1.0)
    assert fingerprint == model_fingerprint(tiny_model(), {**config, "_name_or_path": "elsewhere"}, 1.0)
    assert fingerprint != model_fingerprint(model, config, 0.7)
    assert fingerprint != model_fingerprint(tiny_model(dtype=torch.bfloat16), config, 1.0)
    assert fingerprint != model_fingerprint(model, {**config, "rms_norm_eps": 0.1}, 1.0)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    assert fingerprint != model_fingerprint(model, config, 1.0)


def test_adapters_are_no_part_of_the_reference() -> None:
    from peft import LoraConfig, get_peft_model

    config = tiny_model().config.to_dict()
    fingerprints = set()
    for rank in (2, 4):
        torch.manual_seed(rank)
        adapted = get_peft_model(tiny_model(), LoraConfig(r=rank, target_modules=["q_proj"]))
        fingerprints.add(model_fingerprint(adapted, config, 1.0))
    assert len(fingerprints) == 1
