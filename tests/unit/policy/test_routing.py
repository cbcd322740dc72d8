"""The routers of mixtures of experts: replay of a recorded choice, balance, and biases that no gradient changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_ranks import batch_for
from tiny_models import byte_tokenizer, tiny_model
from torch import Tensor

from posttrain.algorithms.batches import with_routes
from posttrain.config import LossFnConfig, load_config
from posttrain.errors import InputError
from posttrain.models.attention_interface import attention_context
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.objectives import ClippedPolicyGradient
from posttrain.policy.packed import PackedRow
from posttrain.policy.routing import Routers, TrainedRouters
from posttrain.policy.trainer import PolicyTrainer, RankSetup
from posttrain.types import Completion, TokenBatch

CPU = torch.device("cpu")
FAMILIES = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3", "glm4-moe", "qwen3-next", "granite-hybrid")


def answers_of(batch: TokenBatch, routes: dict[int, Tensor], num_layers: int) -> list[Completion]:
    """With the choice of a pass over the packed row, by layer, as a sampler would have returned it."""
    row = PackedRow.build(batch, CPU)
    size = next(iter(routes.values())).shape[-1]
    chosen = torch.zeros(row.num_tokens, num_layers, size, dtype=torch.int16)  # vLLM's zeros for layers without experts
    for layer, own in routes.items():
        chosen[:, layer] = own.to(torch.int16)
    found, place = [], 0
    for index, response in enumerate(batch.responses):
        prompt = batch.prompts[batch.prompt_of[index]]
        start = row.prompt_starts[batch.prompt_of[index]]
        at = [*range(start, start + len(prompt)), *row.source[place + 1 : place + len(response)].tolist()]
        place += len(response)
        found.append(Completion(tuple(response.tolist()), (), "", "stop", routed_experts=chosen[at]))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_choice_is_replayed_for_every_token(family: str) -> None:
    torch.manual_seed(0)
    model, batch = tiny_model(family, vocab_size=260), batch_for("grpo")
    seen: dict[int, Tensor] = {}
    Routers(model, lambda layer, chosen: seen.update({layer: chosen.clone()}))
    routers = TrainedRouters(model, CPU)
    routers.check_replay(family)
    forward, row = TokenLogprobs(model, 64), PackedRow.build(batch, CPU)

    def pass_over(part: TokenBatch) -> Tensor:
        with attention_context(row.attention), routers.row(part, row, trains=True, replays=True), torch.no_grad():
            return forward(row, 1.0)

    own = pass_over(batch)
    assert routers.take().keys() == {"expert_load_max", "router_entropy"}
    num_layers, chosen = model.config.num_hidden_layers, dict(seen)
    assert torch.equal(pass_over(with_routes(batch, answers_of(batch, chosen, num_layers))), own)
    assert routers.take()["router_mismatch"] == 0.0
    # Every token goes to the experts of its neighbour; the trainer replays that.
    others = {layer: experts.roll(1, 0) for layer, experts in chosen.items()}
    assert not torch.equal(pass_over(with_routes(batch, answers_of(batch, others, num_layers))), own)
    assert {layer: experts.tolist() for layer, experts in seen.items()} == {
        layer: experts.tolist() for layer, experts in others.items()
    }
    assert 0.0 < routers.take()["router_mismatch"] <= 1.0


def test_the_busiest_expert_is_compared_with_the_mean() -> None:
    model, batch = tiny_model("qwen3-moe", vocab_size=260), batch_for("grpo")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # all experts alike: the first two are taken
    routers, row = TrainedRouters(model, CPU), PackedRow.build(batch, CPU)
    with attention_context(row.attention), routers.row(batch, row, trains=True, replays=True):
        TokenLogprobs(model, 64)(row, 1.0)
    found = routers.take()
    assert found["expert_load_max"] == pytest.approx(2.0)  # half of four experts get all
    assert found["router_entropy"] == pytest.approx(1.0)
    assert routers.take() == {}


@pytest.mark.parametrize(("family", "message"), [("llama", "the family llama: it has no experts")])
def test_replay_needs_routers(family: str, message: str) -> None:
    with pytest.raises(InputError, match=f"policy.router_replay.enabled = true: {message}"):
        TrainedRouters(tiny_model(family), CPU).check_replay(family)


def trainer_of(folder: Path, family: str) -> Any:
    model = tiny_model(family, vocab_size=260)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-1, 1, len(buffer)))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    words = [f"policy.model_name={folder}", f"policy.tokenizer.name={folder}", "policy.device=cpu"]
    words += ["policy.precision=float32", "policy.optimizer.kwargs={lr: 1e-2}", "data.default.env_name=math"]
    words += ["data.train={dataset_name: ResponseDataset, data_path: none.jsonl}"]
    return PolicyTrainer(RankSetup(load_config("grpo", None, words).config.policy, seed=0, needs_reference=False))


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe"])
def test_biases_of_routers_stay_as_they_are(family: str, tmp_path: Path) -> None:
    rank = trainer_of(tmp_path / "model", family)
    bias = {name: b.clone() for name, b in rank.model.named_buffers() if name.endswith("e_score_correction_bias")}
    assert bias
    gates = {name: p.clone() for name, p in rank.model.named_parameters() if name.endswith("gate.weight")}
    batch = batch_for("grpo")
    zeros = torch.zeros(len(batch.columns["mask"]))
    batch = batch.with_columns(prev_logprobs=zeros, generation_logprobs=zeros)
    objective = ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.0))
    rank.update([batch], objective, seed=1)
    after, parameters = dict(rank.model.named_buffers()), dict(rank.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in bias.items())
    assert all(not torch.equal(parameters[name], value) for name, value in gates.items()), "routers are trained"
    rank.checkpoints.save(tmp_path / "step_1", optimizer=False)
    saved = type(rank.model).from_pretrained(tmp_path / "step_1" / "policy" / "weights" / "model")
    assert all(torch.equal(dict(saved.named_buffers())[name], value) for name, value in bias.items())
