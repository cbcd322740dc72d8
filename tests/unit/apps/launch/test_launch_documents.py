"""Manifests, rules, profiles and figures in the documentation are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.apps.launch.admin_objects import render_setup
from posttrain.apps.launch.cost import PRICES
from posttrain.apps.launch.instances import INSTANCES
from posttrain.apps.launch.lint.check import RULES, check_manifests
from posttrain.apps.launch.manifest_files import Manifest, read_manifests
from posttrain.cli.main import main
from posttrain.config.cluster_profile import ClusterProfile
from posttrain.config.loader import load_standalone

ROOT = Path(__file__).parents[4]
SEEDS = ROOT / "docs" / "seeds"
LAUNCH = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `(printed-[\w.-]+)` \| `([\w-]+)` \| `([^`]+)` \|", re.MULTILINE)


def test_printed_manifests_have_exactly_the_errors_that_are_listed() -> None:
    printed = sorted((SEEDS / "manifests").glob("printed-*.yaml"))
    assert len(printed) == 5
    listed = set(_ROW.findall((SEEDS / "manifests.md").read_text(encoding="utf-8")))
    found = {(path.name, e.rule, e.path) for path in printed for e in check_manifests(read_manifests([path])).errors}
    assert {name for name, *_ in found} == {path.name for path in printed}
    assert found == listed


def test_corrected_manifests_have_no_errors() -> None:
    corrected = sorted((SEEDS / "manifests").glob("corrected-*.yaml"))
    assert len(corrected) == 3
    for path in corrected:
        assert check_manifests(read_manifests([path])).errors == []


@pytest.mark.parametrize("name", ["eks", "gke"])
def test_profiles_in_configs_can_be_used(name: str) -> None:
    profile = load_standalone(ClusterProfile, ROOT / "configs" / "clusters" / f"{name}.yaml")
    objects = [Manifest(name, number, body) for number, body in enumerate(render_setup(profile))]
    assert check_manifests(objects).errors == []


def test_the_profile_of_slurm_in_configs_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    profile = ROOT / "configs" / "clusters" / "slurm.yaml"
    run = ["grpo", "cluster.num_nodes=2", "cluster.gpus_per_node=8", "checkpointing.checkpoint_dir=/shared/math"]
    assert main(["launch", "render", "--on", str(profile), *run]) == 0
    printed = capsys.readouterr().out
    shown = re.findall(r"^(?:#SBATCH|srun) .*$", (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) == 7
    for line in shown:
        assert line in printed.splitlines()


def test_every_machine_is_documented() -> None:
    for name in INSTANCES:
        assert f"`{name}`" in LAUNCH
    assert set(PRICES) == set(INSTANCES)


def test_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "check", "--rules"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == list(RULES)


def test_the_commands_of_the_walk_render_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a config like the demo's: one process on a CPU, folders of this machine."""
    config = tmp_path / "config.yaml"
    config.write_text("grpo: {max_num_steps: 2}\npolicy: {device: cpu}\ncluster: {launcher: local}\n")
    for place in ("local", "configs/clusters/eks.yaml"):
        (shown,) = re.findall(
            rf"^posttrain launch (?:render )?--on {place} grpo --config results(.*?[^\\])$",
            LAUNCH,
            re.MULTILINE | re.DOTALL,
        )
        settings = [word for word in shown.split() if "=" in word]
        profile = place if place == "local" else str(ROOT / place)
        assert main(["launch", "render", "--on", profile, "grpo", "--config", str(config), *settings]) == 0
        assert "kind: JobSet" in capsys.readouterr().out
