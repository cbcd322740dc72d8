"""Files that were edited by hand into something else are refused with the field, not with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.apps.ship.registry.lineage import gather_lineage
from posttrain.errors import RegistryError


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "holds a JSON list"),
        ('{"data": 5}', "data is 5; a list is needed"),
        ('{"metrics": [1]}', r"metrics is \[1\]; a dict is needed"),
        ('{"base_model": 5}', "base_model is 5; a str is needed"),
        ("[" * 200_000, "nested more than 100 deep"),
    ],
)
def test_conversion_json(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "conversion.json").write_text(text)
    with pytest.raises(RegistryError, match=f"conversion.json: .*{reason}"):
        gather_lineage(tmp_path)


def test_parts_of_conversion_json_that_are_no_record_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "conversion.json").write_text('{"data": [5], "metrics": {"validation/x": "y", "validation/z": 1}}')
    lineage = gather_lineage(tmp_path)
    assert (dict(lineage.data), dict(lineage.metrics)) == ({}, {"training/validation/z": 1.0})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ('"candidate": 5', "candidate is 5; a dict is needed"),
        ('"candidate": {"a": 5}', "a is 5; a dict is needed"),
        ('"reasons": 5', "reasons is 5; a list is needed"),
    ],
)
def test_report_of_the_gate(fields: str, reason: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate.json"
    gate.write_text(f'{{"verdict": "promote", {fields}}}')
    with pytest.raises(RegistryError, match=f"gate.json: {reason}"):
        gather_lineage(tmp_path, gate=gate)
