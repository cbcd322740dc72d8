"""Each preset against the system that it is named after: advantages, loss and gradient of one fixed step.

The formulas of the peers are written here once more, slowly, a token at a time in float64, from what their code does;
posttrain's side is what `preset=NAME` builds. For the TRL presets see also `test_trl_presets_equal_trl.py`, where TRL's
own trainers take the place of the formulas.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from float64 import TOLERANCE, approx
from torch import Tensor

from posttrain.algorithms.batches import rollout_batch, scored_places
from posttrain.config import GrpoRunConfig, load_config
from posttrain.config.loader import presets
from posttrain.recipes.grpo import build_credit, build_objective
from posttrain.types import Completion, Group, Rollout, Score, Task

LENGTHS = [[3, 1, 5, 2], [2, 6, 4, 1], [1, 3, 2, 2]]
REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 1.0], [0.3, 0.3, 0.3, 0.3]]
MAX_NEW_TOKENS = 8
pytestmark = pytest.mark.usefixtures("in_float64", "no_epsilon")

PerToken = list[list[list[float]]]  # group, rollout, token
Rewards = list[list[float]]


@dataclass
class Step:
    """What a peer would have in hand before its update: rewards, and the log-probabilities of every token."""

    rewards: Rewards
    old: PerToken
    reference: PerToken
    sampler: PerToken
    current: PerToken

    @property
    def num_answers(self) -> int:
        return sum(map(len, self.rewards))

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for group in self.current for tokens in group)


def random_step(rewards: Rewards = REWARDS, lengths: Sequence[Sequence[int]] = LENGTHS, seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def near(centre: PerToken | None, distance: float) -> PerToken:
        def value(g: int, r: int, t: int) -> float:
            noise = distance * float(torch.randn((), generator=generator))
            return (-2.0 if centre is None else centre[g][r][t]) + noise

        return [[[value(g, r, t) for t in range(n)] for r, n in enumerate(own)] for g, own in enumerate(lengths)]

    current = near(None, 0.7)
    old = near(current, 0.4)
    return Step(rewards, old, near(current, 0.5), near(old, 0.3), current)


# -- advantages, as each peer computes them ----------------------------------------------------------------------------


def flat_over_tokens(step: Step, of_answers: list[list[float]]) -> PerToken:
    return [
        [[a] * len(tokens) for a, tokens in zip(*pair, strict=True)] for pair in zip(of_answers, step.old, strict=True)
    ]


def group_normalised(epsilon: float) -> Callable[[Step], PerToken]:
    def advantages(step: Step) -> PerToken:
        found = []
        for rewards in step.rewards:
            mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
            found.append([(reward - mean) / (deviation + epsilon) for reward in rewards])
        return flat_over_tokens(step, found)

    return advantages


def centred(step: Step) -> PerToken:
    return flat_over_tokens(step, [[r - statistics.fmean(rewards) for r in rewards] for rewards in step.rewards])


def nemo(step: Step) -> PerToken:
    found = []
    for rewards in step.rewards:
        own = []
        for i, reward in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1 :]
            baseline, deviation = statistics.fmean(others), statistics.stdev(others)
            own.append((reward - baseline) / (deviation + 1e-6) if deviation > 0 else reward - baseline)
        found.append(own)
    return flat_over_tokens(step, found)


def k1(step: Step, bound: float = math.inf) -> PerToken:
    """KL of the policy before the step to the reference, token by token."""
    return [
        [[min(max(o - r, -bound), bound) for o, r in zip(*tokens, strict=True)] for tokens in zip(*pair, strict=True)]
        for pair in zip(step.old, step.reference, strict=True)
    ]


def trl_rloo(step: Step) -> PerToken:
    found = []
    for rewards, kl in zip(step.rewards, k1(step), strict=True):
        charged = [reward - 0.05 * sum(tokens) for reward, tokens in zip(rewards, kl, strict=True)]
        found.append([r - (sum(charged) - r) / (len(charged) - 1) for r in charged])
    return flat_over_tokens(step, found)


def returns(rewards: Rewards, kl: PerToken, coefficient: float) -> PerToken:
    """The reward at the last token, minus the KL at every one, summed from each token to the end (gamma 1)."""
    found: PerToken = []
    for group, of_group in zip(rewards, kl, strict=True):
        found.append([])
        for reward, tokens in zip(group, of_group, strict=True):
            earned = [-coefficient * token for token in tokens]
            earned[-1] += reward
            found[-1].append([sum(earned[t:]) for t in range(len(earned))])
    return found


def whitened(values: PerToken, ddof: int, divisor: Callable[[float], float]) -> PerToken:
    flat = [v for group in values for tokens in group for v in tokens]
    mean = statistics.fmean(flat)
    by = divisor(sum((v - mean) ** 2 for v in flat) / (len(flat) - ddof))
    return [[[(v - mean) / by for v in tokens] for tokens in group] for group in values]


def openrlhf_floor(variance: float) -> float:
    return math.sqrt(max(variance, 1e-8))


def openrlhf_rfpp(step: Step) -> PerToken:
    return whitened(returns(step.rewards, k1(step, 10.0), 0.01), 0, openrlhf_floor)


def openrlhf_rfpp_baseline(step: Step) -> PerToken:
    less_mean = [[r - statistics.fmean(rewards) for r in rewards] for rewards in step.rewards]
    return whitened(returns(less_mean, k1(step, 10.0), 0.01), 0, openrlhf_floor)


def openrlhf_grpo(step: Step) -> PerToken:
    normal = []
    for rewards in step.rewards:
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        normal.append([(reward - mean) / (deviation + 1e-9) for reward in rewards])
    return returns(normal, k1(step, 10.0), 0.01)


def verl_rfpp(step: Step) -> PerToken:
    nothing = [[[0.0] * len(tokens) for tokens in group] for group in step.old]
    return whitened(returns(step.rewards, nothing, 0.0), 1, lambda variance: math.sqrt(variance + 1e-8))


def verl_dapo(step: Step) -> PerToken:
    """The soft penalty for long answers is in the reward that is normalised: 8 tokens at most, the last 4 cost."""
    rewards = [
        [r + min(-(len(tokens) - (8 - 4)) / 4 * 1.0, 0.0) for r, tokens in zip(*pair, strict=True)]
        for pair in zip(step.rewards, step.old, strict=True)
    ]
    return group_normalised(1e-6)(Step(rewards, step.old, step.reference, step.sampler, step.current))


# -- losses, as each peer computes them --------------------------------------------------------------------------------

TokenLoss = Callable[[Tensor, float, float, float, float], Tensor]  # current, old, reference, sampler, advantage


def exp(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).exp()


def clamp(value: Tensor, low: float, high: float) -> Tensor:
    """No gradient outside the bounds."""
    if low <= float(value.detach()) <= high:
        return value
    return torch.tensor(low if float(value.detach()) < low else high, dtype=torch.float64)


def clipped(low: float, high: float, dual: float | None = None, log_bound: float = math.inf) -> TokenLoss:
    def loss(current: Tensor, old: float, reference: float, sampler: float, advantage: float) -> Tensor:
        ratio = clamp(current - old, -log_bound, log_bound).exp()
        inner = torch.minimum(ratio * advantage, clamp(ratio, 1 - low, 1 + high) * advantage)
        if dual is not None and advantage < 0:
            inner = torch.maximum(inner, torch.tensor(dual * advantage, dtype=torch.float64))
        return -inner

    return loss


def k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1 - log_ratio


def plus(first: TokenLoss, second: TokenLoss) -> TokenLoss:
    return lambda *arguments: first(*arguments) + second(*arguments)


def kl_of_verl(current: Tensor, old: float, reference: float, sampler: float, advantage: float) -> Tensor:
    return 0.001 * clamp(k3(clamp(reference - current, -20, 20)), -10, 10)


def kl_of_open_instruct(current: Tensor, old: float, reference: float, sampler: float, advantage: float) -> Tensor:
    return 0.05 * k3(clamp(reference - current, -40, 40))


def kl_of_nemo(current: Tensor, old: float, reference: float, sampler: float, advantage: float) -> Tensor:
    kl = k3(clamp(reference - current, -20, 20)) * (current - current.detach()).exp()
    return 0.01 * clamp(kl, -10, 10)


def open_instruct_actor(current: Tensor, old: float, reference: float, sampler: float, advantage: float) -> Tensor:
    weight = min(math.exp(old - sampler), 2.0)
    return weight * clipped(0.2, 0.272)(current, old, reference, sampler, advantage)


def cispo(current: Tensor, old: float, reference: float, sampler: float, advantage: float) -> Tensor:
    return -min(float(exp(current.detach() - old)), 5.0) * advantage * current


def sapo(current: Tensor, old: float, reference: float, sampler: float, advantage: float) -> Tensor:
    steepness = 1.0 if advantage > 0 else 1.05
    return -advantage * 4 / steepness / (1 + (-steepness * (exp(current - old) - 1)).exp())


def dppo(form: str, bound: float) -> TokenLoss:
    def loss(current: Tensor, old: float, reference: float, sampler: float, advantage: float) -> Tensor:
        now, before = float(exp(current.detach())), math.exp(old)
        if form == "tv":
            keeps = now - before <= bound if advantage > 0 else now - before >= -bound
        else:
            kl = before * math.log(before / now) + (1 - before) * math.log((1 - before) / (1 - now))
            keeps = kl <= bound or (now <= before if advantage > 0 else now >= before)
        return -advantage * min(now / before, 1e4) * current * float(keeps)

    return loss


Rows = list[list[Tensor]]  # answer, token


def per_token(rows: Rows) -> Tensor:
    return sum((term for row in rows for term in row), torch.zeros((), dtype=torch.float64)) / sum(map(len, rows))


def per_answer(rows: Rows) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return sum((sum(row, zero) / len(row) for row in rows), zero) / len(rows)


def constant_length(rows: Rows) -> Tensor:
    return (
        sum((term for row in rows for term in row), torch.zeros((), dtype=torch.float64)) / len(rows) / MAX_NEW_TOKENS
    )


def over_tokens(loss: TokenLoss, reduce: Callable[[Rows], Tensor]) -> Callable[[Step, PerToken, Rows], Tensor]:
    def whole(step: Step, advantages: PerToken, current: Rows) -> Tensor:
        columns = [
            [tokens for g in column for tokens in g] for column in (step.old, step.reference, step.sampler, advantages)
        ]
        rows = [
            [loss(*token) for token in zip(now, *rest, strict=True)]
            for now, *rest in zip(current, *columns, strict=True)
        ]
        return reduce(rows)

    return whole


def of_whole_answers(low: float, high: float, *, product: bool) -> Callable[[Step, PerToken, Rows], Tensor]:
    """One ratio for an answer: of its tokens' geometric mean (GSPO) or of its probability (RLOO)."""

    def whole(step: Step, advantages: PerToken, current: Rows) -> Tensor:
        olds = [tokens for group in step.old for tokens in group]
        credits = [tokens[0] for group in advantages for tokens in group]
        total = torch.zeros((), dtype=torch.float64)
        for now, old, advantage in zip(current, olds, credits, strict=True):
            log_ratio = sum((c - o for c, o in zip(now, old, strict=True)), torch.zeros((), dtype=torch.float64))
            ratio = (log_ratio if product else log_ratio / len(now)).exp()
            total = total - torch.minimum(ratio * advantage, clamp(ratio, 1 - low, 1 + high) * advantage)
        return total / len(current)

    return whole


