"""Adapters whose tokenizer is the base model's with tokens more, and those that speak of other tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import byte_tokenizer
from tiny_server import options_for, running, save_adapter, save_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from posttrain.apps.serve import loading, sessions
from posttrain.errors import InputError

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[answer]"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "mine")


@pytest.fixture
def adapter_with(model: Path, tmp_path: Path) -> Callable[[Any], Path]:
    """An adapter that was saved with a tokenizer."""

    def save(tokenizer: Any) -> Path:
        folder = save_adapter(tmp_path / "polite", model, seed=1)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def tokenizer(model: Path) -> Any:
    found = AutoTokenizer.from_pretrained(model)
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any, **named: Any) -> Any:
        raise AssertionError("weights were loaded before the tokenizers were compared")

    monkeypatch.setattr(sessions, "load_engine", load)


def test_added_tokens_are_reported_and_not_used(
    model: Path, tokenizer: Any, adapter_with: Callable[[Any], Path]
) -> None:
    base_ids = AutoTokenizer.from_pretrained(model).get_vocab()
    tokenizer.add_special_tokens({"pad_token": "<pad-1>"})
    tokenizer.add_tokens([f"<more-{n}>" for n in range(7)])
    printed: list[str] = []
    with running(options_for(model, adapters={"polite": str(adapter_with(tokenizer))}), printed) as server:
        polite = server.service.models["polite"]
    (warning,) = [line for line in printed if line.startswith("warning")]
    assert "'<pad-1>', '<more-0>', '<more-1>', '<more-2>', '<more-3>' and 3 more" in warning
    assert polite.tokenizer.get_vocab() == base_ids
    text, ids = polite.chat.prompt([{"role": "user", "content": "<pad-1>"}])
    assert text == "[user] <pad-1>[answer]"
    assert max(ids) < len(base_ids)


def test_eos_token_is_the_adapters(model: Path, tokenizer: Any, adapter_with: Callable[[Any], Path]) -> None:
    tokenizer.add_tokens(["<more>"])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(65)
    service = loading.build_service(options_for(model, adapters={"polite": str(adapter_with(tokenizer))}))
    assert service.models["polite"].chat.stop_token_ids == (65,)
    assert service.models["tiny"].chat.stop_token_ids != (65,)


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (TEMPLATE + "<more>", {}),
        (TEMPLATE + "{{ pad_token }}", {"pad_token": "<more>"}),
        (TEMPLATE, {"eos_token": "<more>"}),
    ],
)
@pytest.mark.usefixtures("nothing_is_loaded")
def test_adapter_that_needs_an_added_token_is_refused(
    model: Path, tokenizer: Any, adapter_with: Callable[[Any], Path], template: str, special: dict[str, str]
) -> None:
    tokenizer.add_tokens(["<more>", "<not needed>"])
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="'<more>', a token that"):
        loading.build_service(options_for(model, adapters={"polite": str(adapter_with(tokenizer))}))


def _exchanged(state: dict[str, Any]) -> None:
    vocabulary = state["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def _merged(state: dict[str, Any]) -> None:
    """One more token, which ordinary text becomes."""
    state["model"]["vocab"]["he"] = 260
    state["model"]["merges"].append(["h", "e"])


@pytest.mark.parametrize("change", [_exchanged, _merged])
@pytest.mark.usefixtures("nothing_is_loaded")
def test_different_vocabulary_is_refused(
    model: Path, adapter_with: Callable[[Any], Path], change: Callable[[dict[str, Any]], None]
) -> None:
    import json

    from tokenizers import Tokenizer

    plain = byte_tokenizer()
    state = json.loads(plain.backend_tokenizer.to_str())
    change(state)
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=plain.eos_token, pad_token=plain.pad_token
    )
    with pytest.raises(InputError, match="another vocabulary"):
        loading.build_service(options_for(model, adapters={"polite": str(adapter_with(other))}))
