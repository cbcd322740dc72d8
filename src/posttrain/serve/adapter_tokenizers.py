"""The tokenizer of an adapter over a base model: its own chat template, with token ids that the base model has.

An adapter is often saved with a tokenizer that was given one token more, for padding say. The base model has no row for it,
or one that nothing was learnt in, so conversations are written with the base model's tokens. Tokenizers only: no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.data.chat import ChatFormat
from posttrain.models.accepted_names import ResolvedModel
from posttrain.models.loading import load_tokenizer
from posttrain.serve.models import ServedAdapter, ServeError

_MOST_NAMED = 5  # of the tokens that the base model does not have


def load_adapter_tokenizer(
    name: str, adapter: ServedAdapter, main: ResolvedModel, say: Callable[[str], None]
) -> Any | None:
    """None: the adapter brought none. ServeError where its tokens are not those of the main model."""
    if adapter.tokenizer is None:
        return None
    own = load_tokenizer(adapter.tokenizer, f"adapter {name!r}")
    base = load_tokenizer(main.tokenizer, f"model {main.text!r}")
    own_ids, base_ids = own.get_vocab(), base.get_vocab()
    if own_ids == base_ids:
        return own
    extra = set(own_ids) - set(base_ids)
    # A token that was not added from outside is made of others by merging: ordinary text becomes other tokens, too.
    if not base_ids.items() <= own_ids.items() or not extra <= set(own.get_added_vocab()):
        raise ServeError(
            f"--adapter {name}: the tokenizer in {adapter.tokenizer} has another vocabulary than that of {main.text}"
        )
    template = ChatFormat(own).template
    if needed := _needed(extra, own, template):
        raise ServeError(
            f"--adapter {name}: its conversations are written with {needed!r}, a token that {main.text} does not have; merge "
            "the adapter into the base model that it was trained on (posttrain convert --merge-lora) and serve that"
        )
    shown = sorted(extra, key=own_ids.__getitem__)
    more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    say(
        f"warning: the tokenizer of adapter {name} has tokens that {main.text} does not have, and is served without them: "
        f"{', '.join(map(repr, shown[:_MOST_NAMED]))}{more}"
    )
    base.chat_template = template
    base.eos_token = own.eos_token
    if own.bos_token in base_ids:
        base.bos_token = own.bos_token
    return base


def warn_of_unused_template(name: str, tokenizer: Any, main: ResolvedModel, say: Callable[[str], None]) -> None:
    """For a server that asks every adapter in the main model's way."""
    base = load_tokenizer(main.tokenizer, f"model {main.text!r}")
    if (tokenizer.chat_template, tokenizer.eos_token) != (base.chat_template, base.eos_token):
        say(
            f"warning: adapter {name} brought a chat template of its own, and vLLM asks every adapter in that of {main.text}: "
            "its answers may be worse than they should be; --backend native uses the adapter's own"
        )


def _needed(extra: set[str], tokenizer: Any, template: str | None) -> str | None:
    """One of the `extra` tokens that a conversation cannot be written without: in the template, by name, or at the end."""
    source = template or ""
    named = [token for role, token in tokenizer.special_tokens_map.items() if role in source or role == "eos_token"]
    return min((token for token in extra if token in named or token in source), default=None)
