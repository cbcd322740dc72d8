"""Files of packed pairs: what went in comes out, whole packs stay together, other tokenizers and templates are
refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from chat_tokenizers import CHATML, TWO_ENDS, byte_tokenizer
from pyarrow import parquet

from posttrain.cli.main import main
from posttrain.data.chat import ChatFormat, WholeChatFormat
from posttrain.data.datasets import PairDataset, load_pair_dataset
from posttrain.data.errors import DataError
from posttrain.data.packed_file import Packing, pair_cost, read_header, write_packed
from posttrain.data.row_dataset import Stream
from posttrain.types import Pair

CHAT = ChatFormat(byte_tokenizer(CHATML))
PACK_SIZE = 200


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Question {i}?",
            "chosen": "y" * (1 + 7 * i % 50),
            "rejected": "n" * (1 + 11 * i % 30),
            "chosen_reward": i,
        }
        for i in range(count)
    ]


def plain(folder: Path, count: int = 40) -> PairDataset:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
    return load_pair_dataset({"data_path": str(file)}, None, CHAT, max_total_tokens=1000, seed=0)


def packed(folder: Path, *, chat: ChatFormat = CHAT, limit: int = 1000, count: int = 40, **entry: Any) -> PairDataset:
    file = str(folder / "packs.parquet")
    write_packed(file, plain(folder, count), CHAT, Packing(PACK_SIZE, "first_fit_decreasing", 3), "pairs.jsonl", {})
    return load_pair_dataset(
        {"dataset_name": "PackedPairs", "data_path": file, **entry}, None, chat, max_total_tokens=limit, seed=0
    )


def content(pair: Pair) -> Pair:
    """Without where it stands."""
    return replace(pair, draw=0, pack=-1)


def test_every_pair_comes_back_as_it_was(tmp_path: Path) -> None:
    before = sorted(map(content, plain(tmp_path)), key=lambda pair: pair.id)
    assert sorted(map(content, packed(tmp_path)), key=lambda pair: pair.id) == before


def test_packs_are_not_overfull_and_stand_one_after_another(tmp_path: Path) -> None:
    pairs = packed(tmp_path)
    numbers = [pair.pack for pair in pairs]
    assert numbers == sorted(numbers)
    loads = Counter[int]()
    for pair in pairs:
        loads[pair.pack] += pair_cost(pair)
    assert max(loads.values()) <= PACK_SIZE
    assert len(loads) < len(pairs)
    assert pairs.pack_size == PACK_SIZE


def test_header_has_the_settings_of_the_packing(tmp_path: Path) -> None:
    pairs = packed(tmp_path)
    header = read_header(str(tmp_path / "packs.parquet"))
    costs = [pair_cost(pair) for pair in pairs]
    assert (header.algorithm, header.seed, header.num_pairs) == ("first_fit_decreasing", 3, 40)
    assert header.num_packs == pairs[39].pack + 1
    numbers = header.statistics
    assert numbers.packing_factor == pytest.approx(40 / header.num_packs)
    assert numbers.packing_efficiency == pytest.approx(100 * sum(costs) / (header.num_packs * PACK_SIZE))
    assert (numbers.dataset_max_seqlen, numbers.pack_size) == (max(costs), PACK_SIZE)


def test_shuffling_moves_whole_packs(tmp_path: Path) -> None:
    pairs = packed(tmp_path)
    passes = [[pair.pack for pair in Stream(pairs, seed).take(len(pairs))] for seed in (0, 1)]
    for numbers in passes:
        runs = [n for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1]]
        assert len(runs) == len(set(numbers)), "a pack is in one piece"
        assert Counter(numbers) == Counter(pair.pack for pair in pairs)
    assert passes[0] != passes[1]


def test_two_files_and_plain_rows_can_be_mixed(tmp_path: Path) -> None:
    pairs = plain(tmp_path)
    entries: list[dict[str, Any]] = [{"data_path": str(tmp_path / "pairs.jsonl")}]
    for number, algorithm in enumerate(("concatenative", "first_fit_shuffle")):
        file = str(tmp_path / f"packs{number}.parquet")
        write_packed(file, pairs, CHAT, Packing(PACK_SIZE, algorithm), "pairs.jsonl", {})  # type: ignore[arg-type]
        entries.append({"dataset_name": "PackedPairs", "data_path": file})
    mixed = load_pair_dataset(entries, None, CHAT, max_total_tokens=1000, seed=0)
    assert len(mixed) == 120
    assert {pair.pack for pair in mixed if pair.draw < 40} == {-1}
    first, second = ({pair.pack for pair in mixed if start <= pair.draw < start + 40} for start in (40, 80))
    assert not first & second
    order = [mixed[int(i)].pack for i in mixed.order(0, 0)]
    assert sum(n >= 0 and n != order[i - 1] for i, n in enumerate(order)) == len(first | second)


def test_what_does_not_fit_is_left_out_and_counted(tmp_path: Path) -> None:
    pairs = plain(tmp_path)
    costs = sorted(pair_cost(pair) for pair in pairs)
    size = costs[-3]
    assert costs[-4] < size < costs[-2]
    file = str(tmp_path / "small.parquet")
    header = write_packed(file, pairs, CHAT, Packing(size, "concatenative"), "here", {"tie": 2})
    assert header.dropped == {"tie": 2, f"larger than a pack of {size} tokens": 2}
    entry = {"dataset_name": "PackedPairs", "data_path": file}
    read = load_pair_dataset(entry, None, CHAT, max_total_tokens=1000, seed=0)
    assert (len(read), read.dropped) == (38, header.dropped)


def test_pairs_too_long_for_the_run_are_left_out_and_counted(tmp_path: Path) -> None:
    lengths = [len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) for p in plain(tmp_path)]
    limit = sorted(lengths)[-6]
    pairs = packed(tmp_path, limit=limit)
    assert pairs.dropped == {f"longer than {limit} tokens": sum(length > limit for length in lengths)}


@pytest.mark.parametrize(
    ("chat", "what"),
    [
        (ChatFormat(byte_tokenizer(CHATML, merges=(("a", "a"),))), "another tokenizer"),
        (ChatFormat(byte_tokenizer(TWO_ENDS)), "another chat template"),
        (ChatFormat(byte_tokenizer(CHATML), "default", {"style": "terse"}), "another chat template"),
    ],
)
def test_tokens_of_another_tokenizer_or_template_are_refused(tmp_path: Path, chat: ChatFormat, what: str) -> None:
    with pytest.raises(DataError, match=f"packs.parquet: its tokens were made with {what}"):
        packed(tmp_path, chat=chat)


def test_packs_are_refused_for_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a reward model reads whole conversations; use the rows"):
        packed(tmp_path, chat=WholeChatFormat(byte_tokenizer(CHATML)))


def test_files_that_are_no_packs_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.parquet"
    parquet.write_table(pa.table({"a": [1]}), other)
    for path, complaint in ((other, "not a file of packed pairs"), (tmp_path / "none.parquet", "not found")):
        entry = {"dataset_name": "PackedPairs", "data_path": str(path)}
        with pytest.raises(DataError, match=complaint):
            load_pair_dataset(entry, None, CHAT, max_total_tokens=1000, seed=0)
    with pytest.raises(DataError, match="PackedPairs has no data of its own"):
        load_pair_dataset({"dataset_name": "PackedPairs"}, None, CHAT, max_total_tokens=1000, seed=0)


def test_writing_needs_a_fitting_name_and_a_fitting_size(tmp_path: Path) -> None:
    pairs = plain(tmp_path, 3)
    with pytest.raises(DataError, match=r"ends in \.parquet"):
        write_packed(str(tmp_path / "x.npy"), pairs, CHAT, Packing(100, "concatenative"), "here", {})
    with pytest.raises(DataError, match="no pair fits into a pack of 5 tokens"):
        write_packed(str(tmp_path / "x.parquet"), pairs, CHAT, Packing(5, "concatenative"), "here", {})
    assert [file.name for file in tmp_path.iterdir()] == ["pairs.jsonl"]


# -- the command -------------------------------------------------------------------------------------------------------


def model_folder(folder: Path) -> Path:
    CHAT.tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def test_command_writes_what_training_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain(tmp_path)
    target = str(tmp_path / "out" / "packs.parquet")
    arguments = ["data", "pack", str(tmp_path / "pairs.jsonl"), target, "--model", str(model_folder(tmp_path))]
    assert main([*arguments, "--pack-size", "200", "--seed", "5", "--algorithm", "first_fit_decreasing"]) == 0
    said = capsys.readouterr().out
    header = read_header(target)
    assert f"{target}: 40 pairs in {header.num_packs} packs (first_fit_decreasing, seed 5)" in said
    assert f"packing_efficiency   {header.statistics.packing_efficiency:.2f} %" in said
    entry = {"dataset_name": "PackedPairs", "data_path": target}
    assert len(load_pair_dataset(entry, None, CHAT, max_total_tokens=1000, seed=0)) == 40

    limits = {
        ("--pack-size", "95"): {"larger than a pack of 95 tokens"},
        ("--pack-size", "156", "--max-length", "78"): {"longer than 78 tokens"},
    }
    for limit, dropped in limits.items():
        assert main([*arguments, *limit, "--json"]) == 0
        numbers = json.loads(capsys.readouterr().out)
        assert numbers["statistics"]["pack_size"] == int(limit[1])
        assert numbers["num_pairs"] + sum(numbers["dropped"].values()) == 40
        assert set(numbers["dropped"]) == dropped


def test_command_takes_keys_of_the_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.jsonl").write_text('{"q": "a", "good": "b", "bad": "c"}\n')
    arguments = ["data", "pack", str(tmp_path / "own.jsonl"), str(tmp_path / "o.parquet"), "--pack-size", "99"]
    arguments += ["--model", str(model_folder(tmp_path))]
    assert main([*arguments, "prompt_key=q", "chosen_key=good", "rejected_key=bad"]) == 0
    assert main([*arguments, "prompt_kee=q"]) == 64
    assert "did you mean 'prompt_key'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "nowhere", "--pack-size", "9"], "--model: no folder 'nowhere'"),
        (["--model", "MODEL", "--pack-size", "9"], "no pair fits into a pack of 9 tokens"),
        (["--model", "MODEL", "--pack-size", "155", "--max-length", "78"], "twice --max-length 78"),
        (["--model", "MODEL", "--pack-size", "200", "word"], "'word' is not a key of a dataset"),
    ],
)
def test_command_reports_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    plain(tmp_path)
    given = [str(model_folder(tmp_path)) if word == "MODEL" else word for word in arguments]
    code = main(["data", "pack", str(tmp_path / "pairs.jsonl"), str(tmp_path / "o.parquet"), *given])
    assert code == 64
    assert complaint in capsys.readouterr().err


def damaged(folder: Path, change: Callable[[list[dict[str, Any]]], Any], **header: Any) -> str:
    """A file of packs with rows that `data pack` would not write."""
    packed(folder, count=6)
    table = parquet.read_table(folder / "packs.parquet")
    values = table.to_pylist()
    change(values)
    known = {**json.loads(table.schema.metadata[b"posttrain"]), **header}
    schema = table.schema.with_metadata({b"posttrain": json.dumps(known).encode()})
    file = folder / "damaged.parquet"
    parquet.write_table(pa.Table.from_pylist(values, schema=schema), file)
    return str(file)


def nothing(values: list[dict[str, Any]]) -> None:
    pass


VOCABULARY = 1 + max(CHAT.tokenizer.get_vocab().values())


@pytest.mark.parametrize(
    ("change", "header", "message"),
    [
        (lambda rows: rows[2]["chosen_ids"].__setitem__(1, -1), {}, "row 3: chosen_ids has the token -1; .* from 0 to"),
        (lambda rows: rows[5]["prompt_ids"].__setitem__(0, VOCABULARY), {}, "row 6: prompt_ids has the token"),
        (lambda rows: rows[3].update(rejected_ids=[]), {}, "row 4: rejected_ids is empty"),
        (lambda rows: rows[1].update(prompt_ids=None), {}, "row 2: prompt_ids is null"),
        (lambda rows: rows[1]["prompt_ids"].__setitem__(0, None), {}, "row 2: prompt_ids has the token -1"),
        (lambda rows: rows[1].update(pack=None), {}, "row 2: pack is null"),
        (lambda rows: rows[0].update(pack=-1), {}, "row 1: pack is -1 after 0; packs are numbered from 0"),
        (lambda rows: rows[-1].update(pack=7), {}, "row 6: pack is 7 after"),
        (lambda rows: rows.pop(), {}, "5 pairs in . packs, and its header says 6 in"),
        (nothing, {"num_packs": 99}, "6 pairs in . packs, and its header says 6 in 99"),
        (nothing, {"num_pairs": "x"}, "num_pairs is 'x'; a whole number from 1"),
        (nothing, {"num_packs": 10**30}, "num_packs is 1000"),
        (nothing, {"dropped": {"too long": 10**12}}, r"dropped\['too long'\] is 1000"),
        (nothing, {"dropped": None}, "not a file of packed pairs"),
        (nothing, {"statistics": {}}, "not a file of packed pairs"),
    ],
)  # fmt: skip
def test_rows_that_the_packer_would_not_write_are_refused_with_file_and_row(
    change: Callable[[list[dict[str, Any]]], Any], header: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = damaged(tmp_path, change, **header)
    entry = {"dataset_name": "PackedPairs", "data_path": file}
    with pytest.raises(DataError, match=f"damaged.parquet.*{message}"):
        load_pair_dataset(entry, None, CHAT, max_total_tokens=1000, seed=0)


def test_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    packed(tmp_path, count=6)
    table = parquet.read_table(tmp_path / "packs.parquet")
    names = table.schema.names
    wide = table.set_column(names.index("chosen_ids"), "chosen_ids", table["chosen_ids"].cast(pa.list_(pa.int64())))
    parquet.write_table(wide, tmp_path / "wide.parquet")
    with pytest.raises(DataError, match="its column chosen_ids is list<element: int64>; list<item: int32> is needed"):
        read_header(str(tmp_path / "wide.parquet"))
