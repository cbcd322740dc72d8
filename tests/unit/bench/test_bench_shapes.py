"""Named shapes: as large as their name says, random but reproducible, and with a tokenizer that fits."""

import re
from pathlib import Path

import decode
import dpo_step
import grpo_step
import pytest
import torch
import train
from shapes import (
    EOS,
    SHAPES,
    as_text,
    chosen_model,
    make_model,
    make_tokenizer,
    num_parameters,
    open_model,
    vocab_size_of,
)
from workloads import workload

from posttrain.errors import InputError
from posttrain.models.attention_interface import attention_context
from posttrain.policy.packed import PackedAttention, Segment


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("tiny", "llama-small")])
def test_shape_has_the_parameter_count_of_its_name(name: str) -> None:
    billions = re.search(r"-([\d.]+)b", name)
    assert billions
    assert num_parameters(name) / 1e9 == pytest.approx(float(billions[1]), rel=0.06)


def test_the_qwen_shapes_have_what_sets_the_family_apart() -> None:
    small, large = (make_model(name, "meta", torch.bfloat16) for name in ("qwen-1.5b", "qwen-8b"))
    names = dict(small.named_parameters())
    assert {f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"} <= names.keys()
    assert "lm_head.weight" not in names
    assert any("q_norm" in name for name, _ in large.named_parameters())
    assert "lm_head.weight" in dict(large.named_parameters())


def test_weights_depend_on_the_seed_and_not_on_the_attention() -> None:
    ours, theirs, other = (
        make_model("tiny", "cpu", torch.float32, seed, attention=attention).state_dict()
        for seed, attention in ((3, "posttrain"), (3, "sdpa"), (4, "sdpa"))
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["lm_head.weight"], other["lm_head.weight"])


def test_logits_have_a_spread_of_about_one() -> None:
    model = make_model("tiny", "cpu", torch.float32)
    ids = torch.randint(3, 512, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attention_context(PackedAttention([Segment(0, 40)], torch.device("cpu"))):
        logits = model(input_ids=ids, use_cache=False).logits
    assert 0.5 < float(logits.std()) < 2.0
    assert float(logits.abs().max()) < 20


def test_any_ids_survive_the_tokenizer() -> None:
    tokenizer = make_tokenizer(512)
    ids = [*range(3, 512), 25, 20, 2, EOS]  # t25 and t20 begin like the name that token 2 could have
    assert tokenizer(as_text(ids))["input_ids"] == ids
    assert max(tokenizer.get_vocab().values()) == 511
    assert tokenizer.eos_token_id == EOS


def test_a_folder_may_stand_for_a_shape(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, tokenizer = open_model("tiny", "cpu", torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded, read = open_model(folder, "cpu", torch.float32)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert read.get_vocab() == tokenizer.get_vocab()
    assert vocab_size_of(folder) == vocab_size_of("tiny") == 512


def test_unknown_shape_or_folder_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    assert chosen_model("tiny", None) == "tiny"
    with pytest.raises(InputError, match="nowhere"):
        chosen_model("tiny", tmp_path / "nowhere")
    for script in (decode, train, grpo_step, dpo_step):
        with pytest.raises(InputError, match=r"'llama-9b' is neither .* tiny, llama-small"):
            script.main(["--shape", "llama-9b"])


# -- workloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("512x128+900", (512, 1, 512, 128, 512 * 900)), ("64x512+512-g16", (4, 16, 64, 512, 64 * 512))],
)
def test_workload_name_gives_samples_prompt_and_new_tokens(name: str, sizes: tuple[int, ...]) -> None:
    work = workload(name)
    found = (work.num_prompts, work.num_samples, work.num_sequences, work.prompt_tokens, work.num_new_tokens)
    assert found == sizes


def test_the_long_tail_is_seeded_bounded_and_longer_than_its_middle() -> None:
    work = workload("long-tail")
    assert work.limits == workload("long-tail").limits != workload("long-tail", seed=1).limits
    assert len(work.limits) == 512
    assert min(work.limits) >= 50
    assert 1500 < max(work.limits) <= 2000
    assert sum(work.limits) / 512 > 1.3 * sorted(work.limits)[256]
    assert not work.is_uniform


def test_prompts_are_the_same_for_every_engine_and_hold_no_special_token() -> None:
    work = workload("3x20+4")
    assert work.prompts(512) == work.prompts(512)
    assert min(min(prompt) for prompt in work.prompts(512)) >= 3
    assert work.cut_to(2).limits == (2, 2, 2)


@pytest.mark.parametrize("name", ["512x128", "0x4+4", "4x4+9..3", "6x4+4-g4", "4x4+4-g0", "fast"])
def test_a_workload_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=name.replace("+", r"\+")):
        workload(name)
