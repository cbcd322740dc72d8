"""The charts of report.html in a real Chromium, opened from a file; the arithmetic of `chart.js` against slow
references."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from browsers import chromium
from made_runs import make_run

from posttrain.reporting.pages import ASSETS
from posttrain.reporting.report import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CONTRAST = (Path(__file__).parents[1] / "contrast.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@contextmanager
def report_of(browser: Browser, folder: Path, **options: Any) -> Iterator[Page]:
    """The page, opened as a file. Nothing may fail in it or leave it."""
    page, problems = browser.new_page(**options), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(write_report(folder).as_uri())
    yield page
    page.close()
    assert problems == []


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def sick_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "run", sick=True, title="sick")


def test_charts_are_drawn_with_thresholds_and_findings(browser: Browser, sick_run: Path) -> None:
    with report_of(browser, sick_run) as page:
        charts = page.locator(".charts").first.locator("figure.chart")
        assert charts.count() > 3
        assert charts.locator("svg[role=img]").count() == charts.count()
        assert page.locator(".threshold").count() > 0
        assert page.locator(".found.error title").count() > 0
        words = charts.first.locator("svg").get_attribute("aria-label")
        assert words is not None
        assert words.startswith("Reward over steps. ")
        assert "highest" in words


def test_pointer_and_keys_read_the_same_step_in_every_chart(browser: Browser, sick_run: Path) -> None:
    with report_of(browser, sick_run) as page:
        svg = page.locator("figure.chart svg").first
        svg.hover()
        step = page.locator(".at").first.inner_text()
        assert step.startswith("step ")
        assert page.locator(".at").nth(1).inner_text() == step
        svg.focus()
        page.keyboard.press("Home")
        assert page.locator(".at").first.inner_text() == "step 1"


def test_toggle_shows_the_raw_curves(browser: Browser, tmp_path: Path) -> None:
    with report_of(browser, written(tmp_path, [{"step": s, "train/reward": s % 5} for s in range(1, 41)])) as page:
        assert page.locator("path.smooth").count() == 1
        page.get_by_label("smooth").uncheck()
        assert page.locator("path.smooth").count() == 0


def test_spike_does_not_flatten_the_curve_and_is_reported(browser: Browser, tmp_path: Path) -> None:
    rows = [{"step": s, "train/grad_norm": 4000.0 if s == 30 else 1 + s % 2} for s in range(1, 61)]
    with report_of(browser, written(tmp_path, rows)) as page:
        assert max(float(text) for text in page.locator(".tick[text-anchor=end]").all_text_contents()) <= 4
        page.get_by_text("1 of 60 values lie outside the axis, the furthest 4000.").wait_for()


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 1, "train/reward": 0.5, "timing/train/generation": 1.0, "timing/train/total_step_time": 2.0}],
        [{"step": step, "train/reward": None if step % 2 else 0.0, "train/loss": -1e-30} for step in range(30)],
        [{"step": step, "train/loss": 10.0**step, "train/kl_penalty": -5.0} for step in range(-30, 30)],
        [{"step": 7, "train/loss": 1e99}, {"step": 9, "train/loss": -1e99}],
    ],
    ids=["one step", "gaps", "wild", "huge"],
)
def test_drawings_hold_numbers_only(browser: Browser, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with report_of(browser, written(tmp_path, rows)) as page:
        drawn = page.evaluate("[...document.querySelectorAll('svg')].map((one) => one.innerHTML).join()")
        assert drawn
        assert not [word for word in ("NaN", "Infinity", "undefined", "null") if word in drawn]


def test_bars_of_many_steps_are_stacked(browser: Browser, tmp_path: Path) -> None:
    timing = {"timing/train/generation": 1.0, "timing/train/total_step_time": 1.5}
    with report_of(browser, written(tmp_path, [{"step": s} | timing for s in range(1, 2001)])) as page:
        assert page.locator(".layer.s0").count() == page.locator(".layer.s1").count() == 120
        low, high = (page.locator(f".layer.{name}").first.bounding_box() for name in ("s0", "s1"))
        assert low is not None
        assert high is not None
        assert high["y"] + high["height"] == pytest.approx(low["y"], abs=1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(browser: Browser, sick_run: Path, scheme: Any) -> None:
    with report_of(browser, sick_run, color_scheme=scheme) as page:
        assert page.evaluate(CONTRAST) == []


def test_page_says_its_numbers_without_scripts(browser: Browser, sick_run: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(write_report(sick_run).as_uri())
    assert page.locator("figure.chart .legend b").first.inner_text()
    page.get_by_text("The curves need JavaScript").wait_for()
    context.close()


# ------------------------------------------------------------------------------------------- arithmetic


@pytest.fixture(scope="module")
def arithmetic(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.evaluate(
        "async (code) => { window.m = await import(code); }", "data:text/javascript," + as_address("chart.js")
    )
    yield page
    page.close()


def as_address(name: str) -> str:

    return quote((ASSETS / name).read_text("utf-8"))


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [(0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 60, 6, [0, 10, 20, 30, 40, 50, 60]), (-3, 4, 5, [-2, 0, 2, 4])],
)
def test_ticks_are_round(arithmetic: Page, low: float, high: float, count: int, expected: list[float]) -> None:
    assert arithmetic.evaluate("(given) => m.ticks(...given)", [low, high, count]) == pytest.approx(expected)


@pytest.mark.parametrize("values", [[3.0], [0.0], [1e-9, 2e-9], [-5, 7], [990, 1000], [1e9, 1e9 + 1]])
def test_axis_covers_its_values(arithmetic: Page, values: list[float]) -> None:
    low, high = arithmetic.evaluate("(values) => m.valueRange(values)", values)
    slack = 1e-6 * (high - low)
    assert low - slack <= min(values)
    assert max(values) <= high + slack


def slow_local_line(values: list[float | None], width: float) -> list[float | None]:
    """The weighted least-squares line through all points, solved anew for each point."""
    result: list[float | None] = []
    for centre, value in enumerate(values):
        if value is None:
            result.append(None)
            continue
        points = [
            (j - centre, v, math.exp(-0.5 * ((j - centre) / width) ** 2)) for j, v in enumerate(values) if v is not None
        ]
        w, wx = sum(a for _, _, a in points), sum(a * x for x, _, a in points)
        wxx, wy = sum(a * x * x for x, _, a in points), sum(a * y for _, y, a in points)
        wxy = sum(a * x * y for x, y, a in points)
        result.append((wxx * wy - wx * wxy) / (w * wxx - wx * wx))
    return result


def test_smoothing_equals_a_slow_weighted_line_fit(arithmetic: Page) -> None:
    values: list[float | None] = [math.sin(i / 3) + (i % 4) * 0.3 for i in range(40)]
    values[7] = values[8] = None
    smooth, slow = arithmetic.evaluate("(values) => m.smoothed(values)", values), slow_local_line(values, width=3.0)
    assert [value is None for value in smooth] == [value is None for value in values]
    # The script leaves out weights under exp(-8).
    assert [v for v in smooth if v is not None] == pytest.approx([v for v in slow if v is not None], abs=1e-3)


def test_smoothing_of_a_single_value_is_that_value(arithmetic: Page) -> None:
    assert arithmetic.evaluate("(values) => m.smoothed(values)", [None, 2.0, None]) == [None, 2.0, None]
