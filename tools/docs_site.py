"""A hook of mkdocs. docs/ reads the same in a clone and as a site:

- the navigation is what docs/README.md lists, by its headings; a page that it does not list is an error of the strict
  build,
- two long pages are generated here and not committed: all settings, and the families of models that were tried,
- links that leave docs/, such as ../CONTRIBUTING.md, lead to copies of those files in the site, under `repository/`.
  Markdown files become pages, other files are copied. A folder has no page: its link becomes plain text,
- links in llms.txt, which is copied as it is, lead to the pages of the site.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
COPIES = "repository"
SITE_ONLY = {"config.md": "config-reference.md", "models.md": "model-families.md"}  # the second follows the first
LINK = re.compile(r"(!?\[(?P<text>[^\]]*)\])\((?P<target>[^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    index = (ROOT / "docs/README.md").read_text("utf-8")
    _, *sections = re.split(r"^## ", index, flags=re.MULTILINE)
    config.nav = ["README.md"]
    for section in sections:
        heading, _, body = section.partition("\n")
        pages = [target for target in _targets("docs/README.md", body) if target.endswith(".md")]
        in_site = [_in_site(page) for page in dict.fromkeys(pages)]
        config.nav.append({heading: [one for page in in_site for one in (page, SITE_ONLY.get(page)) if one]})
    decisions = sorted((ROOT / "docs/decisions").glob("0*.md"))
    config.nav.append({"Decisions": ["decisions/README.md", *(f"decisions/{path.name}" for path in decisions)]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that only the site has, the files that pages link to, and those that these link to."""
    sys.path.insert(0, str(ROOT / "tests"))
    from config_reference import config_reference
    from generated_pages import families_page

    open_pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    added: set[str] = set()
    while open_pages:
        page = open_pages.pop()
        for target in _targets(page, (ROOT / page).read_text("utf-8")):
            if target in added or target.startswith("docs/") or not (ROOT / target).is_file():
                continue
            added.add(target)
            path, source = f"{COPIES}/{target}", str(ROOT / target)
            files.append(File.generated(config, path, abs_src_path=source, inclusion=InclusionLevel.NOT_IN_NAV))
            if target.endswith(".md"):
                open_pages.append(target)
    for page, content in zip(SITE_ONLY.values(), (config_reference(), families_page()), strict=True):
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    path = source.removeprefix(f"{COPIES}/") if source.startswith(f"{COPIES}/") else f"docs/{source}"
    parts = FENCED.split(markdown)
    return "".join(
        text if index % 2 else LINK.sub(lambda m: _link(m, path, source), text) for index, text in enumerate(parts)
    )


def on_post_build(config: Any) -> None:
    copy = Path(config.site_dir) / "llms.txt"
    copy.write_text(with_pages(copy.read_text("utf-8")), "utf-8")


def with_pages(text: str) -> str:
    """Markdown files in links of a file that is no page are replaced by their pages."""
    return re.sub(r"\]\(((?:[\w-]+/)*[\w-]+)\.md(#[^)]*)?\)", r"](\1.html\2)", text).replace(
        "README.html", "index.html"
    )


def _targets(page: str, markdown: str) -> list[str]:
    plain = FENCED.sub("", markdown)
    return [target for match in LINK.finditer(plain) if (target := _resolved(page, match["target"])) is not None]


def _resolved(page: str, target: str) -> str | None:
    """The path in the repository that a link of a page leads to; None if it leads elsewhere."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def _in_site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIES}/{path}"


def _link(match: re.Match[str], page: str, source: str) -> str:
    target = _resolved(page, match["target"])
    if target is None:
        return match[0]
    if (ROOT / target).is_dir():
        if not (ROOT / target / "README.md").is_file() or not target.startswith("docs"):
            return match["text"]
        target += "/README.md"
    anchor = match["target"].partition("#")[2]
    to = posixpath.relpath(_in_site(target), PurePosixPath(source).parent.as_posix())
    return f"{match[1]}({to}{'#' + anchor if anchor else ''})"
