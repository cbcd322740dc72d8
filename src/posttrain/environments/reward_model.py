"""A trained reward model as a judge: answers are scored in this process, packed, in batches, on a GPU or the CPU.

The conversation is written with the reward model's own chat template and tokenised with its own tokenizer, whole, as it
was when the model was trained; the policy's template is not used. Answers to one prompt share its
computation. What cannot be scored comes back unscored with the reason.

The weights are loaded when the environment is built, so that a wrong folder fails the run before its first step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from posttrain.config.rewards import RewardModelRewardConfig
from posttrain.data.chat import WholeChatFormat, shared_length
from posttrain.data.errors import DataError
from posttrain.data.packing import MicroBatching, plan_micro_batches
from posttrain.data.reward_values import NEEDED, is_reward
from posttrain.environments.settings import RewardSettings
from posttrain.errors import InputError
from posttrain.models.attention_interface import attention_context
from posttrain.models.loading import DTYPES, SettingsError, load_tokenizer
from posttrain.policy.head import UnsupportedModelError, without_adapter_wrapper
from posttrain.policy.model_support import check_length, observe_layers
from posttrain.policy.packed import PackedRow
from posttrain.policy.reward_head import SequenceScores, load_reward_model
from posttrain.roles import Progress
from posttrain.types import Completion, Message, Score, Task, TokenBatch

IN_A_CHECKPOINT = Path("policy/weights/model")
Ids = Sequence[int]


def reward_model_environment(settings: RewardSettings) -> RewardModelScorer:
    """The judge that a block of type `reward_model` names. Raises `InputError` if it cannot be used."""
    config = settings.config
    assert isinstance(config, RewardModelRewardConfig)
    field = f"{settings.path}.model_name"
    # A folder relative to the config's, a checkpoint's folder for the model in it, or a name of the hub.
    folder = settings.base_folder / Path(config.model_name).expanduser()
    folder = folder / IN_A_CHECKPOINT if (folder / IN_A_CHECKPOINT).is_dir() else folder
    name = str(folder) if folder.is_dir() else config.model_name
    device = _device(config.device, settings.path)
    try:
        tokenizer = load_tokenizer(name, field)
        model = _load(name, DTYPES[config.precision] if config.precision else None, device, field)
        scores, base = SequenceScores(model), without_adapter_wrapper(model)
        longest = config.max_model_len or int(base.config.get_text_config().max_position_embeddings)
        with torch.no_grad():
            observe_layers(base, scores.head)
        check_length(base.config.get_text_config(), longest)
    except (SettingsError, UnsupportedModelError) as error:
        raise InputError(str(error) if str(error).startswith(field) else f"{field}: {error}") from error
    return RewardModelScorer(scores, WholeChatFormat(tokenizer), device, longest, config)


@dataclass
class RewardModelScorer:
    """Implements `roles.Environment`."""

    _scores: SequenceScores | None  # None: it has been closed
    _chat: WholeChatFormat
    _device: torch.device
    _max_tokens: int
    _config: RewardModelRewardConfig

    def score(
        self, tasks: Sequence[Task], completions: Sequence[Completion], progress: Progress | None = None
    ) -> list[Score]:
        """One score per completion, in their order."""
        if seen := next((task for task in tasks if task.images), None):
            raise InputError(f"task {seen.id!r} has images, and reward models see none: use another environment")
        read = [self._read(task, completion) for task, completion in zip(tasks, completions, strict=True)]
        rows = [row for row, ids in enumerate(read) if not isinstance(ids, Score)]
        numbers = self._forward([task.prompt_ids for task in tasks], cast(list[Ids], read), rows, progress)
        if progress is not None:
            progress(len(read) - len(rows))
        return [ids if isinstance(ids, Score) else self._as_score(numbers[row]) for row, ids in enumerate(read)]

    def close(self) -> None:
        """Free the memory."""
        self._scores = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _read(self, task: Task, completion: Completion) -> Ids | Score:
        """The conversation in the reward model's format, or why it cannot be scored."""
        messages, answer = conversation_of(task, completion)
        if not messages:
            return Score(None, error="the task has no messages, which a reward model's chat template writes")
        try:
            prompt, response = self._chat.turn(messages, answer)
        except DataError as error:
            return Score(None, error=_one_line(str(error)))
        except (TypeError, UnicodeError) as error:  # raised by tokenizers for invalid text, e.g. lone surrogates
            return Score(None, error=_one_line(f"the conversation cannot be tokenised: {error}"))
        length = len(prompt) + len(response)
        if length < 2:
            return Score(None, error="the conversation has no text that could be scored")
        if length > self._max_tokens:
            return Score(
                None, error=f"the conversation has {length} tokens; the reward model takes at most {self._max_tokens}"
            )
        return [*prompt, *response]

    def _forward(
        self, prompts: Sequence[Ids], sequences: Sequence[Ids], rows: Sequence[int], progress: Progress | None
    ) -> dict[int, float]:
        """The score of each of `rows`. `prompts` only tells which of them may share a prefix."""
        assert self._scores is not None, "the environment has been closed"
        if not rows:
            return {}
        batch = _sharing_batch([tuple(prompts[row]) for row in rows], [sequences[row] for row in rows])
        budget = MicroBatching(max_tokens=self._config.max_batch_tokens)
        numbers: dict[int, float] = {}
        [plan] = plan_micro_batches(batch, budget)
        for chosen in plan:
            found = self._pass(batch.select(chosen))
            numbers.update(zip((rows[place] for place in chosen), found.tolist(), strict=True))
            if progress is not None:
                progress(len(chosen))
        return numbers

    @torch.no_grad()
    def _pass(self, part: TokenBatch) -> Tensor:
        assert self._scores is not None
        row = PackedRow.build(part, self._device, reads_own_token=True)
        with attention_context(row.attention):
            scores: Tensor = self._scores(row)
        return scores[row.last].cpu()

    def _as_score(self, number: float) -> Score:
        mean, std = self._config.score_mean, self._config.score_std
        reward = (number - mean) / std
        if not is_reward(number) or not is_reward(reward):
            return Score(None, error=f"the reward model's score is {number}: {NEEDED}")
        return Score(number) if mean == 0 and std == 1 else Score(reward, parts={"score": number})