def gmpo(step: Step, advantages: PerToken, current: Rows) -> Tensor:
    """The geometric mean of an answer's ratios, each clipped at exp(±0.4) on the side where that is the worse one."""
    olds = [tokens for group in step.old for tokens in group]
    credits = [tokens[0] for group in advantages for tokens in group]
    total = torch.zeros((), dtype=torch.float64)
    for now, old, advantage in zip(current, olds, credits, strict=True):
        terms = []
        for c, o in zip(now, old, strict=True):
            beyond = float(c.detach()) - o > 0.4 if advantage > 0 else float(c.detach()) - o < -0.4
            terms.append(torch.tensor(math.copysign(0.4, advantage)) if beyond else c - o)
        total = total - advantage * (sum(terms, torch.zeros(())) / len(terms)).exp()
    return total / len(current)


@dataclass(frozen=True)
class Peer:
    advantages: Callable[[Step], PerToken]
    loss: Callable[[Step, PerToken, Rows], Tensor]


PLAIN, VERL = clipped(0.2, 0.2), clipped(0.2, 0.2, 3.0, 20.0)
OPENRLHF = clipped(0.2, 0.2, None, 20.0)
PEERS = {
    "nemo-grpo": Peer(nemo, over_tokens(plus(PLAIN, kl_of_nemo), per_token)),
    "trl-grpo": Peer(group_normalised(1e-4), over_tokens(PLAIN, per_answer)),
    "trl-dapo": Peer(group_normalised(1e-4), over_tokens(PLAIN, per_token)),
    "trl-bnpo": Peer(group_normalised(1e-4), over_tokens(PLAIN, per_token)),
    "trl-dr_grpo": Peer(centred, over_tokens(PLAIN, constant_length)),
    "trl-gspo": Peer(group_normalised(1e-4), of_whole_answers(0.2, 0.2, product=False)),
    "trl-cispo": Peer(group_normalised(1e-4), over_tokens(cispo, per_token)),
    "trl-sapo": Peer(group_normalised(1e-4), over_tokens(sapo, per_answer)),
    "trl-gmpo": Peer(group_normalised(1e-4), gmpo),
    "trl-rloo": Peer(trl_rloo, of_whole_answers(0.2, 0.2, product=True)),
    "verl-grpo": Peer(group_normalised(1e-6), over_tokens(plus(VERL, kl_of_verl), per_token)),
    "verl-dapo": Peer(verl_dapo, over_tokens(clipped(0.2, 0.28, 10.0, 20.0), per_token)),
    "verl-rfpp": Peer(verl_rfpp, over_tokens(VERL, per_token)),
    "verl-dppo": Peer(centred, over_tokens(dppo("tv", 0.15), constant_length)),
    "openrlhf-rfpp": Peer(openrlhf_rfpp, over_tokens(OPENRLHF, per_token)),
    "openrlhf-rfpp-baseline": Peer(openrlhf_rfpp_baseline, over_tokens(OPENRLHF, per_token)),
    "openrlhf-grpo": Peer(openrlhf_grpo, over_tokens(OPENRLHF, per_token)),
    "slime-grpo": Peer(group_normalised(1e-6), over_tokens(PLAIN, per_answer)),
    "open_instruct-grpo": Peer(centred, over_tokens(plus(open_instruct_actor, kl_of_open_instruct), per_token)),
}


