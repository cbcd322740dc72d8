"""Versions, stages and history in MLflow's registry, in a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.apps.ship.registry import (
    Lineage,
    Registry,
    RegistryConflict,
    RegistryError,
    gather_lineage,
    resolve_version,
)
from posttrain.apps.ship.registry.store import MlflowStore
from posttrain.apps.ship.registry.version import differences
from posttrain.cli.main import main
from posttrain.cli.registry_command import show_version, show_versions

Make = Callable[[str], Path]


def test_versions_count_up_and_keep_their_lineage(registry: Registry, make_model: Make, passed: Lineage) -> None:
    first = registry.add("m", make_model("a"), passed, note="the first", by="ann")
    second = registry.add("m", make_model("b"), Lineage(code_version="2"))
    assert (first.version, second.version) == (1, 2)
    read = registry.versions("m")[0]
    assert read == replace(first, stage="candidate")
    assert (read.lineage, read.note, read.by, read.stage) == (passed, "the first", "ann", "candidate")
    assert registry.names() == ["m"]


def test_files_are_copied_and_equal_content_is_kept_once(registry: Registry, make_model: Make, passed: Lineage) -> None:
    folder = make_model("a")
    first, second = registry.add("m", folder, passed), registry.add("m", folder, passed)
    assert first.path == second.path != folder
    shutil.rmtree(folder)
    assert registry.verify(first) == []
    assert (first.path / "sub" / "config.json").read_text() == "{}"


def test_a_registry_that_was_moved_finds_its_files(
    registry: Registry, registry_folder: Path, make_model: Make, passed: Lineage, tmp_path: Path
) -> None:
    registry.add("m", make_model("a"), passed)
    moved = tmp_path / "elsewhere"
    shutil.copytree(registry_folder, moved)
    version = Registry(moved).get("m", 1)
    assert version.path.is_relative_to(moved)
    assert Registry(moved).verify(version) == []


def test_in_place_leaves_the_files_where_they_are(registry: Registry, make_model: Make, passed: Lineage) -> None:
    folder = make_model("a")
    version = registry.add("m", folder, passed, in_place=True)
    assert version.path == folder
    (folder / "notes.txt").write_text("mine")
    assert registry.verify(version) == [], "what else lies in a folder of the user's is his business"


def test_only_the_model_of_a_checkpoint_is_registered(registry: Registry, tmp_path: Path, passed: Lineage) -> None:
    step = tmp_path / "step_3"
    for name in ("policy/weights/model/model.safetensors", "policy/tokenizer/t.json", "policy/optimizer/o.pt"):
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_text(name)
    (step / "checksums.json").write_text("{}")
    (step / "train_dataloader.pt").write_text("position")
    version = registry.add("m", step, passed)
    assert sorted(version.files) == ["policy/tokenizer/t.json", "policy/weights/model/model.safetensors"]
    assert registry.verify(version) == []


def test_promotions_and_rollback(registry: Registry, make_model: Make, passed: Lineage) -> None:
    for content in "abc":
        registry.add("m", make_model(content), passed)
    registry.promote("m", 1, why="gate passed", by="ann")
    assert registry.get("m", "canary").version == 1
    registry.promote("m", 1, why="quiet", by="ann")
    registry.promote("m", 2, "production", why="better", by="bob")
    assert [version.stage for version in registry.versions("m")] == ["archived", "production", "candidate"]
    registry.rollback("m", why="complaints", by="eve")
    assert registry.get("m").version == 1
    told = [(e.change.ordinal, e.change.by, e.change.why, [m.version for m in e.moves]) for e in registry.history("m")]
    assert told == [
        (1, "ann", "gate passed", [1]),
        (2, "ann", "quiet", [1]),
        (3, "bob", "better", [1, 2]),
        (4, "eve", "complaints", [1, 2]),
    ]
    with pytest.raises(RegistryError, match="no earlier production version"):
        registry.rollback("m", why="again")


def test_rollback_accepts_only_former_production_versions(
    registry: Registry, make_model: Make, passed: Lineage, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, lineage in zip("abc", (passed, passed, Lineage()), strict=True):
        registry.add("m", make_model(content), lineage)
    registry.promote("m", 1, "production", why="x")
    registry.promote("m", 2, "canary", why="x")
    where = str(registry.location.folder)
    for version in ("2", "3"):
        assert main(["registry", "rollback", "m", "--to", version, "--why", "x", "--registry", where]) == 64
        said = capsys.readouterr().err
        assert f"registry:m@{version} has never been in production" in said
        assert f"promote m {version} --to production" in said
    assert (registry.get("m").version, len(registry.history("m"))) == (1, 2)
    registry.promote("m", 2, "production", why="x")
    registry.rollback("m", why="x")
    assert main(["registry", "rollback", "m", "--to", "2", "--why", "it was good", "--registry", where]) == 0
    assert registry.get("m").version == 2, "taken out by a rollback, but it was in production"


def test_a_canary_can_be_rolled_back(registry: Registry, make_model: Make, passed: Lineage) -> None:
    registry.add("m", make_model("a"), passed)
    with pytest.raises(RegistryError, match="m has no canary"):
        registry.rollback("m", stage="canary", why="errors")
    registry.promote("m", 1, why="try")
    registry.rollback("m", stage="canary", why="error rate 7 %", by="serve")
    assert registry.versions("m")[0].stage == "archived"


def test_versions_without_a_passing_gate_need_force(registry: Registry, make_model: Make) -> None:
    registry.add("m", make_model("a"), Lineage(gate={"verdict": "reject", "reasons": [], "report": ""}))
    registry.add("m", make_model("b"), Lineage())
    with pytest.raises(RegistryError, match=r"may not become canary: its gate's verdict is reject"):
        registry.promote("m", 1, why="I like it")
    with pytest.raises(RegistryError, match="it has no gate verdict"):
        registry.promote("m", 2, "production", why="I like it")
    entry = registry.promote("m", 1, why="I like it", force=True)
    assert entry is not None
    assert registry.history("m")[0].change.forced


def test_promoting_again_sets_the_alias_that_a_kill_left_out(
    registry: Registry, make_model: Make, passed: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add("m", make_model("a"), passed)

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(type(registry._store), "set_aliases", killed)
        with pytest.raises(SystemExit):
            registry.promote("m", 1, "canary", why="x")
    assert registry.promote("m", 1, "canary", why="x") is None
    assert len(registry.history("m")) == 1
    aliases = registry._store.client.get_registered_model("m").aliases
    assert {name: str(version) for name, version in aliases.items()} == {"canary": "1"}


def test_promoting_what_is_there_already_changes_nothing(registry: Registry, make_model: Make, passed: Lineage) -> None:
    registry.add("m", make_model("a"), passed)
    registry.promote("m", 1, "production", why="x")
    assert registry.promote("m", 1, "production", why="x") is None
    assert len(registry.history("m")) == 1


def test_invalid_moves_are_refused(registry: Registry, make_model: Make, passed: Lineage) -> None:
    registry.add("m", make_model("a"), passed)
    registry.promote("m", 1, "production", why="x")
    with pytest.raises(RegistryError, match="only rollback or another version takes it out"):
        registry.promote("m", 1, "canary", why="x")
    with pytest.raises(RegistryError, match="archiving it leaves none"):
        registry.promote("m", 1, "archived", why="x")
    with pytest.raises(RegistryError, match="give the stage it should move to"):
        registry.promote("m", 1, why="x")
    with pytest.raises(RegistryError, match="needs a reason"):
        registry.promote("m", 1, "archived", why=" ", force=True)


def test_expecting_another_version_in_production_is_a_conflict(
    registry: Registry, make_model: Make, passed: Lineage
) -> None:
    for content in "ab":
        registry.add("m", make_model(content), passed)
    registry.promote("m", 1, "production", why="x", expect=0)
    with pytest.raises(RegistryConflict, match="production was version 1, not empty; nothing was changed"):
        registry.promote("m", 2, "production", why="x", expect=0)
    assert len(registry.history("m")) == 1, "what cannot work leaves no line"
    registry.promote("m", 2, "production", why="x", expect=1)
    assert registry.get("m").version == 2


def test_concurrent_writer_voids_the_later_change(
    registry: Registry, registry_folder: Path, make_model: Make, passed: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a tracking server, where no lock keeps two writers apart: the order of the log decides for everybody."""
    for content in "ab":
        registry.add("m", make_model(content), passed)
    add_change, other = MlflowStore.add_change, Registry(registry_folder)

    def late(self: MlflowStore, name: str, change: dict[str, object]) -> int:
        if change["version"] == 2:
            first = {**change, "version": 1, "by": "the quicker one"}
            add_change(other._store, name, first)
        return add_change(self, name, change)

    monkeypatch.setattr(MlflowStore, "add_change", late)
    with pytest.raises(RegistryConflict, match="another change came first: production was version 1, not empty"):
        registry.promote("m", 2, "production", why="x", expect=0)
    assert registry.get("m").version == 1
    assert [entry.refused is None for entry in registry.history("m")] == [True, False]


