"""The losses as their definitions read: one token at a time, in float64, with Python's `if` where a formula has cases.

Written from the formulas, not from the code under test, and slow on purpose. Every token is a float64 scalar, so that
autograd gives the gradient of exactly what is written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.types import TokenBatch

DEFAULTS: Mapping[str, object] = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
    "token_level_loss": True,
    "disable_ppo_ratio": False,
    "use_cispo": False,
    "sequence_ratio_type": "geometric_mean",
    "loss_normalizer": None,
    "max_response_tokens": None,
    "ratio_ceiling": None,
    "log_ratio_clamp_value": None,
    "kl_importance_weight": None,
    "positive_example_nll_weight": 0.0,
}


@dataclass
class Case:
    """Responses with everything a loss may ask for: one number per token, one list per response."""

    current: list[list[float]]
    mask: list[list[float]]
    advantages: list[float]
    previous: list[list[float]] | None
    sampler: list[list[float]]
    reference: list[list[float]]
    is_rewarded: list[bool] = field(default_factory=list)  # of responses; empty: none is
    num_tokens: float = field(init=False)
    num_sequences: float = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum(sum(m) for m in self.mask)
        self.num_sequences = float(sum(1 for m in self.mask if sum(m) > 0))

    @property
    def batch(self) -> TokenBatch:
        lengths = [len(row) for row in self.mask]
        columns = {
            "mask": _flat(self.mask),
            "advantages": _flat([[a] * n for a, n in zip(self.advantages, lengths, strict=True)]),
            "generation_logprobs": _flat(self.sampler),
            "reference_logprobs": _flat(self.reference),
        }
        if self.previous is not None:
            columns["prev_logprobs"] = _flat(self.previous)
        if self.is_rewarded:
            counted = [[m * yes for m in row] for row, yes in zip(self.mask, self.is_rewarded, strict=True)]
            columns["rewarded"] = _flat(counted) / max(1.0, sum(map(sum, counted)))
        return TokenBatch.build([[1]] * len(lengths), [[2] * n for n in lengths], range(len(lengths)), columns)

    @property
    def logprobs(self) -> Tensor:
        return _flat(self.current).requires_grad_()


def _flat(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float32)


def random_case(seed: int, *, previous: bool = True, spread: float = 0.6) -> Case:
    """Lengths from 1 to 7, some tokens masked, one response masked altogether, ratios on both sides of every clip."""
    generator = torch.Generator().manual_seed(seed)

    def near(rows: list[list[float]], distance: float) -> list[list[float]]:
        return [[_f32(v + distance * float(torch.randn((), generator=generator))) for v in row] for row in rows]

    lengths = [1, 5, 3, 7, 2, 4]
    current = near([[-2.5] * n for n in lengths], 0.8)
    mask = [[1.0] * n for n in lengths]
    mask[1][0] = mask[3][2] = mask[3][6] = 0.0
    mask[5] = [0.0] * 4
    advantages = [_f32(1.5 * float(torch.randn((), generator=generator))) for _ in lengths]
    advantages[1], advantages[3] = abs(advantages[1]), -abs(advantages[3])  # both signs, always
    old = near(current, spread)
    return Case(
        current=current,
        mask=mask,
        advantages=advantages,
        previous=old if previous else None,
        sampler=near(old, 0.4 * spread),
        reference=near(current, spread),
    )


def _f32(value: float) -> float:
    """What survives in an fp32 column, so that both sides start from the same numbers."""
    return float(torch.tensor(value, dtype=torch.float32))


def _value(scalar: Tensor) -> float:
    return float(scalar.detach())


def slow_policy_gradient(case: Case, **options: object) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, its gradient with respect to the current log-probabilities, and what the metrics should say."""
    o = {**DEFAULTS, **options}
    tokens = [[torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in row] for row in case.current]
    actor_terms: list[list[Tensor]] = []
    kl_terms: list[list[Tensor]] = []
    out_of_bounds = 0.0
    ratios: list[tuple[float, float]] = []
    for i, lc in enumerate(tokens):
        mask = case.mask[i]
        lp = [t.detach() for t in lc] if case.previous is None else [torch.tensor(v).double() for v in case.previous[i]]
        lg = [torch.tensor(v).double() for v in case.sampler[i]]
        lr = [torch.tensor(v).double() for v in case.reference[i]]
        weights, outside = _importance_weights(lp, lg, mask, o)
        actor_row, ratio_row = _actor(lc, lp, mask, case.advantages[i], o)
        actor_terms.append([w * a for w, a in zip(weights, actor_row, strict=True)])
        weights_of_kl = _kl_weights(lc, lp, lg, mask, o)
        kl_terms.append([_kl(c, r, w, o) for c, r, w in zip(lc, lr, weights_of_kl, strict=True)])
        for t, counted in enumerate(mask):
            if counted:
                ratios.append(ratio_row[t])
                out_of_bounds += float(outside[t])

    kl = _reduce(kl_terms, case, o)
    nll = _mean_nll(tokens, case)
    loss = (
        _reduce(actor_terms, case, o) + o["reference_policy_kl_penalty"] * kl + o["positive_example_nll_weight"] * nll
    )
    flat = [t for row in tokens for t in row]
    grads = torch.autograd.grad(loss, flat, allow_unused=True)
    gradient = torch.stack([torch.zeros((), dtype=torch.float64) if g is None else g for g in grads])
    metrics = {
        "loss": _value(loss),
        "kl_penalty": _value(kl),
        "probs_ratio": sum(r for r, _ in ratios) / case.num_tokens,
        "probs_ratio_min": min(r for r, _ in ratios),
        "probs_ratio_max": max(r for r, _ in ratios),
        "probs_ratio_clamped": sum(c for _, c in ratios) / case.num_tokens,
        "probs_ratio_clamped_min": min(c for _, c in ratios),
        "probs_ratio_clamped_max": max(c for _, c in ratios),
        "is_oob_ratio": out_of_bounds / case.num_tokens,
    }
    if o["positive_example_nll_weight"]:
        metrics["positive_nll_loss"] = _value(nll)
    return _value(loss), gradient, metrics


