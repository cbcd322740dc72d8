"""The chat template that a run was trained with is in its checkpoint, and `AutoTokenizer` finds it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model
from transformers import AutoTokenizer

from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError
from posttrain.policy.checkpoint import files
from posttrain.policy.checkpoint.writer import CheckpointWriter

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
OWN = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[answer] {% endif %}"
)
WITH_SETTINGS = (
    "{% if quoted %}{{ quoted }}{% endif %}{% for m in messages %}{{ m['content'] }}{{ names | join('/') }}{% endfor %}"
    "{% if add_generation_prompt and not enable_thinking %}<think></think>{% endif %}{% if limit is none %}!{% endif %}"
    "{{ depth.of if depth else '' }}"
)
SETTINGS: dict[str, Any] = {
    "enable_thinking": False,
    "quoted": 'say "hi" {% raw %}\n',
    "names": ["a", "b"],
    "limit": None,
    "depth": {"of": 3},
}


def saved(folder: Path, chat: ChatFormat) -> Any:
    """The tokenizer that `from_pretrained` finds beside the weights of a checkpoint."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat.recorded_template
    model = tiny_model(vocab_size=len(tokenizer))
    CheckpointWriter(model, tokenizer, None, torch.device("cpu")).save(folder, optimizer=False)
    files.load(folder, model, tokenizer, None)
    both = [AutoTokenizer.from_pretrained(folder / place) for place in (files.WEIGHTS, files.TOKENIZER)]
    assert both[0].chat_template == both[1].chat_template
    return both[0]


def rendered(tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False))


@pytest.mark.parametrize(
    ("template", "kwargs"),
    [("default", {}), (OWN, {}), (WITH_SETTINGS, SETTINGS), ("default", {"unused": True})],
    ids=["the model's own", "a given one", "with settings", "with a setting that it ignores"],
)
def test_prompts_of_the_checkpoint_are_those_of_training(tmp_path: Path, template: str, kwargs: dict[str, Any]) -> None:
    chat = ChatFormat(byte_tokenizer(), template, kwargs)
    tokenizer = saved(tmp_path, chat)
    text, ids = chat.prompt(MESSAGES)
    assert rendered(tokenizer) == text
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids


def test_template_from_a_file_is_recorded_as_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(OWN)
    tokenizer = saved(tmp_path / "checkpoint", ChatFormat(byte_tokenizer(), str(file)))
    file.unlink()
    assert tokenizer.chat_template == OWN


def test_no_template_is_recorded_as_none_even_if_the_model_had_one(tmp_path: Path) -> None:
    assert saved(tmp_path, ChatFormat(byte_tokenizer(), None)).chat_template is None


def test_recorded_settings_are_defaults_that_a_caller_can_still_change(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, ChatFormat(byte_tokenizer(), WITH_SETTINGS, SETTINGS))
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False, enable_thinking=True)
    assert "<think>" in rendered(tokenizer)
    assert "<think>" not in text


def test_setting_that_no_template_can_hold_is_refused() -> None:
    with pytest.raises(DataError, match="chat_template_kwargs: 'when'"):
        _ = ChatFormat(byte_tokenizer(), OWN, {"when": object()}).recorded_template
