"""README, quickstart and tutorials, run as they are printed: in a copy of the clone's examples and configs, with a very
small model in the folder that `posttrain models fetch smollm2` would write.

The blocks of a page are one shell session. A Python or YAML block whose first line is a comment with a file's name is
written to that file; other Python blocks are run, other YAML blocks are parts of a config and are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(f"docs/tutorials/{page.name}" for page in ROOT.glob("docs/tutorials/*.md"))
PAGES = ["README.md", "docs/quickstart.md", *TUTORIALS]
NOT_RUN = {
    "docs/tutorials/several-gpus.md": "needs several GPUs or machines",
    "docs/tutorials/kubernetes.md": "needs a cluster",
}
SECTIONS_NOT_RUN = {
    ("README.md", "After training"): "needs a benchmark from the hub and two finished evaluations",
    ("docs/quickstart.md", "Data from the hub"): "needs the hub",
}
# Installs from an index, activates an environment, or runs until it is stopped.
LINES_NOT_RUN = re.compile(r"(make|source|pip install|posttrain (watch|serve)) ")
# Commands that end with another code than 0: a model of random weights has findings, and what does not fit is named.
ENDINGS = re.compile(r"posttrain (?:doctor [\w/]+|plan [^#]*(?=# .*does not fit))")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def with_ending(command: re.Match[str]) -> str:
    return f"{command[0]} || [ $? -eq {3 if 'doctor' in command[0] else 64} ] "


def session(page: str, markdown: str) -> Iterator[str]:
    """The blocks of a page as a shell script."""
    for section in re.split(r"^## ", markdown, flags=re.MULTILINE):
        if (page, section.partition("\n")[0].strip()) in SECTIONS_NOT_RUN:
            continue
        for number, (language, text) in enumerate(BLOCK.findall(section)):
            named = re.match(r"# ([\w-]+\.(?:py|yaml))\n", text)
            if language == "bash":
                commands = re.split(r"(?<!\\)\n", text)
                commands = [line for line in commands if not LINES_NOT_RUN.match(line)]
                yield "\n".join(ENDINGS.sub(with_ending, line) for line in commands)
            elif named or language == "python":
                name = named[1] if named else f"block_{abs(hash(section)) % 10**6}_{number}.py"
                yield f"cat > {name} <<'END OF BLOCK'\n{text}END OF BLOCK"
                if not named:
                    yield f"python {name}"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of some thousand weights, with a byte tokenizer and a chat template."""
    from tiny_models import byte_tokenizer, tiny_model

    folder = tmp_path_factory.mktemp("stand-in")
    model = tiny_model("llama", attention="eager", vocab_size=260, max_position_embeddings=2048)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if page not in NOT_RUN])
def test_a_page_runs_as_printed(page: str, stand_in: Path, tmp_path: Path) -> None:
    for name in ("examples", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(stand_in, tmp_path / "models/smollm2-135m-instruct")
    script = "\n".join(["set -euxo pipefail", *session(page, (ROOT / page).read_text(encoding="utf-8"))])
    assert "posttrain " in script
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_what_is_not_run_exists() -> None:
    assert set(NOT_RUN) <= set(PAGES)
    for page, section in SECTIONS_NOT_RUN:
        assert f"\n## {section}\n" in (ROOT / page).read_text(encoding="utf-8")


def test_blocks_become_one_session() -> None:
    page = (
        "```bash\nmake setup   # x\nposttrain a \\\n    b\n```\n```python\n# f.py\nx = 1\n```\n```yaml\na: 1\n```\n"
        "## Data from the hub\n```bash\nposttrain b\n```\n```\nposttrain: error\n```\n"
    )
    script = list(session("docs/quickstart.md", page))
    assert script == ["posttrain a \\\n    b\n", "cat > f.py <<'END OF BLOCK'\n# f.py\nx = 1\nEND OF BLOCK"]
    assert "posttrain b\n" in list(session("another.md", page))
