"""Proves, before a family that no test covers is trained or sampled, that all ways to compute a sequence agree.

The native engine draws a few tokens after three short prompts, token by token, two samples of each prompt. Its
log-probabilities, and those of the packed row that training would compute of the same tokens, are compared with the
model's own forward pass over one sequence at a time, with the attention and the positions of transformers. A model that
disagrees is refused, with the first of its layers that does.

The modules are those of the run, on its device and in its precision: there is no copy of the weights. Where layers are
replaced by kernels (`policy/fused`), the model's own forward pass is that of the layers without them, and one sequence
is longer than two chunks of a recurrence. So families with tests are proved on a GPU too, where their kernels may be
compiled otherwise than on ours; a disagreement of theirs is a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from posttrain.engines.native.engine import NativeEngine, NativeSettings
from posttrain.errors import StopRequested
from posttrain.models.attention_interface import attention_context
from posttrain.models.loading import TESTED_FAMILIES
from posttrain.models.recurrence_interface import recurrence_of_transformers
from posttrain.policy.checkpoint.files import base_config
from posttrain.policy.head import UnsupportedModelError, without_adapter_wrapper
from posttrain.policy.logprobs import TokenLogprobs
from posttrain.policy.model_support import is_noise_asked_for, refusing_errors
from posttrain.policy.packed import PackedAttention, PackedRow, Segment
from posttrain.policy.parallel.fsdp import whole_parameters
from posttrain.policy.reward_head import SequenceScores
from posttrain.policy.runtime import evaluation_mode, mode_of, triton_kernels
from posttrain.policy.trainer import PolicyTrainer
from posttrain.types import NoiseKey, Sampling, Task, TokenBatch

NUM_SAMPLES = 2  # of each prompt, which they share
NUM_NEW_TOKENS = 6
PROMPT_LENGTHS = (18, 5, 9)  # the first is longer than a page, and than a pass of prefill
# With kernels: longer than two chunks of a recurrence, and than a pass of prefill of more than one.
_LONG_PROMPT, _LONG_PREFILL = 140, 96
_SETTINGS = NativeSettings(page_size=16, max_batch_size=8, max_prefill_tokens=16, num_speculative_tokens=0)
# Two ways to add up numbers of these types differ by less. Of log-probabilities the largest difference; of 16-bit types
# the mean of exp|difference|, since a token may go to another expert. States are compared by their norms.
_LOGPROB_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
_MEAN_RATIO_TOLERANCE = 1.1
_STATE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_STATE_TOLERANCE_16_BIT = 0.1

Place = tuple[int, int]  # sequence, position


@dataclass(frozen=True)
class TracedPass:
    """Numbers of one way to compute the sequences."""

    name: str
    scores: Tensor  # of each response token, or of the last states where there are no log-probabilities
    places: list[Place]  # of the tokens that were fed
    trace: _Trace


def prove_for_training(trainer: PolicyTrainer) -> None:
    """Before a rank trains or samples, where `policy.model_proof` wants it."""
    policy, trains = trainer.config, trainer.optimizer is not None
    only_warns = policy.model_proof == "auto" and base_config(trainer.model).model_type in TESTED_FAMILIES
    if policy.model_proof == "never" or (only_warns and not _runs_kernels(trainer.model)):
        return
    if not trains and policy.generation is not None and policy.generation.uses_vllm:
        return  # it holds weights for vLLM; the ranks that train are proved
    with whole_parameters(trainer.forward):
        in_training_too = trains and not is_noise_asked_for(policy.hf_config_overrides)
        try:
            prove(trainer.forward, trainer.tokenizer, in_training_too=in_training_too)
        except Exception as error:
            if not only_warns or isinstance(error, StopRequested | torch.AcceleratorError):
                raise
            if not isinstance(error, torch.OutOfMemoryError):
                warnings.warn(f"{error}. The run goes on; policy.model_proof: always stops it", stacklevel=2)


def _runs_kernels(model: nn.Module) -> bool:
    """Whole on a GPU that Triton compiles for: a sharded model may not fit on one."""
    return triton_kernels("policy.fused.kernels") is not None and all(
        parameter.device.type == "cuda" and not isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def prove_for_sampling(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    if base_config(model).model_type not in TESTED_FAMILIES:
        prove(TokenLogprobs(model), tokenizer, in_training_too=False)


@torch.no_grad()
def prove(
    forward: TokenLogprobs | SequenceScores, tokenizer: PreTrainedTokenizerBase, *, in_training_too: bool
) -> None:
    """UnsupportedModelError unless the passes agree. `in_training_too`: the packed row in training mode as well, which
    finds dropout and the like that could not be turned off.
    """
    model = forward.model
    base = without_adapter_wrapper(model)
    config: PretrainedConfig = base.config.get_text_config()
    proof = _Proof(forward, base, config, tokenizer)
    with torch.random.fork_rng([proof.device] if proof.device.type == "cuda" else []), refusing_errors(base.config):
        with evaluation_mode(model):
            decoded = [proof.decoded()] if isinstance(forward, TokenLogprobs) else []
            alone = proof.alone()
            for other in (proof.packed("packed into one row with others, after a prompt that it shares,"), *decoded):
                proof.compare(alone, other)
        if in_training_too:
            with mode_of(model, training=True):
                proof.compare(alone, proof.packed("computed in training mode, with dropout that cannot be turned off,"))


class _Proof:
    def __init__(
        self,
        forward: TokenLogprobs | SequenceScores,
        base: Any,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.forward, self.base, self.config, self.tokenizer = forward, base, config, tokenizer
        weight: Tensor = base.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype
        vocabulary = min(len(tokenizer), len(weight))
        places = getattr(config, "max_position_embeddings", None)
        is_long = _runs_kernels(base) and (places is None or places > _LONG_PROMPT + NUM_NEW_TOKENS)
        self.lengths = (_LONG_PROMPT, *PROMPT_LENGTHS[1:]) if is_long else PROMPT_LENGTHS
        self.settings = _SETTINGS.model_copy(update={"max_prefill_tokens": _LONG_PREFILL}) if is_long else _SETTINGS
        generator = torch.Generator().manual_seed(0)

        def tokens(length: int) -> list[int]:
            return torch.randint(vocabulary, (length,), generator=generator).tolist()

        self.prompts = [tokens(length) for length in self.lengths]
        self.prompt_of = [prompt for prompt in range(len(self.prompts)) for _ in range(NUM_SAMPLES)]
        self.responses = [tokens(NUM_NEW_TOKENS) for _ in self.prompt_of]  # until the engine draws others
        layers = enumerate(forward.head.layers)
        self.layers: dict[str, nn.Module] = {f"layer {at} ({type(layer).__name__})": layer for at, layer in layers}

    @property
    def _sequences(self) -> Iterator[list[int]]:
        """What is fed to the model: the last token of a response predicts nothing."""
        for prompt, response in zip(self.prompt_of, self.responses, strict=True):
            yield self.prompts[prompt] + response[:-1]

    def decoded(self) -> TracedPass:
        """Draws the responses."""
        engine = NativeEngine(self.forward.model, self.tokenizer, self.settings, use_graphs=False)
        engine.forward.shapes()  # before the hooks: a pass of its own
        tasks = [Task(draw, f"proof:{draw}", "", tuple(prompt)) for draw, prompt in enumerate(self.prompts)]
        with _tracing(self.layers, ()) as trace:
            groups = engine.generate(tasks, NUM_SAMPLES, Sampling(NUM_NEW_TOKENS, ignore_eos=True), NoiseKey(0, 0))
        completions = [completion for group in groups for completion in group]
        self.responses = [list(completion.token_ids) for completion in completions]
        places = [(first * NUM_SAMPLES, at) for first, n in enumerate(self.lengths) for at in range(n)]
        for step in range(NUM_NEW_TOKENS - 1):
            places += [(row, self.lengths[prompt] + step) for row, prompt in enumerate(self.prompt_of)]
        scores = torch.tensor([completion.logprobs for completion in completions]).flatten()
        return TracedPass("decoded token by token, after a prompt that it shares,", scores, places, trace)

    def alone(self) -> TracedPass:
        """transformers' own pass, with its attention, its positions and its way from tokens to embeddings."""
        pieces: list[Tensor] = []
        places: list[Place] = []
        with (
            _own_forwards(self.base),
            _tracing(self.layers, (self.forward.head.decoder,)) as trace,
            _own_attention(self.base),
        ):
            for row, sequence in enumerate(self._sequences):
                ids = torch.tensor([sequence], device=self.device)
                # Fused layers, of a sharded model, call the active context; others do not.
                context = PackedAttention([Segment(0, len(sequence))], self.device)
                with attention_context(context), _precision_of_training(self.base):
                    self.base(input_ids=ids, use_cache=False)
                states = trace.last_states[-NUM_NEW_TOKENS:]
                pieces.append(self._scores(states, self.responses[row]))
                places += [(row, at) for at in range(len(sequence))]
        return TracedPass("alone", torch.cat(pieces), places, trace)

    def _scores(self, states: Tensor, response: Sequence[int]) -> Tensor:
        if isinstance(self.forward, SequenceScores):
            return states.double().cpu().flatten()
        logprobs = self.forward.head.logits(states).double().log_softmax(-1).cpu()
        return logprobs.gather(1, torch.tensor(response)[:, None]).squeeze(1)

    def packed(self, name: str) -> TracedPass:
        """All sequences in one row, in which the samples of a prompt share it."""
        batch = TokenBatch.build(self.prompts, self.responses, self.prompt_of)
        row = PackedRow.build(batch, self.device)
        with _tracing(self.layers, (self.forward.head.decoder,)) as trace, attention_context(row.attention):
            if isinstance(self.forward, TokenLogprobs):
                scores = self.forward(row, 1.0)
            else:
                scores = self.forward.head.hidden(row.input_ids, row.position_ids).index_select(0, row.source)
        places: list[Place] = []
        for prompt, length in enumerate(self.lengths):
            first = prompt * NUM_SAMPLES
            places += [(first, at) for at in range(length)]
            for sample in range(first, first + NUM_SAMPLES):
                places += [(sample, length + at) for at in range(NUM_NEW_TOKENS - 1)]
        return TracedPass(name, scores.double().cpu().flatten(), places, trace)

    def compare(self, alone: TracedPass, other: TracedPass) -> None:
        difference = (other.scores - alone.scores).abs()
        largest = float(difference.max())
        if isinstance(self.forward, SequenceScores):
            agrees = largest <= self._state_tolerance * float(alone.scores.abs().max())
        elif self.dtype in _LOGPROB_TOLERANCE:
            agrees = largest <= _LOGPROB_TOLERANCE[self.dtype]
        else:
            agrees = float(difference.exp().mean()) <= _MEAN_RATIO_TOLERANCE
        if agrees:  # not where there are NaNs
            return
        what = "states" if isinstance(self.forward, SequenceScores) else "log-probabilities"
        is_tested = self.base.config.model_type in TESTED_FAMILIES
        covered = "" if is_tested else "no test of posttrain covers this family, and "
        raise UnsupportedModelError(
            f"{self.config.model_type}: {covered}it did not pass the proof at load: a sequence "
            f"that is {other.name} has other {what} than alone, by up to {largest:.3g}. "
            f"{self._first_difference(alone, other)}. It would be trained as another model than it is"
        )

    @property
    def _state_tolerance(self) -> float:
        return _STATE_TOLERANCE.get(self.dtype, _STATE_TOLERANCE_16_BIT)

    def _first_difference(self, alone: TracedPass, other: TracedPass) -> str:
        row_of = {place: row for row, place in enumerate(alone.places)}
        rows = torch.tensor([row_of[place] for place in other.places])
        references = alone.trace.states()
        for name, states in other.trace.states().items():
            if len(states) != len(rows) or len(references.get(name, ())) != len(row_of):
                return f"{name} ran {len(states)} times for {len(rows)} tokens"
            expected = references[name][rows]
            size = expected.double().norm(dim=1).clamp(min=1e-30)
            off = float(((states.double() - expected).norm(dim=1) / size).max())
            if not off <= self._state_tolerance:
                return f"The first that differs is {name}, by {off:.2g} of the size of its states"
        return "Its layers agree; what comes after them differs"


