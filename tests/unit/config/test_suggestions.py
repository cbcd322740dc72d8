"""What is proposed for a key that is not known: something that exists, and if possible in the same place."""

from __future__ import annotations

import re
from pathlib import Path as FilePath

import pytest

from posttrain.config.base import ConfigError
from posttrain.config.gate import GateConfig
from posttrain.config.loader import load_config, load_standalone
from posttrain.config.pipeline import PipelineConfig
from posttrain.config.schema import ANY_NAME, Node, find, hint_for, is_field, known_keys, schema_of, schema_of_model
from posttrain.config.tree import Path, dotted

GATE, PIPELINE = schema_of_model(GateConfig), schema_of_model(PipelineConfig)


def hint(root: Node, key: str) -> str:
    return hint_for(root, tuple(key.split(".")))


@pytest.mark.parametrize(
    ("root", "written", "meant"),
    [
        (GATE, "gate.confidance", "gate.confidence"),
        (GATE, "gate.conf", "gate.confidence"),
        (GATE, "gate.confidence_level", "gate.confidence"),
        (GATE, "gate.max_unscored", "gate.max_unscored_rate"),
        (GATE, "gate.power_level", "gate.power"),
        (GATE, "checks.mine.confidnce", "checks.mine.confidence"),
        (GATE, "checks.mine.worse_by", "checks.mine.worse_by_at_most"),
        (PIPELINE, "gate.conf", "gate.config"),
        (PIPELINE, "gate.config_file", "gate.config"),
        (PIPELINE, "gate.without_prod", "gate.without_production"),
        (PIPELINE, "train.algo", "train.algorithm"),
        (PIPELINE, "canary.max_errors", "canary.max_error_rate"),
        (PIPELINE, "evaluate.main.confg", "evaluate.main.config"),
        (schema_of("grpo"), "grpo.num_prompt", "grpo.num_prompts_per_step"),
        (schema_of("grpo"), "policy.gen", "policy.generation"),
        (schema_of("grpo"), "checkpointing.metric", "checkpointing.metric_name"),
        (schema_of("grpo"), "value.model", "value.model_name"),
    ],
)
def test_a_field_of_the_same_section_is_proposed(root: Node, written: str, meant: str) -> None:
    assert hint(root, written) == f"; did you mean `{meant}`?"


def test_where_no_field_is_like_it_those_that_there_are_are_named() -> None:
    assert hint(PIPELINE, "gate.confidence") == "; `gate` has config, overrides, without_production"
    assert hint(PIPELINE, "evaluate.main.data") == "; `evaluate.main` has config, overrides"
    assert hint(GATE, "gate.alpha").startswith("; `gate` has confidence, power, looks, ")
    assert hint(GATE, "rules") == "; the file has gate, checks"
    assert hint(GATE, "gate.confidence.level") == "; `gate.confidence` takes a value and has no keys"


def test_the_right_name_in_the_wrong_place_is_shown_its_place() -> None:
    assert hint(GATE, "checks.mine.min_problems").startswith("; did you mean `gate.min_problems`? `checks.mine` has ")
    assert hint(GATE, "gate.at_least").startswith("; did you mean `checks.<name>.at_least`? `gate` has ")
    assert hint(GATE, "confidance") == "; did you mean `gate.confidence`? the file has gate, checks"


def places(root: Node) -> list[Path]:
    """Every section, with names of the user's own where there may be any."""
    keys = [tuple("mine" if part == ANY_NAME else part for part in key[:-1]) for key in known_keys(root)]
    return list(dict.fromkeys(keys))


@pytest.mark.parametrize("root", [GATE, PIPELINE, schema_of("grpo")], ids=["gate", "pipeline", "grpo"])
def test_whatever_is_proposed_exists(root: Node) -> None:
    for place in places(root):
        for wrong in ("confidence_level", "path", "nam"):
            written = (*place, wrong)
            if find(root, written) is None and (found := re.search("did you mean `([^`]*)`", hint_for(root, written))):
                proposed = tuple(found[1].split("."))
                assert is_field(root, proposed), f"{dotted(written)} -> {found[1]}"
                assert proposed != written[: len(proposed)], f"{dotted(written)} -> {found[1]}, which was written"


def test_a_key_that_nothing_reads_is_not_proposed_elsewhere() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("ppo", None, ["value.optimizer.lr=1e-5"])
    assert str(caught.value) == "command line: unknown key `value.optimizer.lr`; `value.optimizer` has kwargs, name"


def test_files_are_read_with_these_hints(tmp_path: FilePath) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("checks: {}\ngate: {conf: 0.9}\n")
    with pytest.raises(ConfigError, match=r"gate\.yaml:2: unknown key `gate\.conf`; did you mean `gate\.confidence`\?"):
        load_standalone(GateConfig, file)
