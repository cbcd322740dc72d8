"""Files beside the pages of the documentation: help of scripts, and links of llms.txt on the site."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_links_of_llms_txt_lead_to_pages_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "docs_site", raising=False)
    from docs_site import with_pages

    text = (ROOT / "docs/llms.txt").read_text(encoding="utf-8")
    written = re.findall(r"\]\(([^)]+)\)", text)
    assert len(written) > 20
    assert [target for target in written if not (ROOT / "docs" / target).is_file()] == []
    assert ".md" not in with_pages(text)
    assert with_pages("[a](tutorials/x.md#y) [b](README.md) x.md") == "[a](tutorials/x.html#y) [b](index.html) x.md"


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.stem)
def test_the_help_of_a_script_has_each_command_on_its_own_line(path: Path) -> None:
    lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
    joined = re.compile(r"\S .*\bpython (?:bench/|$)|^\s+bench/\S+\.py |\bpython$")
    assert [line for line in lines if joined.search(line)] == []


def test_the_page_of_examples_names_each_script() -> None:
    page = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted((ROOT / "examples").glob("*.py")) if f"`{path.name}`" not in page] == []