class _Trace:
    def __init__(self) -> None:
        self._pieces: dict[str, list[Tensor]] = {}
        self.last_states: Tensor  # of the decoder, in its last pass

    def add(self, name: str, states: object) -> None:
        states = states[0] if isinstance(states, tuple) else states
        if isinstance(states, Tensor):
            # [1, tokens, …], or with streams before: [streams, 1, tokens, hidden size].
            tokens = states.detach().movedim(1 if len(states) == 1 else -2, 0)
            self._pieces.setdefault(name, []).append(tokens.flatten(1).cpu())

    def states(self) -> dict[str, Tensor]:
        """After each layer: [tokens, …]."""
        return {name: torch.cat(pieces) for name, pieces in self._pieces.items()}


@contextmanager
def _tracing(layers: dict[str, nn.Module], decoders: Sequence[nn.Module]) -> Iterator[_Trace]:
    trace = _Trace()

    def keep_last(_module: nn.Module, _args: Any, output: Any) -> None:
        trace.last_states = output.last_hidden_state[0].detach()

    with ExitStack() as hooks:
        for index, (name, layer) in enumerate(layers.items()):
            if index == 0:

                def before(_module: nn.Module, args: Any, options: Any) -> None:
                    trace.add("what comes before the layers", args[0] if args else options.get("hidden_states"))

                hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            hook = layer.register_forward_hook(lambda _module, _args, output, name=name: trace.add(name, output))
            hooks.callback(hook.remove)
        for decoder in decoders:
            hooks.callback(decoder.register_forward_hook(keep_last).remove)
        yield trace


