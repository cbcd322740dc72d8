"""Objects as YAML files: written to a folder by `launch render` and `setup`, read by `launch check`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import InputError, reason_of
from posttrain.files.json_files import JsonObject
from posttrain.files.text_templates import render_text

TEMPLATES = Path(__file__).with_name("manifests")


@dataclass(frozen=True)
class Manifest:
    """One object of a file. `body` may be anything that YAML can hold: the file may be from elsewhere."""

    file: str
    number: int  # of the document in the file, from 1
    body: Any

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", "")) if isinstance(self.body, dict) else ""

    @property
    def group(self) -> str:
        version = str(self.body.get("apiVersion", "")) if isinstance(self.body, dict) else ""
        return version.rpartition("/")[0]

    @property
    def name(self) -> str:
        metadata = self.body.get("metadata") if isinstance(self.body, dict) else None
        return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""

    @property
    def namespace(self) -> str:
        metadata = self.body.get("metadata") if isinstance(self.body, dict) else None
        return str((metadata.get("namespace") if isinstance(metadata, dict) else None) or "default")

    @property
    def title(self) -> str:
        return f"{self.kind or 'document'} {self.name or self.number}"


_FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that in C is ten times as fast


class _StrictLoader(yaml.SafeLoader):
    """Rejects duplicate keys in a map, as the API server does with strict decoding."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if str(key) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def read_manifests(paths: Sequence[Path]) -> list[Manifest]:
    """Every object in files, and in the .yaml, .yml and .json files of folders."""
    found: list[Manifest] = []
    for path in paths:
        for file in _files(path):
            found += read_text(file.read_text(encoding="utf-8"), str(file))
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for pattern in ("*.yaml", "*.yml", "*.json") for file in path.rglob(pattern))
    if not files:
        raise InputError(f"{path}: no .yaml, .yml or .json file in this folder")
    return files


def read_text(text: str, name: str) -> list[Manifest]:
    try:
        if name.endswith(".json"):  # far faster than as YAML
            documents = [json.loads(text)]
        else:
            documents = list(yaml.load_all(text, Loader=_StrictLoader))
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}: not JSON: {error.msg}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise InputError(f"{name}{where}: not YAML: {getattr(error, 'problem', None) or reason_of(error)}") from error
    found: list[Manifest] = []
    for number, body in enumerate((body for body in documents if body is not None), start=1):
        if isinstance(body, dict) and body.get("kind") == "List" and isinstance(body.get("items"), list):
            found += [Manifest(name, number, item) for item in body["items"]]
        else:
            found.append(Manifest(name, number, body))
    return found


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
# Texts that readers of other YAML versions, such as kubectl and helm, take for truth values and numbers are quoted.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$|^0o[0-7]+$"),
    list("-+.0123456789"),
)


def to_yaml(objects: Iterable[object]) -> str:
    return str(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def _as_value(value: object) -> str:
    """On one line, quoted where YAML needs it: nothing in a value changes the structure around it."""
    return str(yaml.dump([value], Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=math.inf))[1:-2]


def render_objects(template: str, **values: object) -> list[JsonObject]:
    """The objects of a template in `manifests/`: YAML of Jinja2, in which every `{{ }}` is written as a value of YAML.
    `<<` takes in the entries of a map; the last of equal keys counts."""
    text = render_text(TEMPLATES / template, _as_value, **values)
    return [body for body in yaml.load_all(text, Loader=_FastLoader) if body is not None]


def write_manifests(folder: Path, objects: Sequence[JsonObject]) -> list[Path]:
    """One numbered file per object, in the order in which they are to be created."""
    folder.mkdir(parents=True, exist_ok=True)
    if others := [path.name for path in folder.iterdir()]:
        raise InputError(f"{folder} is not empty ({others[0]} …): files of another render would be applied with these")
    written = []
    for number, body in enumerate(objects, start=1):
        path = folder / f"{number:02d}-{body['kind'].lower()}-{body['metadata']['name']}.yaml"
        path.write_text(to_yaml([body]), encoding="utf-8")
        written.append(path)
    return written