def _actor(
    lc: list[Tensor], lp: list[Tensor], mask: list[float], advantage: float, o: Mapping[str, object]
) -> tuple[list[Tensor], list[tuple[float, float]]]:
    if o["disable_ppo_ratio"]:
        return [-advantage * c for c in lc], [(1.0, 1.0)] * len(lc)
    ratios = _ratios(lc, lp, mask, o)
    low, high = 1 - o["ratio_clip_min"], 1 + o["ratio_clip_max"]
    losses, seen = [], []
    for c, ratio in zip(lc, ratios, strict=True):
        inside = low <= _value(ratio) <= high
        clipped = ratio if inside else torch.tensor(min(max(_value(ratio), low), high), dtype=torch.float64)
        seen.append((_value(ratio), _value(clipped)))
        if o["use_cispo"]:
            losses.append(-advantage * _value(clipped) * c)
            continue
        if o["ratio_ceiling"] is not None and _value(ratio) > o["ratio_ceiling"]:
            ratio = torch.tensor(o["ratio_ceiling"], dtype=torch.float64)
        unclipped_loss, clipped_loss = -advantage * ratio, -advantage * clipped
        loss = unclipped_loss if _value(unclipped_loss) >= _value(clipped_loss) else clipped_loss
        if o["ratio_clip_c"] is not None and advantage < 0:
            ceiling = torch.tensor(-advantage * o["ratio_clip_c"], dtype=torch.float64)
            loss = loss if _value(loss) <= _value(ceiling) else ceiling
        losses.append(loss)
    return losses, seen


def _ratios(lc: list[Tensor], lp: list[Tensor], mask: list[float], o: Mapping[str, object]) -> list[Tensor]:
    logs = [c - p for c, p in zip(lc, lp, strict=True)]
    if o["sequence_level_importance_ratios"]:
        counted = [log for log, m in zip(logs, mask, strict=True) if m]
        whole = sum(counted, torch.zeros((), dtype=torch.float64))
        if o["sequence_ratio_type"] == "geometric_mean":
            whole = whole / max(1, len(counted))
        logs = [whole] * len(lc)
    bound = o["log_ratio_clamp_value"]
    if bound is not None:
        far = [torch.tensor(bound if _value(log) > 0 else -bound, dtype=torch.float64) for log in logs]
        logs = [log if abs(_value(log)) <= bound else limit for log, limit in zip(logs, far, strict=True)]
    return [log.exp() for log in logs]


