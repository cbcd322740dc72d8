"""A run in a notebook: its main curve, its state and the doctor's findings, redrawn while the run continues.

The drawing is one SVG image without scripts, so it stays in the saved notebook.
"""

from __future__ import annotations

import base64
import sys
import threading
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

REFRESH_S = 1.0
SIZE = (820, 300)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class LiveChart:
    """While it is entered, the cell shows the run in `folder`, redrawn when a step is added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="live chart", daemon=True)
        self._handle: Any = None
        self._shown = ""

    def __enter__(self) -> LiveChart:
        from IPython.display import HTML, display

        self._handle = display(HTML(""), display_id=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._draw()

    def _follow(self) -> None:
        while not self._ended.wait(REFRESH_S):
            self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML

        try:
            html = run_html(self._folder)
        except Exception:  # a chart must not end the run; the next one may succeed
            return
        if html != self._shown:
            self._shown = html
            self._handle.update(HTML(html))


def run_html(folder: Path) -> str:
    """The picture of a run, and its findings as text."""
    from posttrain.reporting.run_data import load_run

    run = load_run(folder)
    findings = "".join(f"<li>{escape(finding.line)}</li>" for finding in run.findings)
    steps = f"step {run.last_step} of {run.info.get('max_steps', '?')}"
    state = f"<div><b>{escape(run.title)}</b>: {escape(str(run.info.get('status', 'starting')))}, {steps}</div>"
    return f"<div>{state}{_image(run)}<ul>{findings}</ul></div>"


def _image(run: Any) -> str:
    from posttrain.reporting.charts import Frame, label, picture, value_range

    drawn = [run.series(key, name) for key, name in run.headline.chart.curves]
    drawn = [one for one in drawn if not one.is_empty]
    if not drawn:
        return ""
    values = [value for one in drawn for value in one.values if value is not None]
    low, high = value_range(values)
    frame = Frame.around([step for one in drawn for step in one.steps], low, high, size=SIZE)
    lines = [frame.curve("ab"[index % 2], one.steps, one.values) for index, one in enumerate(drawn)]
    keys = ", ".join(f"{one.name} {label(one.last)}" for one in drawn if one.last is not None)
    key = f'<text class="key" x="{SIZE[0] - 20}" y="28" text-anchor="end">{escape(keys)}</text>'
    drawing = f'<g transform="translate(0 34)">{frame.grid()}{"".join(lines)}</g>'
    svg = picture(run.headline.chart.title, (SIZE[0], SIZE[1] + 40), key + drawing)
    encoded = base64.b64encode(str(svg).encode()).decode()
    return f'<img alt="{escape(keys)}" src="data:image/svg+xml;base64,{encoded}"/>'