def test_missing_aliases_are_restored_by_the_next_change(
    registry: Registry, make_model: Make, passed: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed right after the log was written has made the change."""
    for content in "ab":
        registry.add("m", make_model(content), passed)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, "set_aliases", killed)
        with pytest.raises(KeyboardInterrupt):
            registry.promote("m", 1, "production", why="x")
    assert registry.get("m").version == 1
    client = registry._store.client
    assert client.get_registered_model("m").aliases == {}
    registry.promote("m", 2, "canary", why="x")
    aliases = {name: int(version) for name, version in client.get_registered_model("m").aliases.items()}
    assert aliases == {"production": 1, "canary": 2}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda path: (path / "model.safetensors").write_text("weights X"),
            "model.safetensors is not what was registered",
        ),
        (lambda path: (path / "model.safetensors").write_text("short"), "has 5 bytes instead of 9"),
        (lambda path: (path / "sub" / "config.json").unlink(), "sub/config.json is missing"),
        (lambda path: (path / "extra.py").write_text("import os"), "extra.py does not belong to the version"),
        (lambda path: shutil.rmtree(path), "is missing"),
    ],
)
def test_damage_is_detected_by_every_use(
    registry: Registry, make_model: Make, passed: Lineage, damage: Callable[[Path], object], said: str
) -> None:
    version = registry.add("m", make_model("a"), passed)
    damage(version.path)
    assert len(problems := registry.verify(version)) == 1
    assert said in problems[0]
    for use in (lambda: registry.resolve("m", 1), lambda: registry.promote("m", 1, why="x")):
        with pytest.raises(RegistryError, match=r"registry:m@1 .* is not what was registered"):
            use()
    assert registry.history("m") == []


def test_adding_the_same_content_replaces_a_damaged_copy(registry: Registry, make_model: Make, passed: Lineage) -> None:
    folder = make_model("a")
    version = registry.add("m", folder, passed)
    (version.path / "model.safetensors").write_text("weights X")
    registry.add("m", folder, passed)
    assert registry.verify(version) == []


def test_references_resolve_to_a_version(registry: Registry, make_model: Make, passed: Lineage) -> None:
    where = registry.location.text
    for content in "abc":
        registry.add("m", make_model(content), passed)
    registry.promote("m", 1, "production", why="x")
    registry.promote("m", 2, "canary", why="x")
    for prefix in ("registry:", ""):
        found = {text: resolve_version(f"{prefix}m{text}", registry=where).version for text in ("", "@canary", "@3")}
        assert found == {"": 1, "@canary": 2, "@3": 3}
    assert resolve_version("registry:m@production", registry=where).path.is_dir()


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("@1", "expected registry:NAME@production"),
        ("registry:", "expected registry:NAME@production"),
        ("registry:m@", "expected registry:NAME@production"),
        ("registry:m@7", "m@7: no such version; versions are 1, or use production or canary"),
        ("registry:m@production", "m has no production version .*no version is in a stage"),
        ("registry:n", "no model 'n'.*there are m"),
        ("registry:a b", "'a b' cannot be the name of a model"),
    ],
)
def test_invalid_references_are_explained(
    registry: Registry, make_model: Make, passed: Lineage, reference: str, said: str
) -> None:
    registry.add("m", make_model("a"), passed)
    with pytest.raises(RegistryError, match=said):
        resolve_version(reference, registry=registry.location.text)


def test_reading_where_there_is_no_registry_makes_none(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="there is no registry here yet"):
        Registry(tmp_path / "nothing").names()
    assert not (tmp_path / "nothing").exists()


def test_bad_folders_are_refused_before_anything_is_written(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, said in (("nowhere", "no such folder"), ("empty", "is empty"), ("file", "a file")):
        with pytest.raises(RegistryError, match=said):
            registry.add("m", tmp_path / name, Lineage())
    assert registry.names() == []


def test_records_longer_than_a_tag_are_restored(registry: Registry, make_model: Make) -> None:
    config = {f"key.{number}": "x" * 50 for number in range(4000)}
    registry.add("m", make_model("a"), Lineage(config=config))
    assert registry.get("m", 1).lineage.config == config


def test_lineage_is_read_from_the_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    step = run / "step_5"
    (step / "policy" / "weights").mkdir(parents=True)
    data = tmp_path / "train.jsonl"
    data.write_text('{"input": "1"}\n')
    (run / "config.yaml").write_text(
        f"policy:\n  model_name: base/model\ndata:\n  train:\n    data_path: {data}\ngrpo:\n  seed: 3\n  clip: .inf\n"
    )
    (step / "training_info.json").write_text(json.dumps({"total_steps": 5, "val:accuracy": 0.25, "sampler_name": "x"}))
    gate = tmp_path / "gate.json"
    gate.write_text(json.dumps({"verdict": "promote", "reasons": ["good"]}))
    lineage = gather_lineage(step, metrics={"mine": 1.0}, gate=gate)
    assert lineage.base_model == "base/model"
    assert (lineage.config["grpo.seed"], lineage.config["grpo.clip"]) == (3, "Infinity"), "a record is JSON"
    assert lineage.metrics == {"training/total_steps": 5.0, "training/val:accuracy": 0.25, "mine": 1.0}
    assert lineage.verdict == "promote"
    before = lineage.data_hash
    data.write_text('{"input": "2"}\n')
    assert before is not None
    assert gather_lineage(step).data_hash not in (None, before)
    data.unlink()
    assert gather_lineage(step).data_hash is None, "data that is not here has no hash"
    with pytest.raises(RegistryError, match=r"--data .*no such file"):
        gather_lineage(step, data=["missing.jsonl"])
    gate.write_text(json.dumps({"verdict": "fine"}))
    with pytest.raises(RegistryError, match="verdict is 'fine'"):
        gather_lineage(step, gate=gate)


def test_differences_name_what_changed(registry: Registry, make_model: Make, passed: Lineage) -> None:
    left = registry.add("m", make_model("a"), replace(passed, config={"lr": 1e-5, "seed": 1}))
    right = registry.add("m", make_model("b"), replace(passed, config={"lr": 2e-5, "seed": 1}, metrics={"n": 1.0}))
    found = {(one.section, one.key): (one.left, one.right) for one in differences(left, right)}
    assert found[("config", "lr")] == (1e-5, 2e-5)
    assert found[("metrics", "main/pass@1")] == (0.5, None)
    assert found[("metrics", "n")] == (None, 1.0)
    assert ("files", "model.safetensors") in found
    assert ("config", "seed") not in found
    assert ("files", "sub/config.json") not in found
    assert differences(left, left) == []


def test_lineage_of_a_converted_model_is_that_of_the_conversion(tmp_path: Path, make_model: Make) -> None:
    data, folder = tmp_path / "train.jsonl", make_model("a")
    data.write_text("{}\n")
    blocks = [{"role": "train", "data_path": str(data)}, {"role": "validation", "data_path": "other.jsonl"}]
    metrics = {"validation/accuracy": 0.5, "train/loss": 2.0}
    written = {"base_model": "base/model", "data": blocks, "metrics": metrics}
    (folder / "conversion.json").write_text(json.dumps(written))
    lineage = gather_lineage(folder)
    assert (lineage.base_model, list(lineage.data)) == ("base/model", [str(data)])
    assert lineage.data_hash is not None
    assert lineage.metrics == {"training/validation/accuracy": 0.5}
    assert gather_lineage(folder, base_model="mine").base_model == "mine"


def test_verdict_on_another_model_does_not_pass(registry: Registry, make_model: Make, passed: Lineage) -> None:
    assert passed.gate is not None
    registry.add("m", make_model("a"), replace(passed, gate={**passed.gate, "another_model": "results/b"}))
    with pytest.raises(RegistryError, match="its gate judged the files of results/b, which differ"):
        registry.promote("m", 1, "canary", why="x")
    entry = registry.promote("m", 1, "canary", why="x", force=True)
    assert entry is not None
    assert entry.change.forced


def test_nan_and_infinity_are_refused(registry: Registry, make_model: Make, passed: Lineage) -> None:
    registry.add("m", make_model("a"), passed)
    with pytest.raises(RegistryError, match="no such version"):
        registry.get("m", "²")
    for words in (
        ["add", "m", "f", "--metric", "x=nan"],
        ["promote", "m", "1", "--why", "w", "--expect", "²"],
        ["list", "--wait-s", "nan"],  # which would wait for ever
        ["list", "--wait-s", "-1"],
    ):
        assert main(["registry", *words, "--registry", str(registry.location.folder)]) == 64


def artifacts(registry: Registry) -> list[Path]:
    assert registry.location.folder is not None
    return sorted((registry.location.folder / "artifacts").rglob("*"))


@pytest.mark.parametrize("failing", ["_ensure_model", "_append", "versions"])
def test_failed_add_leaves_no_files(
    registry: Registry, make_model: Make, passed: Lineage, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*args: object) -> None:
        raise RegistryError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, failing, fail)
        with pytest.raises(RegistryError, match="the disk is full"):
            registry.add("m", make_model("a"), passed)
        assert artifacts(registry) == []
    version = registry.add("m", make_model("b"), passed)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, failing, fail)
        for folder in (version.path, make_model("c")):
            with pytest.raises(RegistryError, match="the disk is full"):
                registry.add("m", folder, passed)
    assert registry.verify(version) == [], "the files of another version with the same content stay"
    assert [path for path in artifacts(registry) if path.parent.name == "m"] == [version.path]


def test_an_interrupt_after_the_version_was_written_keeps_its_files(
    registry: Registry, make_model: Make, passed: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = MlflowStore._append

    def interrupted(self: MlflowStore, *args: object) -> int:
        append(self, *args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, "_append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            registry.add("m", make_model("a"), passed)
    assert registry.verify(registry.get("m", 1)) == []


def test_withdrawn_content_is_copied_again(
    registry: Registry, make_model: Make, passed: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when the second one looked, and is gone when that one may write."""
    folder = make_model("a")
    first = registry.add("n", folder, passed)
    assert registry.location.folder is not None
    target = registry.location.folder / "artifacts" / "m" / first.path.name
    shutil.copytree(first.path, target)
    versions = MlflowStore.versions

    def withdrawn(self: MlflowStore, name: str) -> object:
        shutil.rmtree(target, ignore_errors=True)
        return versions(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, "versions", withdrawn)
        version = registry.add("m", folder, passed)
    assert version.path == target
    assert registry.verify(version) == []


@pytest.mark.parametrize("content", [b"this is no database, but long enough to be looked at", None])
def test_invalid_database_file_is_reported_in_one_line(
    registry_folder: Path, make_model: Make, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    database = registry_folder / "registry.db"
    database.write_bytes(content or database.read_bytes()[:20000])
    for words in (["list"], ["show", "m"], ["promote", "m", "1", "--why", "x"]):
        assert main(["registry", *words, "--registry", str(registry_folder)]) == 64
        said = capsys.readouterr().err
        assert f"{database}: this is not a registry database" in said
        assert len(said.strip().splitlines()) == 1
        assert "sqlalche" not in said
    registry = Registry(registry_folder)
    with pytest.raises(RegistryError, match="this is not a registry database"):
        registry.add("m", make_model("a"), Lineage())
    assert artifacts(registry) == []


def test_every_command_takes_a_name_with_and_without_its_prefix(
    registry: Registry, make_model: Make, passed: Lineage, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in "ab":
        registry.add("m", make_model(content), passed)
    where = ["--registry", str(registry.location.folder)]
    for version in ("1", "2"):
        assert main(["registry", "promote", "registry:m", version, "--to", "production", "--why", "x", *where]) == 0
    assert main(["registry", "rollback", "registry:m", "--why", "x", *where]) == 0
    for words in (["list", "m"], ["show", "m"], ["show", "m@1"], ["history", "m"], ["diff", "m", "1", "2"]):
        capsys.readouterr()
        command, name, *rest = words
        assert main(["registry", command, name, *rest, *where]) == 0
        plain = capsys.readouterr().out
        assert main(["registry", command, f"registry:{name}", *rest, *where]) == 0
        assert capsys.readouterr().out == plain != ""
    for reference in ("m@production", "registry:m@production", "m"):
        assert main(["registry", "resolve", reference, *where]) == 0
        assert capsys.readouterr().out.strip() == str(registry.get("m", 1).path)


@pytest.mark.parametrize("command", ["show", "resolve"])
def test_the_help_tells_the_two_defaults_apart(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["registry", command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    default, other = (
        ("newest", "`serve` take production") if command == "show" else ("production", "`show` takes the newest")
    )
    assert f"default: {'the ' if command == 'show' else ''}{default}" in said
    assert other in said


def test_control_characters_in_a_note_do_not_reach_the_terminal(
    registry: Registry, make_model: Make, passed: Lineage, capsys: pytest.CaptureFixture[str]
) -> None:
    version = registry.add("m", make_model("a"), passed, note="fine\x1b[1A\x1b[2K\x07")
    show_versions([version])
    show_version(version, [], None)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count(r"fine\x1b[1A\x1b[2K\x07") == 2