@contextmanager
def _own_forwards(base: nn.Module) -> Iterator[None]:
    """The layers of `transformers`, where kernels have replaced them. Not over sharded weights, which these know how to
    use."""
    replaced = {module: module.forward for module in base.modules() if hasattr(module.forward, "own_forward")}
    if any(isinstance(parameter, DTensor) for parameter in base.parameters()):
        replaced = {}
    for module, forward in replaced.items():
        module.forward = forward.own_forward
    try:
        yield
    finally:
        for module, forward in replaced.items():
            module.forward = forward


@contextmanager
def _own_attention(base: nn.Module) -> Iterator[None]:
    """The attention and the recurrence that transformers spells out, of the same modules."""
    configs = {id(module.config): module.config for module in base.modules() if hasattr(module, "config")}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}  # type: ignore[union-attr]
    try:
        for config in configs.values():
            config._attn_implementation_internal = "eager"  # type: ignore[union-attr]
        with recurrence_of_transformers():
            yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]  # type: ignore[union-attr]


@contextmanager
def _precision_of_training(base: Any) -> Iterator[None]:
    """As `Head.hidden` computes: with 16-bit weights, the states between layers are fp32."""
    embedding = base.get_input_embeddings()
    dtype: torch.dtype = embedding.weight.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    hook = embedding.register_forward_hook(lambda _module, _args, output: output.float())
    try:
        with torch.autocast(embedding.weight.device.type, dtype, cache_enabled=False):
            yield
    finally:
        hook.remove()
