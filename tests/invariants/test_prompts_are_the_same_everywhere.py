"""One conversation has the same tokens wherever it is a prompt: in SFT, DPO, GRPO and evaluation, beside the converted
model, and in the server. Each is a whole run; what is compared is what the trainer packs and what the engine samples
from.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import TEMPLATE_FAMILIES, TemplateFamily
from tiny_models import tiny_model
from tiny_runs import common, run, write_rows
from tiny_server import ENGINE, options_for
from transformers import AutoTokenizer

from posttrain.apps.serve.jobs import chat_job
from posttrain.apps.serve.loading import build_service
from posttrain.apps.serve.protocol import ChatBody
from posttrain.cli.main import main
from posttrain.engines.native import NativeEngine
from posttrain.policy.packed import PackedRow

Ids = tuple[int, ...]


def conversation(family: TemplateFamily) -> list[dict[str, str]]:
    """Text with spaces at its ends, which templates treat differently, and a turn before the last question."""
    turns = [
        {"role": "user", "content": "  What is 2+2? "},
        {"role": "assistant", "content": "4, I think."},
        {"role": "user", "content": "And 3 + 3 — in “words”?\n"},
    ]
    return [{"role": "system", "content": "Be brief. "}, *turns] if family.has_system else turns


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Ids]]:
    """The prompts that the trainer packed, and those that the engine sampled from."""
    found: dict[str, set[Ids]] = {"trained": set(), "sampled": set()}
    build, generate = PackedRow.build, NativeEngine.generate

    def recorded_build(batch: Any, *rest: Any, **options: Any) -> Any:
        found["trained"] |= {tuple(map(int, prompt)) for prompt in batch.prompts}
        return build(batch, *rest, **options)

    def recorded_generate(self: Any, tasks: Any, *rest: Any, **options: Any) -> Any:
        found["sampled"] |= {task.prompt_ids for task in tasks}
        return generate(self, tasks, *rest, **options)

    monkeypatch.setattr(PackedRow, "build", recorded_build)
    monkeypatch.setattr(NativeEngine, "generate", recorded_generate)
    return found


@pytest.mark.parametrize("name", TEMPLATE_FAMILIES)
def test_a_prompt_has_the_same_tokens_in_training_evaluation_conversion_and_serving(
    name: str, seen: dict[str, set[Ids]], tmp_path: Path
) -> None:
    family = TEMPLATE_FAMILIES[name]
    tokenizer, messages = family.tokenizer(), conversation(family)
    expected: Ids = tuple(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, **family.kwargs)["input_ids"]
    )
    model = tmp_path / "model"
    tiny_model(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=1024
    ).save_pretrained(model)
    tokenizer.save_pretrained(model)

    def trained(kind: str, row: dict[str, Any], dataset: str, *extra: str) -> Path:
        file = write_rows(tmp_path / f"{kind}.jsonl", [row] * 2)
        settings = [
            *common(model, tmp_path / kind),
            "policy.max_total_sequence_length=900",
            "policy.train_global_batch_size=2",
            f"policy.tokenizer.chat_template_kwargs={json.dumps(family.kwargs, ensure_ascii=False)}",
            f"{kind}.max_num_steps=1",
            f"{kind}.val_period=0",
            f"data.train={{dataset_name: {dataset}, data_path: {file}}}",
            "data.validation=null",
            "checkpointing.metric_name=null",
            *extra,
        ]
        for found in seen.values():
            found.clear()
        assert run([kind, *settings]) == 0
        return tmp_path / kind

    trained(
        "sft",
        {"messages": [*messages, {"role": "assistant", "content": "six"}]},
        "ResponseDataset",
        "sft.only_unmask_final=true",
    )
    assert seen["trained"] == {expected}
    trained("dpo", {"prompt": messages, "chosen": "six", "rejected": "seven"}, "PreferenceDataset")
    assert seen["trained"] == {expected}
    (tmp_path / "rewards.py").write_text("def odd(prompt, response, reference):\n    return len(response) % 2\n")
    folder = trained(
        "grpo",
        {"input": messages, "output": "six"},
        "ResponseDataset",
        "grpo.num_prompts_per_step=1",
        "grpo.num_generations_per_prompt=2",
        "policy.generation.max_new_tokens=4",
        "data.default.env_name=mine",
        f"env.mine.function={tmp_path / 'rewards.py'}:odd",
    )
    assert seen["sampled"] == {expected}
    assert seen["trained"] in ({expected}, set())  # empty where all rewards were equal

    converted = tmp_path / "hf"
    assert main(["convert", str(folder), "--to", str(converted)]) == 0
    beside = AutoTokenizer.from_pretrained(converted)
    assert tuple(beside.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]) == expected

    service = build_service(options_for(converted, engine=replace(ENGINE, max_model_len=900)), lambda line: None)
    body = ChatBody.model_validate({"model": "tiny", "messages": messages, "max_tokens": 1})
    job = asyncio.run(chat_job(service, body, None))
    assert tuple(job.requests[0].prompt_ids) == expected

    seen["sampled"].clear()
    problems = write_rows(tmp_path / "problems.jsonl", [{"problem": messages, "answer": "6"}])
    evaluation = [
        f"generation.model_name={converted}",
        f"data.dataset_name={problems}",
        "generation.max_new_tokens=4",
        "generation.precision=float32",
        f"eval.save_path={tmp_path / 'eval'}",
    ]
    assert main(["eval", *evaluation]) == 0
    assert seen["sampled"] == {expected}
