"""The configs that the documentation shows beside those of other systems can be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.config import load_config

DOCS = Path(__file__).parents[3] / "docs"
BLOCKS = re.findall(
    r"^```yaml\n# posttrain (\w+) .*?\n(.*?)^```",
    (DOCS / "coming-from.md").read_text("utf-8"),
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize("number", range(2))
def test_a_config_beside_another_systems_loads(number: int, tmp_path: Path) -> None:
    kind, text = BLOCKS[number]
    path = tmp_path / "this.yaml"
    path.write_text(text)
    loaded = load_config(kind, path)
    assert loaded.warnings == []
    sizes = loaded.config.step_sizes()
    assert sizes.num_updates == 1, "the number of updates per step that the text names"


def test_settings_that_the_pages_name_exist() -> None:
    from config_reference import config_reference

    known = config_reference()
    text = "".join(path.read_text("utf-8") for path in (DOCS / "coming-from.md", *(DOCS / "tutorials").glob("*.md")))
    named = set(re.findall(r"`((?:policy|grpo|dpo|loss_fn|checkpointing|doctor)\.[a-z_.]+[a-z])[`=:]", text))
    named = {key for key in named if "megatron" not in key and key != "policy.generation.backend"}
    assert sorted(key for key in named if f"`{key}" not in known) == []
