"""The algebra of latent attention (DeepSeek-V2, arXiv 2405.04434).

A layer makes of each token a latent vector c and a rotated part r of the keys, which all heads share. For head h with
the rows K and V of the up-projection, the key is [K c, r] and the value V c. So the score of a query [q, p] is
(K^T q) c + p r, and the output is V times the weighted sum of the latent vectors: attention with one key head of width
rank + rotated, whose values are the first numbers of the keys. It has 2 (2 rank + rotated) operations for each head and
cached token; making the keys and values again would take 2 rank (key + value width).

An up-projection may have LoRA adapters, K + s B A. They are multiplied with vectors, not added to the matrix: in bf16
small ones would be lost in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import InputError
from posttrain.models.attention_interface import Latent
from posttrain.policy.fused.adapters import is_adapted


def plain_width(up: nn.Module, key: Tensor, value: Tensor) -> int:
    """Numbers of a key that do not depend on positions; keys and values are [tokens, heads, width]."""
    base: Any = getattr(up, "base_layer", up)
    return len(base.weight) // key.shape[1] - value.shape[2]


def stored(latent: Latent, key: Tensor, value: Tensor) -> Tensor:
    """What the cache holds of each token: [tokens, 1, rank + rotated]."""
    plain = plain_width(latent.up, key, value)
    return torch.cat([latent.vector.to(key.dtype), key[:, 0, plain:]], dim=-1)[:, None]


def expanded(up: nn.Module, rows: Tensor, heads: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, of what `stored` returned."""
    base: Any = getattr(up, "base_layer", up)
    rank = base.weight.shape[1]
    keys_and_values = up(rows[:, 0, :rank]).unflatten(-1, (heads, -1))
    plain, values = keys_and_values.split([keys_and_values.shape[-1] - value_dim, value_dim], dim=-1)
    return torch.cat([plain, rows[..., rank:].expand(-1, heads, -1)], dim=-1), values


def is_plain(up: nn.Module) -> bool:
    """Whether it is a matrix, with LoRA adapters or without, as `Absorbed` reads it."""
    if not is_adapted(up):
        return type(up) is nn.Linear
    module: Any = up
    adapters = [module.lora_A[name] for name in module.lora_A] + [module.lora_B[name] for name in module.lora_B]
    return not module.lora_variant and all(type(each) is nn.Linear and each.bias is None for each in adapters)


@dataclass(frozen=True)
class Absorbed:
    """The up-projection of a layer as it is now, in front of and behind attention over latent vectors."""

    weight: Tensor  # [heads, plain + value width, rank]
    adapters: tuple[tuple[Tensor, Tensor, float], ...]  # A; B by heads, as the weight; scaling
    plain: int  # numbers of a key that do not depend on positions

    @classmethod
    def of(cls, up: nn.Module, heads: int, value_dim: int) -> Absorbed:
        module: Any = up
        base: Any = getattr(up, "base_layer", up)
        weight, active = base.weight, []
        if not is_plain(up):
            raise InputError(
                "the KV cache holds latent vectors, and an adapter of kv_b_proj is not plain LoRA (it is DoRA, for "
                "example): leave kv_b_proj out of its target_modules"
            )
        if base is not up and not module.disable_adapters and not module.merged:
            active = [name for name in module.active_adapters if name in module.lora_A]
        adapters = tuple(
            (
                module.lora_A[name].weight,
                module.lora_B[name].weight.unflatten(0, (heads, -1)),
                float(module.scaling[name]),
            )
            for name in active
        )
        by_head = weight.unflatten(0, (heads, -1))
        return cls(by_head, adapters, by_head.shape[1] - value_dim)

    def queries(self, query: Tensor) -> Tensor:
        """Of heads, [tokens, heads, plain + rotated], for latent vectors: [tokens, heads, rank + rotated]."""
        own, rotated = query.split([self.plain, query.shape[-1] - self.plain], dim=-1)
        out = torch.einsum("thn,hnr->thr", own, self.weight[:, : self.plain])
        for down, up, scaling in self.adapters:
            out = out + torch.einsum("thn,hnk->thk", own, up[:, : self.plain]) @ down * scaling
        return torch.cat([out.to(query.dtype), rotated], dim=-1)

    def outputs(self, latent: Tensor) -> Tensor:
        """Of weighted sums of latent vectors, [tokens, heads, rank]: [tokens, heads, value width]."""
        out = torch.einsum("thr,hvr->thv", latent, self.weight[:, self.plain :])
        for down, up, scaling in self.adapters:
            out = out + torch.einsum("thk,hvk->thv", latent @ down.T, up[:, self.plain :]) * scaling
        return out.to(latent.dtype)
