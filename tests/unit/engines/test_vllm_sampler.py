"""vLLM as a run's sampler, with the stand-in in a process that most tests share: weights, answers, rounds, faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import vllm_pythons
from tiny_models import byte_tokenizer, tiny_model
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, LlamaForCausalLM

from posttrain.config import PolicyConfig, load_config
from posttrain.config.policy import ARGUMENTS_OF_VLLM_IN_USE
from posttrain.engines.vllm import vllm_options
from posttrain.engines.vllm.process import VllmError
from posttrain.engines.vllm.sampler import VllmSampler, _environment
from posttrain.types import Completion, NoiseKey, OpenGroup, Quota, Sampling, Task, Unfinished

TOKENIZER = byte_tokenizer()
SAMPLING = Sampling(12, temperature=0.8)
KEY = NoiseKey(3, 1)
TASKS = [Task(draw, f"t:{draw}", "", (5 + draw, 7, 9)) for draw in range(3)]


def policy(python: str) -> PolicyConfig:
    words = [
        "policy.device=cpu",
        "policy.precision=float32",
        "policy.num_threads=1",
        "policy.max_total_sequence_length=48",
        "policy.generation.backend=vllm",
        f"policy.generation.vllm_cfg.python={python}",
    ]
    return load_config("grpo", None, words).config.policy


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm") / "stand-in"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def sampler(home: Path, model: nn.Module) -> Iterator[VllmSampler]:
    python = vllm_pythons.stand_in(home)
    sampler = VllmSampler(model, TOKENIZER, policy(python), torch.device("cpu"))
    yield sampler
    sampler.close()


@torch.no_grad()
def difference(model: nn.Module, groups: list[list[Completion]]) -> float:
    """Largest difference between the answers' log-probabilities and those of the model."""
    plain = LlamaForCausalLM._from_config(model.config, attn_implementation="eager").eval()  # type: ignore[arg-type]
    plain.load_state_dict(model.state_dict())
    largest = 0.0
    for task, answers in zip(TASKS, groups, strict=True):
        for answer in answers:
            ids = torch.tensor([[*task.prompt_ids, *answer.token_ids]])
            logits = plain(ids).logits[0, len(task.prompt_ids) - 1 : -1] / SAMPLING.temperature
            own = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            largest = max(largest, float((own - torch.tensor(answer.logprobs)).abs().max()))
    return largest


