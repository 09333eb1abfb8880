"""What progress shows and forecasts, on a clock of the test's own."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from metis_hf.lab.show.progress import TaskProgress


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def log_file(width: int = 120) -> Console:
    return Console(file=io.StringIO(), width=width)


def said(progress: TaskProgress) -> list[str]:
    return progress.console.file.getvalue().splitlines()


def test_lines_of_runs_in_a_log_file(clock):
    """A line when a run begins, one every two minutes, and one when it ends."""
    progress = TaskProgress(log_file(width=60))
    with progress.running({"rank 9 [/x]": (10, 1.0)}):
        progress.begin("rank 9 [/x]", "preparing")
        for step in range(1, 11):
            clock.now += 50.0
            progress.advance("rank 9 [/x]", step, status="loss 5.000")
        progress.finish("rank 9 [/x]", "held-out loss 4.5000")
    assert said(progress) == [
        "rank 9 [/x] begins",
        "rank 9 [/x]: 3/10, loss 5.000, about 5:50 left",
        "rank 9 [/x]: 6/10, loss 5.000, about 3:20 left",
        "rank 9 [/x]: 9/10, loss 5.000, about 0:50 left",
        "[1/1] rank 9 [/x]: held-out loss 4.5000, 500 s",
    ]


def test_forecast_of_runs_side_by_side(clock):
    """Four runs of 41 steps, two at a time; what a run does beside its steps counts too."""
    progress = TaskProgress(log_file())
    with progress.running(dict.fromkeys("abcd", (41, 1.0)), slots=2):
        progress.begin("a")
        progress.begin("b")
        for step in range(1, 12):
            clock.now += 60.0 if step == 1 else 6.0
            progress.advance("b", step)
            progress.advance("a", step)
        # 30 and 31 steps of two runs and 41 of the others, by two.
        assert said(progress)[-1] == "b: 11/41, about 7:09 left"
        clock.now += 30 * 6.0
        for name in "ab":
            progress.advance(name, 41)
        clock.now += 20.0
        for name in "ab":
            progress.finish(name, "loss 5")
        progress.begin("c")
        clock.now += 120.0
        progress.advance("c", 1)
        # 40 steps of one run, by its side 41 of the last, its compilation and its evaluation.
        assert said(progress)[-1] == "c: 1/41, about 4:40 left"


def test_forecast_of_phases_that_take_turns(clock):
    """A phase's own pace where it has one, else its cost relative to the others'."""
    progress = TaskProgress(log_file())
    with progress.running({"a": (3, 1.0), "b": (2, 10.0), "none": (0, 1.0)}):
        progress.advance("a", reused=True)
        clock.now += 200.0
        progress.advance("a")  # one more of 200 s, two of "b" at 2000 s
        assert said(progress)[-1] == "a: 2/3, about 70:00 left"
        clock.now += 500.0
        progress.advance("b")  # one more of "a", and of "b" at 500 s
        assert said(progress)[-1] == "b: 1/2, about 11:40 left"
        progress.finish("a")
        progress.finish("none")
        clock.now += 500.0
        progress.advance("b")
        assert said(progress)[-1] == "b: 2/2, about 0:00 left"


@pytest.mark.parametrize("done", [10, 1])
def test_a_first_timing_says_nothing_about_the_others(clock, done):
    """Kernels are compiled in it; a resumed run reports its first steps at once."""
    progress = TaskProgress(log_file())
    with progress.running({"run": (100, 1.0)}):
        clock.now += 1000.0
        progress.advance("run", done)
        assert said(progress)[-1] == f"run: {done}/100, time unknown"
        clock.now += 120.0
        progress.advance("run", done + 60)
        left = 2 * (40 - done)
        assert said(progress)[-1] == f"run: {done + 60}/100, about {left // 60}:{left % 60:02} left"


def test_bars_on_a_terminal(clock):
    out = io.StringIO()
    progress = TaskProgress(Console(file=out, width=120, force_terminal=True))
    with progress.running({"a [/x]": (4, 1.0), "waits": (4, 1.0)}):
        progress.begin("a [/x]", "loss [5]")
        for step in range(1, 3):
            clock.now += 200.0
            progress.advance("a [/x]", step)
        progress.status("a [/x]", "evaluating")
        progress.finish("a [/x]", "failed")
    shown = out.getvalue()
    assert all(text in shown for text in ("all", "a [/x]", "[1/2] a [/x]: failed, 400 s"))
    assert "begins" not in shown


def test_no_console_prints_nothing(capsys):
    progress = TaskProgress(None)
    progress.note("a line")
    with progress.running({}):
        pass
    assert capsys.readouterr().out == ""
