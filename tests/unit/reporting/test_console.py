"""The console: plain and free of control characters in a log file, safe with whatever a model writes."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest

from posttrain.reporting.console import Console
from posttrain.reporting.wording import Line, duration, number
from posttrain.types import Score, StepReport

HOSTILE = "\x1b[31mred\x1b[0m \x07 \r over \x9b2J \u202e gnp.exe [bold]x[/bold] :smile:"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def control_characters(text: str) -> set[str]:
    return {char for char in text if (ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160 or char == "\u202e"}


def test_log_file_gets_no_control_characters(bench: Any, group: Any, report: Any) -> None:
    recorder = bench.recorder(num_val_samples_to_print=2)
    scores = (Score(1.0), Score(None, error=HOSTILE, traceback=HOSTILE))
    groups = (group(0, (HOSTILE, "x"), scores),)
    with recorder.progress("generation", 10) as advance:
        bench.clock.now += 60
        advance(1)
    recorder.stage(HOSTILE)
    recorder.say(HOSTILE)
    recorder.record_step(1, report(groups=groups), report(groups=groups))
    recorder.warn(HOSTILE)
    recorder.warn(HOSTILE)
    recorder.finish("done")
    assert control_characters(bench.output) == set()
    assert "[bold]x[/bold] :smile:" in bench.output


def test_escape_sequences_of_a_model_do_not_reach_the_terminal() -> None:
    stream = Terminal()
    Console(stream, quiet=False).show([Line(HOSTILE)])
    assert "\x1b[31m" not in stream.getvalue()
    assert "\\x1b[31mred" in stream.getvalue()
    assert "[bold]x[/bold] :smile:" in stream.getvalue()


def test_plain_progress_prints_every_half_minute_with_the_time_left(bench: Any) -> None:
    recorder = bench.recorder()
    start = len(bench.output)
    with recorder.progress("generation", total=100) as advance:
        for _ in range(100):
            bench.clock.now += 1.0
            advance(1)
    assert bench.output[start:].splitlines() == [
        "  generation: 30/100 (30%), about 1m 10s left",
        "  generation: 60/100 (60%), about 40.0s left",
        "  generation: 90/100 (90%), about 10.0s left",
    ]


def test_live_bars_can_be_nested_and_advanced_from_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    console = Console(stream, quiet=False)
    with console.progress("validation", 4) as outer, console.progress("generation", 4) as inner:
        threads = [threading.Thread(target=inner, args=(1,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        console.show([Line("in between")])
        outer(4)
    with console.progress("training", 2) as advance:
        advance(2)
    console.show([Line("after")])
    assert "in between" in stream.getvalue()
    assert stream.getvalue().rstrip("\n").endswith("after")
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")  # the cursor is given back


def test_bar_is_closed_when_its_block_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with pytest.raises(RuntimeError, match="boom"), Console(stream, quiet=False).progress("generation", 4):
        raise RuntimeError("boom")
    assert stream.getvalue().count("\x1b[?25h") == 1


def test_symbols_are_replaced_where_the_encoding_lacks_them() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    Console(stream, quiet=False).show([Line("▶ a → b"), Line("日本")])
    assert raw.getvalue() == b"> a -> b\n??\n"


def test_one_line_steps_fit_into_120_columns(on_terminal: Any) -> None:
    metrics = {"loss": -0.0123, "reward": 0.5, "mean_generation_length": 1234.5, "kl_penalty": 1e-9, "grad_norm": 12.0}
    recorder = on_terminal.recorder(max_steps=10_000)
    for step in (1, 10_000):
        recorder.record_step(step, StepReport(metrics, {"total_step_time": 1.99}), None)
    line = next(line for line in on_terminal.output.splitlines() if line.startswith("step 10000/10000"))
    assert "kl 1.00e-09" in line
    assert len(line) <= 120


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00s"), (0.0042, "4.2ms"), (9.987, "9.99s"), (59.94, "59.9s"), (61, "1m 01s"), (3599.7, "1h 00m")]
    + [(7500, "2h 05m"), (200_000, "2d 07h")],
)
def test_format_of_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (0.25, "0.2500"), (-0.00001, "-1.00e-05"), (903.45312, "903.4531"), (12345.678, "12,345.7")]
    + [(3, "3"), (None, "n/a"), (float("nan"), "n/a"), (1.5e9, "1,500,000,000"), (1.23e-7, "1.23e-07")],
)
def test_format_of_numbers(value: float | None, text: str) -> None:
    assert number(value) == text
