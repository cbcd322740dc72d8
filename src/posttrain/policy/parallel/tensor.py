"""Splits a model over ranks that share its layers: tensor parallelism.

Each rank holds a part of every projection, of the embedding and of the output head. Parameters are stored as DTensors
on the axis `tp` of the mesh, and FSDP spreads them over `dp` after that. While a module runs, its parameters are the
local tensors; sums over the group are autograd functions (`tensor_group.py`). A projection split by columns makes this
rank's heads, or its part of the MLP. The one after it is split by rows: it makes parts of a sum, which are added up in
fp32.

How a family's modules are split is in the plan that `transformers` has for it. The split model is tried on a few
tokens (`same_states`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from posttrain.errors import InputError
from posttrain.models.attention_interface import attention_context
from posttrain.policy.autograd import Context
from posttrain.policy.fused.trials import is_near
from posttrain.policy.head import Head, project, without_adapter_wrapper
from posttrain.policy.packed import PackedAttention, Segment
from posttrain.policy.parallel.fsdp import local_part, spread_parameter
from posttrain.policy.parallel.tensor_group import TensorGroup, group_of, mark
from posttrain.policy.runtime import evaluation_mode

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FIELD = "policy.dtensor_cfg.tensor_parallel_size"
ROWS_FIELD = "policy.dtensor_cfg.sequence_parallel"
ENGINE_FIELD = "policy.generation.vllm_cfg.tensor_parallel_size"
# How a module is split, by the style that the family's plan in `transformers` gives it.
COLUMNS, ROWS, SUMMED, SAME = "columns", "rows", "summed", "same"
_ROLES = {"colwise": COLUMNS, "rowwise": ROWS, "replicated_with_grad_allreduce": SUMMED}
# peft's matrices: A x is computed whole from a whole input, and in parts from a part of it.
_ADAPTER_ROLES = {("A", COLUMNS): SUMMED, ("B", COLUMNS): COLUMNS, ("A", ROWS): ROWS, ("B", ROWS): SAME}
_TRIAL_TOKENS = 8


class _RowProduct(torch.autograd.Function):
    """x @ weight.T summed over the group. The parts leave the product in fp32, and the sum is rounded once, as one
    rank's product is. Parts in bf16 would make the log-probabilities of several ranks differ from those of one.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, group: TensorGroup) -> Tensor:
        ctx.dtype, ctx.group = x.dtype, group
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            product = project(x, weight)
            added = group.own_rows_of_sum(product) if group.splits_rows else group.sum_in_place(product)
            return added.to(weight.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = (ctx.group.all_rows(grads[0]) if ctx.group.splits_rows else grads[0]).to(weight.dtype)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = (grad @ weight).to(ctx.dtype) if needs_x else None
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2) if needs_weight else None
        return grad_x, grad_weight, None


# -- splitting a model -------------------------------------------------------------------------------------------------