# -- posttrain's side --------------------------------------------------------------------------------------------------


@cache
def configured(name: str, overrides: tuple[str, ...]) -> GrpoRunConfig:
    sizes = ["policy.generation.max_new_tokens=8", "grpo.reward_shaping.overlong_buffer_length=4"]
    return load_config("grpo", None, [f"preset={name}", *sizes, *overrides]).config


def posttrain(step: Step, name: str, *overrides: str) -> tuple[list[float], float, Tensor]:
    """Advantages of all tokens in order, the loss, and its gradient with respect to the current log-probabilities."""
    config = configured(name, overrides)
    groups = [
        Group(
            Task(g, f"s:{g}", "p", (1,)),
            tuple(
                Rollout(Completion(tuple(range(len(tokens))), tuple(tokens), "", "stop"), Score(reward))
                for reward, tokens in zip(rewards, sampler, strict=True)
            ),
        )
        for g, (rewards, sampler) in enumerate(zip(step.rewards, step.sampler, strict=True))
    ]

    def column(values: PerToken) -> Tensor:
        return torch.tensor([v for group in values for tokens in group for v in tokens])

    batch = rollout_batch(groups).with_columns(
        current_logprobs=column(step.old), prev_logprobs=column(step.old), reference_logprobs=column(step.reference)
    )
    _, batch, _ = build_credit(config)(groups, batch, scored_places(groups))
    current = column(step.current).requires_grad_()
    loss, _ = build_objective(config)(current, batch)
    (gradient,) = torch.autograd.grad(loss, current)
    return batch.columns["advantages"].tolist(), float(loss.detach()), gradient


