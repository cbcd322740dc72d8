"""The output of a command as a picture of a terminal, with runs of lines about steps cut to their ends.

posttrain demo --steps 20 --folder runs/demo | tee demo.txt
python tools/terminal_picture.py demo.txt docs/images/demo.svg "posttrain demo --steps 20 --folder runs/demo"
"""

from __future__ import annotations

import io
import re
import sys
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ENDS = 2  # lines kept at each end of a run of steps
STYLES = (
    (r"^Step.*", "cyan"),
    (r"^\d\. .*", "bold"),
    (r"✓", "bold green"),
    (r"✗", "red"),
    (r"\d[\d.]*%", "bold green"),
)


def shortened(text: str) -> list[str]:
    lines: list[str] = []
    for is_step, run in groupby(text.splitlines(), key=lambda line: line.startswith("Step ")):
        found = list(run)
        cut = is_step and len(found) > 2 * ENDS + 1
        lines += [*found[:ENDS], "…", *found[-ENDS:]] if cut else found
    return lines


def main(source: str, target: str, title: str) -> None:
    console = Console(record=True, width=118, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {title}", "bold"))
    for line in shortened(Path(source).read_text(encoding="utf-8")):
        shown = Text(line)
        for pattern, style in STYLES:
            shown.highlight_regex(pattern, style)
        console.print(shown, soft_wrap=False)
    picture = console.export_svg(title=title, theme=MONOKAI, unique_id="terminal")
    # Without fonts from elsewhere: the page loads nothing, and a reader without them has a monospaced one.
    Path(target).write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
