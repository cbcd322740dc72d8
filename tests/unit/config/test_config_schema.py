"""The schema: every key of NeMo RL's exemplars with its default, every field explained, no torch."""

import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest
from pydantic import BaseModel

import posttrain.config
from posttrain.config import ALL_KINDS, KINDS, load_config
from posttrain.config.base import Section
from posttrain.config.foreign.nemo_rl import vocabulary_of
from posttrain.config.loader import built_in_defaults
from posttrain.config.runs import RUN_CONFIGS
from posttrain.config.schema import schema_defaults, schema_of, unknown_keys
from posttrain.config.tree import Tree, dotted, leaves, resolve
from posttrain.config.yaml_files import parse_document, read_built_in

EXPECTED = parse_document((Path(__file__).parent / "expected_defaults.yaml").read_text(), "expected").values


@pytest.mark.parametrize(("kind", "expected"), EXPECTED.items())
def test_defaults_are_those_of_nemo_rl(kind: str, expected: dict) -> None:
    loaded = load_config(kind, None, [])
    usual = {dotted(path): value for path, value in leaves(resolve(built_in_defaults(kind)))}
    flat = {**usual, **loaded.flat()}
    assert {key: flat[key] for key in expected} == expected
    assert loaded.warnings == []
    assert set(loaded.origins.values()) == {"default"}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_default_is_in_the_schema_or_in_the_packaged_file_not_in_both(kind: str) -> None:
    schema = Tree(schema_defaults(RUN_CONFIGS[kind]))
    absent = object()
    assert [
        dotted(path) for path, value in leaves(read_built_in(kind).values) if schema.get(path, absent) == value
    ] == []


@pytest.mark.parametrize("kind", KINDS)
def test_packaged_files_have_no_unknown_keys(kind: str) -> None:
    assert list(unknown_keys(schema_of(kind), read_built_in(kind).values)) == []
    assert list(unknown_keys(vocabulary_of(kind), built_in_defaults(kind).values)) == []


def every_section() -> set[type[BaseModel]]:
    modules = [module for name, module in sys.modules.items() if name.startswith("posttrain.config")]
    values = [value for module in modules for value in vars(module).values()]
    return {value for value in values if isinstance(value, type) and issubclass(value, Section)}


def test_every_field_is_explained_in_one_sentence() -> None:
    fields = [(m.__name__, name, info.description) for m in every_section() for name, info in m.model_fields.items()]
    assert len(fields) > 350
    for model, name, description in fields:
        assert description, f"{model}.{name} has no description"
        assert description.endswith("."), f"{model}.{name}: {description}"
        assert ". " not in description.replace("e.g. ", ""), f"{model}.{name}: more than one sentence"


def test_loading_a_config_imports_no_torch() -> None:
    script = (
        "import sys; from posttrain.config import load_config; import posttrain.cli.config_command; "
        "load_config('grpo', None, []); "
        "print(sorted({'torch', 'transformers', 'ray', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_the_package_imports_is_what_it_offers() -> None:
    """With `mypy --strict` a user's import of a name that `__all__` lacks is an error."""
    public = {name for name, value in vars(posttrain.config).items() if name[0] != "_" and not ismodule(value)}
    assert public == set(posttrain.config.__all__)
