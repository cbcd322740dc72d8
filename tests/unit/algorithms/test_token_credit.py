"""PPO's advantages and the loss of its critic against their formulas, written out token by token in float64."""

import math

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor, nn

from posttrain.algorithms.advantages import NoBaseline, Spread, Whitening
from posttrain.algorithms.credit import Credit, KlInReward, TokenCredit
from posttrain.config import LossFnConfig
from posttrain.models.attention_interface import attention_context
from posttrain.policy.objectives import ClippedPolicyGradient, ValueLoss
from posttrain.policy.objectives.clipped import EPS
from posttrain.policy.packed import PackedRow
from posttrain.policy.reward_head import TokenValues
from posttrain.types import Completion, Group, Rollout, Score, Task, TokenBatch

REWARDS = [1.0, -0.5, 0.25, 2.0]
# One answer has tokens of the environment in it, one is masked as a whole.
MASKS = [[1, 1, 1], [1, 0, 0, 1, 1, 0], [0, 0], [1]]
PLACES = [(0, 0), (0, 1), (1, 0), (1, 2)]  # rollout 1 of the second group is not scored


def rollout(reward: float | None, length: int) -> Rollout:
    score = Score(reward) if reward is not None else Score(None, error="no answer of the judge")
    return Rollout(Completion((1,) * length, (-1.0,) * length, "", "stop"), score)


def groups() -> list[Group]:
    task = Task(0, "data:0", "", (1, 2))
    return [
        Group(task, (rollout(REWARDS[0], 3), rollout(REWARDS[1], 6))),
        Group(task, (rollout(REWARDS[2], 2), rollout(None, 4), rollout(REWARDS[3], 1))),
    ]


def batch() -> TokenBatch:
    mask = torch.tensor([float(m) for row in MASKS for m in row])
    chance = torch.Generator().manual_seed(3)
    columns = {
        "mask": mask,
        "reference_logprobs": -torch.rand(len(mask), generator=chance),
        "current_logprobs": -torch.rand(len(mask), generator=chance),
    }
    return TokenBatch.build([[1, 2], [3, 4]], [[5] * len(row) for row in MASKS], [0, 0, 1, 1], columns)


VALUES = [torch.randn(len(row), generator=torch.Generator().manual_seed(len(row))).tolist() for row in MASKS]


def credit(**options: object) -> TokenCredit:
    values = torch.tensor([value for row in VALUES for value in row])
    return TokenCredit(NoBaseline(), values=lambda batch: values, **options)  # type: ignore[arg-type]


def slow_advantages(penalty: float, kl: list[float], gamma: float, lam: float) -> list[list[float]]:
    """The sum of discounted errors, term by term: sum over l of (gamma lam)^l d_(t+l)."""
    found, at = [], 0
    for row, mask in enumerate(MASKS):
        steps = [i for i, trained in enumerate(mask) if trained]
        own = [0.0] * len(mask)
        for t, place in enumerate(steps):
            for later in range(t, len(steps)):
                is_last = later == len(steps) - 1
                reward = (REWARDS[row] if is_last else 0.0) - penalty * kl[at + steps[later]]
                following = 0.0 if is_last else VALUES[row][steps[later + 1]]
                error = reward + gamma * following - VALUES[row][steps[later]]
                own[place] += (gamma * lam) ** (later - t) * error
        found.append(own)
        at += len(mask)
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_advantages_are_the_sums_of_discounted_errors(gamma: float, lam: float, penalty: float) -> None:
    rows = batch()
    kl = KlInReward(penalty, "token") if penalty else None
    _, credited, metrics = credit(gamma=gamma, lam=lam, kl=kl)(groups(), rows, PLACES)
    of_tokens = kl.of_tokens(rows).tolist() if kl else [0.0] * 12
    expected = [a for row in slow_advantages(penalty, of_tokens, gamma, lam) for a in row]
    assert credited.columns["advantages"].tolist() == pytest.approx(expected, abs=1e-6)
    returns = [a + v for a, v in zip(expected, [v for row in VALUES for v in row], strict=True)]
    assert credited.columns["returns"].tolist() == pytest.approx(returns, abs=1e-6)
    assert ("kl_penalty" in metrics) == bool(penalty)
    assert metrics["value_explained_variance"] <= 1


