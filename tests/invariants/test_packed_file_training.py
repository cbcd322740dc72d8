"""DPO from a file of packed pairs, from rows and from traces: the same pairs give the same training.

A pack changes which pairs share a forward pass, never the loss, the gradient or the weights beyond the last bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import (
    Row,
    assert_resumes,
    dpo,
    preferences,
    results_of,
    rows_of,
    run,
    same_up_to_rounding,
    write_rows,
)

from posttrain.cli.main import main
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import load_pair_dataset
from posttrain.models.loading import load_tokenizer

STEPS = 4
PACK_SIZE = 128
PACKING = ("train/packing_factor", "train/packing_efficiency")


@pytest.fixture(scope="module")
def packs(model: Path, data: Path) -> Path:
    file = data / "packs.parquet"
    arguments = ["data", "pack", str(data / "pairs.jsonl"), str(file), "--model", str(model)]
    assert main([*arguments, "--pack-size", str(PACK_SIZE), "--algorithm", "first_fit_decreasing"]) == 0
    return file


def entry(name: str, file: Path) -> str:
    return f"data.train={{dataset_name: {name}, data_path: {file}}}"


def close(rows: list[Row], expected: list[Row]) -> None:
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        names = [name for name in row if name not in PACKING and name in other]
        assert "step" in names
        assert {n: row[n] for n in names} == same_up_to_rounding({n: other[n] for n in names})


def test_packed_file_trains_like_single_pairs(model: Path, data: Path, packs: Path, tmp_path: Path) -> None:
    chat = ChatFormat(load_tokenizer(str(model)))
    packed_entry = {"dataset_name": "PackedPairs", "data_path": str(packs)}
    order = [
        int(p.id.partition(":")[2]) for p in load_pair_dataset(packed_entry, None, chat, max_total_tokens=64, seed=0)
    ]
    assert order != sorted(order)
    rows = preferences(22)
    in_order = write_rows(tmp_path / "in_order.jsonl", [rows[index] for index in order])

    one_by_one, packed = tmp_path / "one_by_one", tmp_path / "packed"
    plain = [entry("PreferenceDataset", in_order), "data.shuffle=false", "policy.train_micro_batch_size=1"]
    assert run([*dpo(model, data, one_by_one, steps=STEPS), *plain]) == 0
    assert run([*dpo(model, data, packed, steps=STEPS), entry("PackedPairs", packs), "data.shuffle=false"]) == 0
    close(results_of(packed), results_of(one_by_one))
    trained = [row for row in rows_of(packed) if "train/loss" in row]
    assert len(trained) == STEPS
    assert all(row["train/packing_factor"] > 1 and 0 < row["train/packing_efficiency"] <= 100 for row in trained)
    assert not any(name in row for row in rows_of(one_by_one) for name in PACKING)


@pytest.mark.parametrize("algorithm", ["concatenative", "first_fit_shuffle"])
def test_packing_on_the_fly_trains_like_no_packing(model: Path, data: Path, tmp_path: Path, algorithm: str) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    settings = [
        "enabled=true",
        f"algorithm={algorithm}",
        f"train_mb_tokens={PACK_SIZE}",
        f"logprob_mb_tokens={PACK_SIZE}",
    ]
    assert run(dpo(model, data, plain, steps=STEPS)) == 0
    chosen = [f"policy.sequence_packing.{setting}" for setting in settings]
    assert run([*dpo(model, data, packed, steps=STEPS), *chosen]) == 0
    close(results_of(packed), results_of(plain))
    assert all(row["train/packing_efficiency"] > 50 for row in rows_of(packed) if "train/loss" in row)


def test_training_from_packs_resumes_exactly(model: Path, data: Path, packs: Path, tmp_path: Path) -> None:
    def arguments(folder: Path) -> list[str]:
        return [*dpo(model, data, folder, steps=6), entry("PackedPairs", packs)]

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run(arguments(whole)) == 0
    assert_resumes(arguments, whole, resumed, 4, 6)


def test_packs_of_another_template_are_refused(
    model: Path, data: Path, packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "policy.tokenizer.chat_template=null"
    assert run([*dpo(model, data, tmp_path / "run", steps=1), entry("PackedPairs", packs), other]) == 64
    assert "its tokens were made with another chat template" in capsys.readouterr().err


def test_traces_train_like_their_pairs(model: Path, data: Path, tmp_path: Path) -> None:
    rows = preferences(22)
    traces: list[dict[str, Any]] = []
    for row in rows:
        traces.append({"question": row["prompt"], "answer": row["rejected"], "score": 0.25})
        traces.append({"question": row["prompt"], "answer": "between", "score": 0.5})
        traces.append({"question": row["prompt"], "answer": row["chosen"], "score": 0.75})
    file = write_rows(tmp_path / "traces.jsonl", traces)
    from_traces, from_pairs = tmp_path / "from_traces", tmp_path / "from_pairs"
    columns = "{input: question, output: answer, reward: score}"
    settings = f"data.train={{dataset_name: TracePairs, data_path: {file}, trace_columns: {columns}}}"
    assert run([*dpo(model, data, from_traces, steps=STEPS), settings]) == 0
    assert run(dpo(model, data, from_pairs, steps=STEPS)) == 0
    assert results_of(from_traces) == results_of(from_pairs)