def conversation_of(task: Task, completion: Completion) -> tuple[list[Message], str]:
    """The messages before the last answer, and that answer. Turns of an environment are between the model's turns."""
    if completion.conversation is None or not completion.conversation.utterances:
        return list(task.messages), completion.text
    turns: list[Message] = [{"role": turn.role, "content": turn.text} for turn in completion.conversation.utterances]
    last = max((i for i, message in enumerate(turns) if message["role"] == "assistant"), default=None)
    if last is None:
        return list(task.messages), completion.text
    return [*task.messages, *turns[:last]], turns[last]["content"]


def _sharing_batch(prompts: Sequence[tuple[int, ...]], sequences: Sequence[Ids]) -> TokenBatch:
    """Sequences of one prompt are split after their common prefix, which is computed once."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    shared: list[Ids] = []
    prompt_of = [0] * len(sequences)
    for index, rows in enumerate(groups.values()):
        first = sequences[rows[0]]
        length = min(shared_length(first, sequences[row][:-1]) for row in rows)
        shared.append(first[: max(length, 1)])
        for row in rows:
            prompt_of[row] = index
    responses = [sequences[row][len(shared[prompt_of[row]]) :] for row in range(len(sequences))]
    return TokenBatch.build(shared, responses, prompt_of)


def _one_line(text: str) -> str:
    return " ".join(text.encode(errors="replace").decode().split())


# -- loading -----------------------------------------------------------------------------------------------------------


def _device(setting: str, path: str) -> torch.device:
    if setting == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{path}.device is cuda, but torch sees no CUDA device; use cpu or auto")
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(setting)


def _load(name: str, dtype: torch.dtype | None, device: torch.device, field: str) -> nn.Module:
    """The reward model; `dtype` None: in the precision of its saved weights. Rounding would undo some training."""
    adapters = Path(name) / "adapter_config.json"
    if not adapters.is_file():
        model = load_reward_model(name, dtype or "auto", device, seed=None, pad_token_id=None, field=field)
        return model.eval().requires_grad_(False)
    from peft import PeftModel
    from safetensors import safe_open

    if dtype is None:
        with safe_open(Path(name) / "adapter_model.safetensors", "pt") as saved:
            dtype = saved.get_tensor(next(iter(saved.keys()))).dtype
    base = json.loads(adapters.read_text())["base_model_name_or_path"]
    # The adapter files include the scoring layer, which replaces the one initialised here.
    model = load_reward_model(base, dtype, device, seed=0, pad_token_id=None, field=f"{field} (the model under {name})")
    # Not merged into the weights: the scores are then those that training and validation saw.
    adapted: nn.Module = PeftModel.from_pretrained(model, name, autocast_adapter_dtype=False)
    return adapted.eval().requires_grad_(False)