def verl_step(kl: list[float], penalty: float, gamma: float, lam: float) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, returns and mask as verl's PPO has them: padded rows, and one loop from the last token to the first
    that carries values and advantages over what is masked. Advantages are whitened with the unbiased variance.
    """
    longest = max(map(len, MASKS))
    rewards, values, mask = (torch.zeros(len(MASKS), longest, dtype=torch.float64) for _ in range(3))
    charges = torch.tensor(kl, dtype=torch.float64).split([len(row) for row in MASKS])
    for row, trained in enumerate(MASKS):
        mask[row, : len(trained)] = torch.tensor(trained, dtype=torch.float64)
        values[row, : len(trained)] = torch.tensor(VALUES[row], dtype=torch.float64)
        rewards[row, : len(trained)] = -penalty * charges[row] * mask[row, : len(trained)]
        if any(trained):
            rewards[row, max(i for i, m in enumerate(trained) if m)] += REWARDS[row]
    following, carried, found = (torch.zeros(len(MASKS), dtype=torch.float64) for _ in range(3))
    columns = []
    for t in reversed(range(longest)):
        found = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * carried
        is_step = mask[:, t] != 0
        following, carried = torch.where(is_step, values[:, t], following), torch.where(is_step, found, carried)
        columns.append(found)
    raw = torch.stack(columns[::-1], dim=1)
    mean = (raw * mask).sum() / mask.sum()
    variance = ((raw - mean).square() * mask).sum() / (mask.sum() - 1)
    return (raw - mean) * torch.rsqrt(variance + 1e-8), raw + values, mask


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("gamma", "lam", "penalty"), [(1.0, 0.95, 0.0), (0.9, 0.8, 0.3)])
def test_advantages_and_returns_equal_verls(gamma: float, lam: float, penalty: float) -> None:
    rows = batch()
    kl = KlInReward(penalty, "token") if penalty else None
    whitening = Whitening("tokens", Spread(1, 1e-8, "variance_plus"))
    _, credited, _ = credit(gamma=gamma, lam=lam, kl=kl, whitening=whitening)(groups(), rows, PLACES)
    of_tokens = kl.of_tokens(rows).tolist() if kl else [0.0] * 12
    advantages, returns, mask = verl_step(of_tokens, penalty, gamma, lam)
    trained = credited.columns["mask"] != 0
    for name, expected in (("advantages", advantages), ("returns", returns)):
        ours = credited.columns[name][trained]
        torch.testing.assert_close(ours, expected[mask != 0], rtol=1e-12, atol=1e-12)


def trl_step(
    logprobs: Tensor, references: Tensor, values: Tensor, scores: Tensor, gamma: float, lam: float, penalty: float
) -> tuple[Tensor, Tensor]:
    """Whitened advantages and returns as TRL's PPO trainer has them (`trl.experimental.ppo` of 1.0), for answers of the
    greatest length. The score of a shorter one is one place after its last token there, on a value of its own.
    """
    rewards = -penalty * (logprobs - references)
    rewards[:, -1] += scores
    carried, columns = torch.zeros(len(scores), dtype=torch.float64), []
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1] if t < values.shape[1] - 1 else 0.0
        carried = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * carried
        columns.append(carried)
    raw = torch.stack(columns[::-1], dim=1)
    variance = (raw - raw.mean()).square().mean() * raw.numel() / (raw.numel() - 1)
    return (raw - raw.mean()) * torch.rsqrt(variance + 1e-8), raw + values


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("gamma", "lam", "penalty"), [(1.0, 0.95, 0.05), (0.9, 0.8, 0.3)])
def test_a_step_equals_trls(gamma: float, lam: float, penalty: float) -> None:
    chance = torch.Generator().manual_seed(4)
    logprobs, references, values, updated = (torch.randn(4, 6, generator=chance, dtype=torch.float64) for _ in range(4))
    scores = torch.randn(4, generator=chance, dtype=torch.float64)
    columns = {
        "mask": torch.ones(24),
        "reference_logprobs": references.flatten(),
        "current_logprobs": logprobs.flatten(),
    }
    rows = TokenBatch.build([[1, 2]], [[5] * 6] * 4, [0] * 4, columns)
    kl = KlInReward(penalty, "token", "k1")
    own = TokenCredit(
        NoBaseline(),
        values=lambda batch: values.flatten(),
        gamma=gamma,
        lam=lam,
        kl=kl,
        whitening=Whitening("tokens", Spread(1, 1e-8, "variance_plus")),
    )
    group = Group(Task(0, "data:0", "", (1, 2)), tuple(rollout(float(score), 6) for score in scores))
    _, credited, _ = own([group], rows, [(0, row) for row in range(4)])
    advantages, returns = trl_step(logprobs, references, values, scores, gamma, lam, penalty)
    for name, expected in (("advantages", advantages), ("returns", returns)):
        torch.testing.assert_close(credited.columns[name], expected.flatten(), rtol=1e-12, atol=1e-12)
    clipped = torch.clamp(updated, values - 0.2, values + 0.2)
    errors = torch.max((updated - returns).square(), (clipped - returns).square())
    loss, _ = ValueLoss(0.7, 0.2)(updated.flatten(), credited)
    torch.testing.assert_close(loss, 0.7 * 0.5 * errors.mean(), rtol=1e-7, atol=0)  # EPS is in the denominator


def test_with_lambda_1_a_return_is_what_is_left_of_the_reward() -> None:
    _, credited, _ = credit(lam=1.0)(groups(), batch(), PLACES)
    trained = credited.columns["mask"] != 0
    wanted = torch.tensor([reward for reward, row in zip(REWARDS, MASKS, strict=True) for _ in row])
    torch.testing.assert_close(credited.columns["returns"][trained], wanted[trained])


def test_whitening_is_over_trained_tokens_and_leaves_returns_alone() -> None:
    plain, white = (
        credit(whitening=whitening)(groups(), batch(), PLACES)[1].columns
        for whitening in (None, Whitening("tokens", Spread(1, 1e-8, "variance_plus")))
    )
    trained = plain["mask"] != 0
    values = plain["advantages"][trained].double()
    expected = (values - values.mean()) / (values.var() + 1e-8).sqrt()
    torch.testing.assert_close(white["advantages"][trained].double(), expected, rtol=1e-5, atol=1e-6)
    assert not white["advantages"][~trained].any()
    torch.testing.assert_close(white["returns"], plain["returns"])


def test_a_critic_that_knows_nothing_and_lambda_1_make_it_the_reward() -> None:
    """REINFORCE: the same advantages as without baseline."""
    _, ours, _ = TokenCredit(NoBaseline(), lam=1.0)(groups(), batch(), PLACES)
    _, plain, _ = Credit(NoBaseline())(groups(), batch(), PLACES)
    torch.testing.assert_close(ours.columns["advantages"], plain.columns["advantages"] * plain.columns["mask"])


def test_a_step_without_scored_rollouts_has_no_advantages() -> None:
    unscored = [Group(groups()[0].task, (rollout(None, 3),))]
    empty = TokenBatch.build([], [], [], {"mask": torch.zeros(0)})
    found, credited, metrics = TokenCredit(NoBaseline())(unscored, empty, [])
    assert found[0].rollouts[0].advantage == 0
    assert not len(credited.columns["advantages"])
    assert not metrics


def test_rows_that_only_the_critic_learns_from_are_kept() -> None:
    columns = {
        "mask": torch.ones(4),
        "advantages": torch.zeros(4),
        "values": torch.tensor([1.0, 1.0, 0.0, 0.0]),
        "returns": torch.tensor([1.0, 1.0, 0.0, 0.5]),
    }
    rows = TokenBatch.build([[1]], [[2, 3], [4, 5]], [0, 0], columns)
    kept = ClippedPolicyGradient(LossFnConfig(reference_policy_kl_penalty=0.0)).with_gradient(rows)
    assert [len(response) for response in kept.responses] == [2]
    assert kept.columns["returns"].tolist() == [0.0, 0.5]


# -- the critic --------------------------------------------------------------------------------------------------------


def slow_value_loss(values: list[float], rows: TokenBatch, scale: float, cliprange: float | None) -> float:
    sums, columns = 0.0, rows.columns
    before, returns, mask = (columns[name].tolist() for name in ("values", "returns", "mask"))
    for value, old, wanted, counts in zip(values, before, returns, mask, strict=True):
        error = (value - wanted) ** 2
        if cliprange is not None:
            error = max(error, (min(max(value, old - cliprange), old + cliprange) - wanted) ** 2)
        sums += counts * error
    return scale * 0.5 * sums / (sum(mask) + EPS)


def value_batch() -> TokenBatch:
    chance = torch.Generator().manual_seed(8)
    lengths = (5, 2, 6)
    ids = [torch.randint(3, VOCAB_SIZE, (n,), generator=chance).tolist() for n in (4, 3, *lengths)]
    mask = torch.ones(sum(lengths))
    mask[6] = 0
    columns = {
        "mask": mask,
        "values": torch.randn(len(mask), generator=chance),
        "returns": torch.randn(len(mask), generator=chance),
    }
    return TokenBatch.build(ids[:2], ids[2:], [0, 0, 1], columns)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("cliprange", [None, 0.2])
def test_the_loss_of_values_is_its_formula_whatever_the_micro_batches(cliprange: float | None) -> None:
    rows = value_batch()
    chance = torch.Generator().manual_seed(9)
    values = rows.columns["values"] + 0.4 * torch.randn(13, generator=chance)
    objective = ValueLoss(0.7, cliprange)
    loss, metrics = objective(values, rows)
    assert float(loss) == pytest.approx(slow_value_loss(values.tolist(), rows, 0.7, cliprange), rel=1e-12)
    assert (float(metrics["value_clip_fraction"]) > 0) == (cliprange is not None)
    parts = [objective(own, rows.select([row]))[0] for row, own in enumerate(values.split(rows.response_lengths))]
    assert math.fsum(float(part) for part in parts) == pytest.approx(float(loss), rel=1e-12)


@pytest.mark.usefixtures("in_float64")
def test_packed_values_are_of_the_state_before_each_token() -> None:
    rows = value_batch()

    def critic(attention: str) -> nn.Module:
        model = tiny_model(dtype=torch.float64, attention=attention)
        model.score = nn.Linear(model.config.hidden_size, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.score.weight.copy_(torch.linspace(-1, 1, model.config.hidden_size)[None])
        return model

    row = PackedRow.build(rows, torch.device("cpu"), reads_own_token=TokenValues.reads_own_token)
    with attention_context(row.attention), torch.no_grad():
        packed = TokenValues(critic("posttrain"))(row)
    alone = critic("eager")
    expected: list[Tensor] = []
    for prompt, response in zip(rows.prompt_of, rows.responses, strict=True):
        for place in range(len(response)):
            before = torch.cat([rows.prompts[prompt], response[:place]])[None]
            state = alone.model(before).last_hidden_state[0, -1]
            expected.append(alone.score(state)[0].detach())
    torch.testing.assert_close(packed, torch.stack(expected), rtol=1e-10, atol=1e-12)
