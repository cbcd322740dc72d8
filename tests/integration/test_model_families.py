"""Every family of models through a whole run: GRPO, resume, DPO, LoRA, conversion, serving. docs/models.md lists them.

That sampling is `transformers.generate`, and that log-probabilities and gradients are those of the model's own forward
pass, is tested for the same tiny models in `unit/engines/test_native_families.py`,
`invariants/test_sampler_equals_trainer.py` and `unit/policy/test_packed_rows.py`.
"""

from __future__ import annotations

import json
import math
import urllib.request
from pathlib import Path

import generated_pages
import pytest
import tiny_models
import torch
from generated_pages import CHECKS, FAMILIES, PAGES, refreshed
from safetensors.torch import load_file
from tiny_models import byte_tokenizer, logits_of, tiny_model
from tiny_runs import LORA, assert_resumes, dpo, grpo, rows_of, run
from tiny_server import options_for, running
from transformers import AutoConfig, AutoTokenizer

from posttrain.cli.main import main
from posttrain.models.loading import auto_class_of

LENGTHS = ["policy.max_total_sequence_length=96", "policy.generation.max_new_tokens=8"]
SAVE_EACH_STEP = ["checkpointing.save_period=1", "checkpointing.metric_name=null"]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param.name)
    save_model(request.param.name, folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == request.param.model_type
    return folder


def save_model(family: str, folder: Path) -> None:
    tokenizer = byte_tokenizer()
    special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    tiny_model(family, vocab_size=len(tokenizer), **special).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family.endswith("-vision"):
        (folder / "preprocessor_config.json").write_text('{"do_resize": true}')


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of GRPO, a checkpoint after each."""
    folder = tmp_path_factory.mktemp("grpo")
    assert run(grpo_command(model, data, folder)) == 0
    return folder


@pytest.fixture(scope="module")
def converted(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "hf"
    assert main(["convert", str(trained), "--to", str(folder)]) == 0
    return folder


def grpo_command(model: Path, data: Path, folder: Path) -> list[str]:
    return [*grpo(model, data, folder, steps=2), *LENGTHS, *SAVE_EACH_STEP, "grpo.val_period=0"]


def checkpoint(run_folder: Path, step: int) -> Path:
    return run_folder / f"step_{step}" / "policy" / "weights" / "model"


@pytest.mark.invariant
def test_grpo_steps_change_the_model(model: Path, trained: Path) -> None:
    steps = rows_of(trained)
    assert [row["step"] for row in steps] == [1, 2]
    assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in steps)
    # The sampler's probabilities against the trainer's: the mean ratio is 1 where the two compute the same.
    assert all(row["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4) for row in steps)
    assert not torch.allclose(logits_of(model), logits_of(checkpoint(trained, 2)), atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3.5-vision", "gpt-oss", "nemotron-h"])
def test_a_step_of_a_model_of_today(family: str, data: Path, tmp_path: Path) -> None:
    """Short enough for `make test`: a delta net inside a vision model, sinks and experts, Mamba-2."""
    save_model(family, tmp_path / "model")
    short = ["checkpointing.enabled=false", "grpo.val_period=0", "grpo.num_prompts_per_step=2"]
    sizes = ["policy.train_global_batch_size=8", *LENGTHS]
    assert run([*grpo(tmp_path / "model", data, tmp_path / "run", steps=1), *short, *sizes]) == 0
    [row] = rows_of(tmp_path / "run")
    assert row["train/grad_norm"] > 0
    assert row["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.invariant
def test_resumed_run_equals_the_uninterrupted_one(model: Path, trained: Path, data: Path, tmp_path: Path) -> None:
    assert_resumes(lambda folder: grpo_command(model, data, folder), trained, tmp_path / "run", 2)


def test_a_dpo_step_starts_at_the_reference_and_leaves_it(model: Path, data: Path, tmp_path: Path) -> None:
    assert run([*dpo(model, data, tmp_path / "dpo", steps=2), *LENGTHS, *SAVE_EACH_STEP, "dpo.val_period=0"]) == 0
    first, second = (row["train/preference_loss"] for row in rows_of(tmp_path / "dpo") if "train/loss" in row)
    assert first == pytest.approx(math.log(2), abs=1e-4)
    assert abs(second - math.log(2)) > 3e-4


def test_lora_trains_and_is_merged_or_kept(model: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    lora = [*LORA, "policy.optimizer.kwargs.lr=5e-2", "checkpointing.save_consolidated=true"]
    command = [*grpo(model, data, folder, steps=1), *LENGTHS, *SAVE_EACH_STEP, *lora, "grpo.val_period=0"]
    assert run(command) == 0
    adapter = checkpoint(folder, 1)
    expected = logits_of(model, adapter)
    assert not torch.allclose(expected, logits_of(model), atol=1e-2), "the adapter does something"
    torch.testing.assert_close(logits_of(folder / "step_1" / "hf"), expected, rtol=1e-3, atol=1e-3)
    assert main(["convert", str(folder), "--to", str(tmp_path / "adapter")]) == 0
    assert torch.equal(logits_of(model, tmp_path / "adapter"), expected)


def test_converted_model_has_the_logits_of_the_checkpoint(trained: Path, converted: Path) -> None:
    assert torch.equal(logits_of(converted), logits_of(checkpoint(trained, 2)))
    lineage = json.loads((converted / "conversion.json").read_text())
    assert lineage["verification"]["how"] == "loaded"


def test_converted_model_has_the_layout_of_the_first(model: Path, converted: Path) -> None:
    """The class and all names of tensors; and what is not the language model, bit for bit."""
    config, trained = (json.loads((folder / "config.json").read_text()) for folder in (model, converted))
    assert (trained["architectures"], trained["model_type"]) == (config["architectures"], config["model_type"])
    before, after = (load_file(folder / "model.safetensors") for folder in (model, converted))
    assert before.keys() == after.keys()
    towers = [name for name in before if any(part in name for part in ("vision", "visual", "audio", "multi_modal"))]
    assert bool(towers) == ("vision_config" in config)
    assert all(torch.equal(before[name], after[name]) for name in towers)
    assert (model / "preprocessor_config.json").exists() == (converted / "preprocessor_config.json").exists()


def test_served_answer_is_that_of_transformers_generate(converted: Path) -> None:
    messages = [{"role": "user", "content": "1 + 1 = ?"}]
    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    loader = auto_class_of(AutoConfig.from_pretrained(converted))
    model = loader.from_pretrained(converted, attn_implementation="eager").eval()
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)[
        0, ids.shape[1] :
    ]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12, "logprobs": True}
    with running(options_for(converted)) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        choice = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]
    assert choice["message"]["content"] == tokenizer.decode(made, skip_special_tokens=True)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_generated_tables_of_the_documentation_are_current(page: str) -> None:
    written = (generated_pages.DOCS / page).read_text(encoding="utf-8")
    assert written == refreshed(page), "run `python tests/generated_pages.py`"


def test_every_column_of_the_table_is_a_test_over_every_family() -> None:
    assert {family.name for family in FAMILIES} <= set(tiny_models.FAMILIES)  # which the tests elsewhere run over
    for place in CHECKS.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (Path(__file__).parents[1] / file).read_text()
