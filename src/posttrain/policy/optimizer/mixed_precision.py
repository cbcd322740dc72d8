"""The optimizer, by dotted name, and fp32 masters for parameters in lower precision. Its schedule is in `schedule`.

With bf16 parameters the forward pass, the backward pass and the sampler all use the bf16 tensors. Gradients are added
up in fp32, the optimizer steps on fp32 copies (the masters), and the result is rounded back. Everything that determines
the next step is in `state_tensors`, by parameter name, so that it can be saved and loaded on another number of ranks.

This is the ordinary case. State in fewer bits, in host memory, or without masters is in `compact`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from posttrain.errors import CheckpointError, InputError
from posttrain.files.json_files import JsonMapping
from posttrain.policy.fused.accumulate import begin_sum, move_to_sum, sum_of
from posttrain.policy.optimizer.schedule import SchedulerSpec, build_scheduler, resolve
from posttrain.policy.parallel.fsdp import local_part, num_copies

# What `compact` can change, and what it is here.
ORDINARY = {"policy.optimizer.state_dtype": ["float32"], "policy.optimizer.master_weights": ["float32"]}


class MixedPrecisionOptimizer:
    """A torch optimizer over the trainable parameters, with fp32 masters where the parameters are not fp32."""

    before_change: Callable[[], None] | None = None  # before weights or state change: something may be reading them

    def __init__(self, model: nn.Module, name: str, kwargs: Mapping[str, object], scheduler: SchedulerSpec) -> None:
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = self._make_masters()
        try:
            self.optimizer: Optimizer = self._make(name, kwargs)
        except InputError:
            raise
        except (TypeError, ValueError) as error:
            raise InputError(f"policy.optimizer.kwargs do not fit {name}: {error}") from error
        self._schedule = scheduler
        self.scheduler = build_scheduler(self.optimizer, scheduler)
        self._collect_as_they_come()

    def _make_masters(self) -> dict[str, nn.Parameter]:
        return {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float().clone())
            for name, p in self.parameters.items()
        }

    def _make(self, name: str, kwargs: Mapping[str, object]) -> Optimizer:
        return resolve(name, "policy.optimizer.name")(self._parameter_groups(), **kwargs)

    def _parameter_groups(self) -> list[nn.Parameter] | list[dict[str, list[nn.Parameter]]]:
        """Those of experts over ranks are on another mesh, and torch updates a group in operations over all of it."""
        by_mesh: dict[object, list[nn.Parameter]] = {}
        for master in self.masters.values():
            by_mesh.setdefault(getattr(master, "device_mesh", None), []).append(master)
        groups = list(by_mesh.values())
        return groups[0] if len(groups) == 1 else [{"params": group} for group in groups]

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _collect_as_they_come(self) -> None:
        """Each bf16 gradient is added to its fp32 sum as soon as it exists, so that they never exist all at once: most
        of them by the product that computes them (`fused/accumulate.py`), the rest by hooks.

        Those of sharded parameters are put in place by FSDP, after its own hooks: they wait for `collect_gradients`.
        """
        for name, parameter in self.parameters.items():
            begin_sum(parameter)
            if parameter.dtype != torch.float32 and not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._collect(name))

    def collect_gradients(self) -> None:
        """Move what the last backward pass left on bf16 parameters into their fp32 sums: the masters' gradients."""
        for name in self.parameters:
            self._collect(name)

    @torch.no_grad()
    def _collect(self, name: str) -> None:
        parameter, master = self.parameters[name], self.masters[name]
        if master is not parameter:
            move_to_sum(parameter)
            master.grad = sum_of(parameter)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.masters.items() if p.grad is not None}

    def step(self, max_grad_norm: float | None) -> tuple[float, bool]:
        """Clip, step, clear the gradients. Returns the norm before clipping, and whether the step was taken."""
        self.collect_gradients()
        norm = gradient_norm(list(self._gradients().values()))
        taken = math.isfinite(norm)
        if taken:
            if self.before_change is not None:
                self.before_change()
            clips = max_grad_norm is not None and norm > max_grad_norm
            self._apply(max_grad_norm / (norm + 1e-6) if clips and max_grad_norm is not None else 1.0)
        self.forget_gradients()
        return norm, taken

    def _apply(self, scale: float) -> None:
        """One update with the gradients times `scale`."""
        if scale != 1.0:
            for gradient in self._gradients().values():
                gradient.mul_(scale)
        self.optimizer.step()
        self._round_back()

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            begin_sum(parameter)

    @torch.no_grad()
    def _round_back(self) -> None:
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def end_step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters and per-parameter optimizer state, keyed `master/<parameter>` and `state/<parameter>/<entry>`."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                tensors[f"master/{name}"] = master.detach()
            for entry, value in self.optimizer.state.get(master, {}).items():
                tensors[f"state/{name}/{entry}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return tensors

    def empty_like_saved(self, saved: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, Tensor]:
        """Tensors to load the saved state into: sharded as the parameters are now, whatever they were when saved."""
        tensors: dict[str, Tensor] = {}
        on_device = any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)
        for key, (shape, dtype) in saved.items():
            parameter = self.masters[parameter_of(key)]
            if tuple(shape) == tuple(parameter.shape):
                tensors[key] = torch.empty_like(parameter.detach(), dtype=dtype)
            else:
                # Numbers of updates are in host memory, as torch has them; Adafactor's rows and columns are not.
                device = "cpu" if not shape and not on_device else parameter.device
                tensors[key] = torch.empty(tuple(shape), dtype=dtype, device=device)
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.optimizer.state.clear()
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(self.parameters[name])  # a checkpoint of an fp32 run has no masters
        for key, tensor in tensors.items():
            master = self.masters[parameter_of(key)]
            if key.startswith("master/"):
                master.copy_(tensor)
            else:
                self.optimizer.state[master][key.rpartition("/")[2]] = tensor
        self._round_back()

    def schedule_state(self) -> dict[str, object]:
        """The schedule and the hyperparameters it has changed. Plain values."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "groups": groups,
            "kinds": self._kinds(),
        }

    def _kinds(self) -> dict[str, list[str]]:
        """What optimizer and schedule are, by the settings that choose them."""
        schedule = [] if self.scheduler is None else getattr(self.scheduler, "_schedulers", [self.scheduler])
        return {
            "policy.optimizer.name": [class_name(getattr(self.optimizer, "torch_class", type(self.optimizer)))],
            "policy.scheduler": [class_name(type(part)) for part in schedule],
            **ORDINARY,
        }

    def check_kinds(self, state: JsonMapping) -> None:
        """Raise CheckpointError if a saved state is from another optimizer or schedule."""
        current = self._kinds()
        saved = {**current, **ORDINARY, **state.get("kinds", {})}  # not in older checkpoints
        for setting, names in current.items():
            if saved[setting] != names:
                was, now = (", then ".join(kinds) or "none" for kinds in (saved[setting], names))
                raise CheckpointError(
                    f"{setting}: the checkpoint was made with {was}, this run has {now}, which cannot continue from "
                    "its state. Continue with the former, or start a new run from the checkpoint's weights with "
                    "policy.model_name and another checkpointing.checkpoint_dir"
                )

    def load_schedule_state(self, state: JsonMapping) -> None:
        """This run's schedule, advanced to the saved step: changes of rate or length take effect.

        A schedule loaded from its state would keep its old settings, and torch's schedules continue from the previous
        rate.
        """
        if self.scheduler is None or state["scheduler"] is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = group.pop("initial_lr")
        with warnings.catch_warnings(action="ignore"):  # that no update came between
            self.scheduler = build_scheduler(self.optimizer, self._schedule)
            assert self.scheduler is not None
            try:
                for _ in range(int(state["scheduler"]["last_epoch"])):
                    self.scheduler.step()
            except ValueError as error:  # one that has an end
                raise InputError(
                    f"policy.scheduler ends before the checkpoint from which this run resumes: {error}"
                ) from error


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def parameter_of(key: str) -> str:
    kind, _, rest = key.partition("/")
    return rest if kind == "master" else rest.rpartition("/")[0]


@torch.no_grad()
def gradient_norm(gradients: Sequence[Tensor]) -> float:
    """The 2-norm of all of them together; over all ranks where they are sharded."""
    if not gradients:
        return 0.0
    squares = torch.stack([_sum_of_squares(gradient) for gradient in gradients]).sum()
    if isinstance(first := gradients[0], DTensor):
        for axis in range(first.device_mesh.ndim):
            dist.all_reduce(squares, group=first.device_mesh.get_group(axis))
    return float(squares.sqrt())


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """In fp32, this rank's share: what several ranks hold is counted once."""
    own = local_part(gradient)
    if own.is_cuda:
        squares = torch.linalg.vector_norm(own, dtype=torch.float32).square()
    else:  # torch's norm on a CPU adds one number after another and loses a percent of a hundred million
        squares = own.float().square().sum()
    return squares / num_copies(gradient) if isinstance(gradient, DTensor) else squares