@torch.no_grad()
def train(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def test_answers_come_from_the_weights_that_were_pushed_last(sampler: VllmSampler, model: nn.Module) -> None:
    sampler.take_weights(1)
    assert difference(model, sampler.generate(TASKS, 2, SAMPLING, KEY)) < 1e-4
    train(model)
    assert difference(model, sampler.generate(TASKS, 2, SAMPLING, KEY)) > 0.1
    sampler.take_weights(2)
    assert difference(model, sampler.generate(TASKS, 2, SAMPLING, KEY)) < 1e-4


def test_what_vllm_starts_from_is_written_on_every_rank(sampler: VllmSampler, tmp_path: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        sampler._save_model(tmp_path, Path("nowhere"))
    finally:
        dist.destroy_process_group()
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["LlamaForCausalLM"]
    assert (tmp_path / "tokenizer_config.json").is_file()


def test_arguments_that_posttrain_sets_are_those_that_the_config_refuses(sampler: VllmSampler, home: Path) -> None:
    settings = policy(str(home / "python"))
    generation = settings.generation.model_copy(update={"vllm_kwargs": {"disable_log_stats": False, "max_num_seqs": 4}})
    options = sampler._options(settings, generation)
    assert (options["disable_log_stats"], options["max_num_seqs"]) == (False, 4), "passed on as they are"
    plain = vllm_options(generation.vllm_cfg, {}, "float32")
    changed = {name for name, value in options.items() if plain.get(name) != value}
    assert changed - {"disable_log_stats", "max_num_seqs", "enforce_eager"} <= ARGUMENTS_OF_VLLM_IN_USE


def test_a_vllm_of_several_gpus_gets_all_of_them_and_starts_its_own_workers(
    sampler: VllmSampler, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    settings = policy(str(home / "python"))
    for size, gpus, executor in ((1, "5", None), (2, "5,6", "mp")):
        section = settings.generation.vllm_cfg.model_copy(update={"tensor_parallel_size": size})
        generation = settings.generation.model_copy(update={"vllm_cfg": section})
        assert _environment(settings, generation, 1)["CUDA_VISIBLE_DEVICES"] == gpus
        options = sampler._options(settings, generation)
        assert (options["tensor_parallel_size"], options.get("distributed_executor_backend")) == (size, executor)


def test_seeds_follow_from_seed_step_draw_and_sample(sampler: VllmSampler) -> None:
    sampler.take_weights(3)
    one = sampler.generate(TASKS, 2, SAMPLING, KEY)
    assert sampler.generate(TASKS, 2, SAMPLING, KEY) == one
    assert sampler.generate(TASKS[1:2], 2, SAMPLING, KEY)[0] == one[1]
    assert one[0][0].token_ids != one[0][1].token_ids
    assert sampler.generate(TASKS, 2, SAMPLING, NoiseKey(3, 2)) != one


def test_a_round_ends_at_its_quota_and_the_rest_continues(sampler: VllmSampler) -> None:
    sampler.take_weights(4)
    groups = [OpenGroup(task, 1, (Unfinished(), Unfinished())) for task in TASKS]
    after = sampler.sample_round(groups, SAMPLING, 3, Quota(1, 1, 1))
    again = sampler.sample_round(groups, SAMPLING, 3, Quota(1, 1, 1))
    assert after == again
    assert any(group.is_whole for group in after)
    rest = sampler.sample_round(after, SAMPLING, 3)
    assert all(group.is_whole for group in rest)
    for before, now in zip(after, rest, strict=True):
        for begun, whole in zip(before.answers, now.answers, strict=True):
            assert isinstance(whole, Completion)
            assert whole.token_ids[: len(begun.token_ids)] == tuple(begun.token_ids)
            assert len(whole.token_ids) == len(whole.logprobs) <= SAMPLING.max_new_tokens
            assert whole.text == TOKENIZER.decode(whole.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("fault", "said"),
    [("damage", "bucket 0 has another digest than the trainer's"), ("cache", "prefix cache of the earlier weights")],
)
def test_weights_that_did_not_arrive_are_refused_and_the_next_push_is_clean(
    sampler: VllmSampler, model: nn.Module, home: Path, fault: str, said: str
) -> None:
    (home / "fault").write_text(fault)
    with pytest.raises(VllmError, match=f"has not taken over the weights of version 5: .*{said}"):
        sampler.take_weights(5)
    assert sampler.version is None
    (home / "fault").unlink()
    sampler.take_weights(6)
    assert difference(model, sampler.generate(TASKS, 1, SAMPLING, KEY)) < 1e-4


def test_nothing_is_sampled_after_a_push_that_failed(sampler: VllmSampler, home: Path) -> None:
    (home / "fault").write_text("damage")
    with pytest.raises(VllmError, match="digest"):
        sampler.take_weights(7)
    (home / "fault").unlink()
    with pytest.raises(AssertionError, match="pushed before"):
        sampler.generate(TASKS, 1, SAMPLING, KEY)


def test_weights_in_shared_memory_go_when_the_trainer_is_killed(model: nn.Module, tmp_path: Path) -> None:
    """A rank under Ray is killed at the end of a run, and closes nothing."""
    sampler = VllmSampler(model, TOKENIZER, policy(vllm_pythons.stand_in(tmp_path / "env")), torch.device("cpu"))
    process = sampler.process
    process._end.detach()
    process._socket.close()
    process._process.hang_up()
    process._process.wait(60)
    assert not sampler._folder.exists()


def test_a_vllm_that_dies_while_sampling_is_named(sampler: VllmSampler, home: Path) -> None:
    """The last test of the file: the process is gone afterwards."""
    sampler.take_weights(8)
    (home / "fault").write_text("die")
    with pytest.raises(VllmError, match=r"ended during `generate`, signal 9 \(SIGKILL\)"):
        sampler.generate(TASKS, 1, SAMPLING, KEY)