def by_formula(step: Step, peer: Peer) -> tuple[list[float], float, Tensor]:
    advantages = peer.advantages(step)
    tokens = [
        [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in row] for g in step.current for row in g
    ]
    loss = peer.loss(step, advantages, tokens)
    gradients = torch.autograd.grad(loss, [t for row in tokens for t in row], allow_unused=True)
    flat = [a for group in advantages for row in group for a in row]
    return (
        flat,
        float(loss.detach()),
        torch.stack([torch.zeros((), dtype=torch.float64) if g is None else g for g in gradients]),
    )


def test_every_preset_has_its_formula() -> None:
    assert {preset.name for preset in presets("grpo")} == set(PEERS)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PEERS)
def test_advantages_loss_and_gradient_equal_the_peers_formula(name: str, seed: int) -> None:
    step = random_step(seed=seed)
    advantages, loss, gradient = posttrain(step, name)
    expected_advantages, expected_loss, expected_gradient = by_formula(step, PEERS[name])
    assert advantages == approx(expected_advantages)
    assert loss == approx(expected_loss)
    torch.testing.assert_close(gradient, expected_gradient, rtol=TOLERANCE, atol=TOLERANCE)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("trust_region", ["tv", "kl"])
def test_dppo_masks_tokens_that_moved_too_far_in_their_direction(trust_region: str) -> None:
    step = random_step(rewards=[[1.0, 0.0, 0.3]], lengths=[[4, 4, 4]])
    for answer in range(3):
        step.old[0][answer] = [math.log(p) for p in (0.5, 0.5, 0.5, 0.01)]
        step.current[0][answer] = [math.log(p) for p in (0.9, 0.1, 0.52, 0.05)]
    overrides = [f"loss_fn.trust_region={trust_region}", "loss_fn.ratio_clip_min=0.15", "loss_fn.ratio_clip_max=0.15"]
    _, loss, gradient = posttrain(step, "verl-dppo", *overrides)
    peer = Peer(centred, over_tokens(dppo(trust_region, 0.15), constant_length))
    _, expected_loss, expected_gradient = by_formula(step, peer)
    assert loss == approx(expected_loss)
    torch.testing.assert_close(gradient, expected_gradient, rtol=TOLERANCE, atol=TOLERANCE)
    # Of the rewarded answer the first token is masked, of the others the second. A ratio of 5 on a rare token is not.
    assert [(gradient == 0).tolist()[i : i + 4] for i in (0, 4, 8)] == [
        [True, False, False, False], [False, True, False, False], [False, True, False, False]
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["verl-grpo", "verl-dapo"])
def test_verl_advantage_of_a_group_of_one_is_its_reward(name: str) -> None:
    step = random_step(rewards=[[1.0, 0.0], [0.7]], lengths=[[2, 3], [2]])
    advantages, _, _ = posttrain(step, name)
    assert advantages[-2:] == approx([0.7 / (1 + 1e-6)] * 2)
    assert posttrain(step, "trl-grpo")[0][-2:] == [0.0, 0.0]


def test_the_formulas_differ_from_each_other() -> None:
    """Guards the comparison: a preset that were laid over nothing would still equal one of them."""
    step = random_step()
    results = {name: by_formula(step, peer)[1] for name, peer in PEERS.items()}
    results.pop("trl-bnpo")  # the same as trl-dapo for a whole optimizer batch
    assert len({round(loss, 7) for loss in results.values()}) == len(results)


def test_user_settings_override_the_preset() -> None:
    step = random_step()
    wide = posttrain(step, "trl-dapo", "loss_fn.ratio_clip_max=5", "loss_fn.ratio_clip_min=1")
    peer = Peer(group_normalised(1e-4), over_tokens(clipped(1.0, 5.0), per_token))
    assert wide[1] == approx(by_formula(step, peer)[1])
    assert wide[1] != pytest.approx(posttrain(step, "trl-dapo")[1], rel=1e-3)