def _kl_weights(
    lc: list[Tensor], lp: list[Tensor], lg: list[Tensor], mask: list[float], o: Mapping[str, object]
) -> list[Tensor]:
    kind = o["kl_importance_weight"] or ("sampler" if o["use_on_policy_kl_approximation"] else "on_policy")
    if kind == "previous":
        return _ratios(lc, lp, mask, o)
    if kind == "none":
        return [torch.ones((), dtype=torch.float64)] * len(lc)
    other = lg if kind == "sampler" else [c.detach() for c in lc]
    return [(c - there).exp() for c, there in zip(lc, other, strict=True)]


def _mean_nll(tokens: list[list[Tensor]], case: Case) -> Tensor:
    """Over the counted tokens of rewarded responses, of all of them together."""
    terms = [
        -token
        for row, mask, yes in zip(tokens, case.mask, case.is_rewarded or [False] * len(tokens), strict=True)
        for token, counted in zip(row, mask, strict=True)
        if yes and counted
    ]
    return sum(terms, torch.zeros((), dtype=torch.float64)) / max(1, len(terms))


def _importance_weights(
    lp: list[Tensor], lg: list[Tensor], mask: list[float], o: Mapping[str, object]
) -> tuple[list[float], list[bool]]:
    n = len(lp)
    if not o["use_importance_sampling_correction"]:
        return [1.0] * n, [False] * n
    gaps = [float(p - g) for p, g in zip(lp, lg, strict=True)]
    counted = [gap for gap, m in zip(gaps, mask, strict=True) if m]
    if o["sequence_level_importance_ratios"]:
        weights = [float(torch.tensor(sum(counted)).double().exp())] * n
    else:
        weights = [float(torch.tensor(gap).double().exp()) for gap in gaps]
    kind = o["truncated_importance_sampling_type"]
    low, high = o["truncated_importance_sampling_ratio_min"] or 0.0, o["truncated_importance_sampling_ratio"]
    if kind is None:
        return weights, [False] * n
    if kind == "seq-mask-tis":
        mean = sum(counted) / len(counted) if counted else 0.0
        geometric = float(torch.tensor(mean).double().exp())
        drop = not low <= geometric <= high
        return [0.0 if drop else w for w in weights], [drop] * n
    outside = [not low <= w <= high for w in weights]
    if kind == "icepop":
        return [0.0 if out else w for w, out in zip(weights, outside, strict=True)], outside
    return [min(max(w, low), high) for w in weights], outside


def _kl(lc: Tensor, lr: Tensor, factor: Tensor, o: Mapping[str, object]) -> Tensor:
    log_ratio = lr - lc
    bound = o["kl_input_clamp_value"]
    if bound is not None and abs(_value(log_ratio)) > bound:
        log_ratio = torch.tensor(bound if _value(log_ratio) > 0 else -bound, dtype=torch.float64)
        factor = factor.detach()
    estimate = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}
    kl = estimate[o["reference_policy_kl_type"]] * factor
    bound = o["kl_output_clamp_value"]
    if bound is not None and abs(_value(kl)) > bound:
        kl = torch.tensor(bound if _value(kl) > 0 else -bound, dtype=torch.float64)
    return kl


def _reduce(terms: list[list[Tensor]], case: Case, o: Mapping[str, object]) -> Tensor:
    normalizer = o["loss_normalizer"] or ("tokens" if o["token_level_loss"] else "sequences")
    total = torch.zeros((), dtype=torch.float64)
    for row, mask in zip(terms, case.mask, strict=True):
        inside = sum((term * m for term, m in zip(row, mask, strict=True)), torch.zeros((), dtype=torch.float64))
        if normalizer == "tokens":
            total = total + inside / case.num_tokens
        elif normalizer == "max_tokens":
            total = total + inside / (case.num_sequences * o["max_response_tokens"])
        elif sum(mask) > 0:
            total = total + inside / sum(mask) / case.num_sequences
    return total