def split_over_ranks(
    model: nn.Module,
    head: Head,
    mesh: DeviceMesh,
    device: torch.device,
    field: str = FIELD,
    *,
    splits_rows: bool = False,
) -> None:
    """Leave this rank its part of `model`, on `device`. Before `fully_shard`. `field` of the config asks for it.
    `splits_rows`: passes with gradients are made with rows that are split (`TensorGroup.split_rows`).

    Experts that are spread over other ranks already (`experts.py`) stay as they are.
    """
    group = TensorGroup(mesh)
    config: PretrainedConfig = without_adapter_wrapper(model).config.get_text_config()
    plan = _plan(config, field, has_spread_experts=any(isinstance(p, DTensor) for p in model.parameters()))
    _check_sizes(config, group.size, field)
    # Attention and MLP of every layer: modules whose input is that of projections by columns.
    columns = [name for name, _ in head.decoder.named_modules() if _match(name, plan) == COLUMNS]
    parents = tuple(dict.fromkeys(name.rpartition(".")[0] for name in columns))
    roles = _roles(head, plan)
    if splits_rows:
        roles |= _roles_on_split_rows(head, roles, parents)
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
    for module in model.modules():
        role = roles.get(module, SAME)
        kinds = [kind for kind, parameter in module._parameters.items() if parameter is not None]
        for kind in kinds:
            parameter = module._parameters[kind]
            assert parameter is not None
            if isinstance(parameter, DTensor):
                made[parameter] = parameter
            elif parameter not in made:
                by_rows = Shard(1) if role == ROWS and kind == "weight" else Replicate()
                made[parameter] = _part(parameter, Shard(0) if role == COLUMNS else by_rows, group, device)
            module._parameters[kind] = made[parameter]
        for kind, buffer in module._buffers.items():
            module._buffers[kind] = None if buffer is None else buffer.to(device)
        if kinds:  # peft's wrapper of a linear layer has none of its own
            _show_locals(module, role, group, splits_rows=splits_rows)
            if role == ROWS:
                module.forward = _RowLinear(module, group)
    head.embedding.forward = _VocabularyRows(head.embedding, group)

    def copied_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (group.entering(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": group.entering(kwargs["hidden_states"])}

    def with_all_rows(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        out.last_hidden_state = group.joined_rows(out.last_hidden_state)
        return out

    if splits_rows:
        head.decoder.register_forward_hook(with_all_rows)
    for parent in parents:
        head.decoder.get_submodule(parent).register_forward_pre_hook(copied_input, with_kwargs=True)
    for layer in head.layers:
        mark(layer, group)
    if head.is_vocabulary:
        mark(head.module, group)
        head.module.register_forward_pre_hook(lambda _, args: (group.copied(args[0]), *args[1:]))
        head.module.register_forward_hook(lambda _, args, out: group.beside(out, len(head.module.weight)))


def _plan(config: PretrainedConfig, field: str, *, has_spread_experts: bool) -> dict[str, str]:
    """Roles by patterns of module names below the decoder."""
    styles: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if has_spread_experts:
        styles = {pattern: style for pattern, style in styles.items() if ".experts" not in pattern}
    if not any(pattern.endswith("_proj") and "attn" in pattern for pattern in styles):
        raise InputError(
            f"{field}: transformers has no plan for the attention of the family {config.model_type}; set it to 1"
        )
    if unknown := sorted(set(styles.values()) - _ROLES.keys()):
        experts = ", which has experts," if any("expert" in pattern for pattern in styles) else ""
        raise InputError(
            f"{field}: the family {config.model_type}{experts} is split in ways that posttrain does not implement "
            f"({', '.join(unknown)}); set it to 1"
        )
    return {pattern: _ROLES[style] for pattern, style in styles.items()}


def _check_sizes(config: PretrainedConfig, size: int, field: str) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % size:
            raise InputError(
                f"{field} = {size} does not divide the model's {name} = {number}: each rank has an equal part"
            )


def _roles(head: Head, plan: Mapping[str, str]) -> dict[nn.Module, str]:
    roles: dict[nn.Module, str] = {}
    for name, module in head.decoder.named_modules():
        adapted, _, matrix = name.partition(".lora_")
        role = _match(adapted.removesuffix(".base_layer"), plan)
        roles[module] = _ADAPTER_ROLES.get((matrix[:1], role), SAME) if matrix else role
    if head.is_vocabulary:  # split by tokens
        for name, module in head.module.named_modules():
            matrix = f".{name}".partition(".lora_")[2]
            roles[module] = _ADAPTER_ROLES.get((matrix[:1], COLUMNS), SAME) if matrix else COLUMNS
    roles[head.embedding] = COLUMNS
    return roles


def _roles_on_split_rows(head: Head, roles: Mapping[nn.Module, str], parents: tuple[str, ...]) -> dict[nn.Module, str]:
    """Modules that are whole on each rank and see its tokens only: norms, second adapters after row products."""
    found: dict[nn.Module, str] = {}
    for name, module in head.decoder.named_modules():
        is_inside = any(name == parent or name.startswith(f"{parent}.") for parent in parents)
        if roles[module] == SAME and (not is_inside or ".lora_B" in name):
            found[module] = SUMMED
    return found


def _match(name: str, plan: Mapping[str, str]) -> str:
    return next((role for pattern, role in plan.items() if fnmatchcase(name, pattern)), SAME)


def _part(parameter: nn.Parameter, placement: Placement, group: TensorGroup, device: torch.device) -> nn.Parameter:
    part = parameter.detach()
    if isinstance(placement, Shard):
        part = part.chunk(group.size, dim=placement.dim)[group.rank]
    return spread_parameter(part, parameter, group.mesh, [placement], device)


def _show_locals(module: nn.Module, role: str, group: TensorGroup, *, splits_rows: bool) -> None:
    """While the module runs, its parameters are this rank's tensors. FSDP goes on to swap what is in `_parameters`."""
    sums_bias = role == ROWS and splits_rows  # it is added to this rank's rows of the product

    def show(module: nn.Module, args: object) -> None:
        for kind, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                module.__dict__[kind] = (
                    group.copied(local) if role == SUMMED or (sums_bias and kind == "bias") else local
                )

    def hide(module: nn.Module, args: object, out: object) -> None:
        for kind in module._parameters:
            module.__dict__.pop(kind, None)

    module.register_forward_pre_hook(show)
    module.register_forward_hook(hide, always_call=True)  # recomputation aborts a forward pass by an exception


class _RowLinear:
    """The forward of a linear layer that has some columns of its weight; a bias is added once, to the sum."""

    def __init__(self, module: nn.Module, group: TensorGroup) -> None:
        self.module, self.group = module, group

    def __call__(self, x: Tensor) -> Tensor:
        module: Any = self.module
        out = _RowProduct.apply(x, module.weight, self.group)
        return out if module.bias is None else out + module.bias


class _VocabularyRows:
    """The forward of an embedding that has the rows of some tokens: others are zero, and all ranks' are added."""

    def __init__(self, module: Any, group: TensorGroup) -> None:
        self.module, self.group = module, group
        self.look_up: Callable[[Tensor], Tensor] = module.forward
        self.first = group.first_of(len(module.weight))
        if module.padding_idx is not None:  # whose row gets no gradient
            own = module.padding_idx - self.first
            module.padding_idx = own if 0 <= own < len(local_part(module.weight)) else None

    def __call__(self, ids: Tensor) -> Tensor:
        own = ids - self.first
        is_here = (own >= 0) & (own < len(self.module.weight))
        return self.group.added(self.look_up(own.where(is_here, 0)) * is_here[..., None])


# -- does it compute the same? -----------------------------------------------------------------------------------------


@contextmanager
def same_states(head: Head, field: str, *, splits_rows: bool = False) -> Iterator[None]:
    """The model is split inside, and must compute the same afterwards: a family may use its modules in a way that its
    plan does not describe.
    """
    expected = _trial(head)
    yield
    _compare(head, expected, field)
    if splits_rows and (group := group_of(head.layers[0])) is not None:
        with group.split_rows(_TRIAL_TOKENS):
            _compare(head, expected, ROWS_FIELD)


def _compare(head: Head, expected: Tensor, field: str) -> None:
    found, dtype = _trial(head), head.embedding.weight.dtype
    if not is_near(found, expected, dtype):
        raise InputError(
            f"{field}: split over ranks, this model of the family {head.decoder.config.model_type} computes something "
            f"else (hidden states off by {float((found - expected).abs().max()):.2g}, the largest is "
            f"{float(expected.abs().max()):.2g}); set it to 1"
        )


@torch.no_grad()
def _trial(head: Head) -> Tensor:
    """Hidden states of a few tokens."""
    weight: Any = head.embedding.weight
    positions = torch.arange(_TRIAL_TOKENS, device=weight.device)[None]
    context = PackedAttention([Segment(0, _TRIAL_TOKENS)], weight.device)
    with evaluation_mode(head.decoder), attention_context(context):
        return head.hidden(positions * (len(weight) // _TRIAL_TOKENS), positions).cpu()
