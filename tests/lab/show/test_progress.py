"""What progress bars forecast, on a clock of the test's own."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from metis_hf.lab.compare import progress as compare_progress
from metis_hf.lab.compare.progress import RunProgress
from metis_hf.lab.show import progress as shared_progress
from metis_hf.lab.show.progress import ExperimentProgress, StepPace

FIRST, MEASURED, NORMAL = 60.0, 15.0, 0.5  # seconds of a step


@pytest.fixture
def clock(monkeypatch):
    """`time.monotonic()` of both modules, as `clock.now`."""
    made = SimpleNamespace(now=1000.0)
    for module in (shared_progress, compare_progress):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def cost(step: int) -> float:
    if step == 1:
        return FIRST
    return MEASURED if step % 5 == 0 else NORMAL


def test_pace_is_that_of_normal_steps(clock):
    pace = StepPace()
    for step in range(1, 21):
        clock.now += cost(step)
        pace.step(step, clock.now)
        assert pace.seconds == (NORMAL if step > 3 else None)


def test_pace_of_reports_that_leave_steps_out(clock):
    pace = StepPace()
    for step in range(10, 60, 10):  # a resumed run, of which each tenth step is reported
        clock.now += 10 * NORMAL
        pace.step(step, clock.now)
    assert pace.seconds == NORMAL


def test_experiment(clock):
    """Two schemes of 40 steps: what is left after 12 of the first is 68 normal steps."""
    out = io.StringIO()
    with ExperimentProgress(Console(file=out, width=120), ["metis", "nvfp4"], 40) as progress:
        progress.begin("metis")
        for step in range(1, 13):
            clock.now += cost(step)
            progress.step(step, 5.0)
        assert progress._time_left(12) == 68 * NORMAL
        progress.begin("nvfp4")
        clock.now += FIRST
        progress.step(1, 5.0)
        assert progress._time_left(1) is None
    assert "step 9/40, loss 5.000  ETA 0:36" in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_names_with_brackets(terminal):
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal)
    with ExperimentProgress(console, ["metis [/8]"], 2) as progress:
        progress.begin("metis [/8]")
        progress.step(1, 5.0)
        progress.finish("metis [/8]", "loss [5]")
    assert "metis [/8]" in out.getvalue()
    assert "loss [5]" in out.getvalue()


def test_comparison(clock):
    """Three runs, two at a time; what goes beside steps is known from the first that ended."""
    runs = [SimpleNamespace(name=name) for name in "abc"]
    progress = RunProgress(Console(file=io.StringIO()))
    with progress.running(runs, steps=40, slots=2):
        for run in runs[:2]:
            progress.begin(run)
        for step in range(1, 13):
            clock.now += cost(step)
            for run in runs[:2]:
                progress.step(run, step, 5.0)
            if step < 4:
                assert progress._time_left() is None
        # 28 steps of each of two runs and 40 of the third, by two.
        assert progress._time_left() == round((2 * 28 + 40) * NORMAL / 2)
        clock.now += 28 * NORMAL
        for run in runs[:2]:
            progress.step(run, 40, 5.0)
        seconds = clock.now - 1000.0 + 20.0  # and 20 s of evaluation
        clock.now += 20.0
        progress.finish(runs[0], SimpleNamespace(loss=5.0))
        beside = seconds - 40 * NORMAL
        assert progress._time_left() == round((40 * NORMAL + beside) / 2)


def test_comparison_without_a_terminal(clock):
    """In a log file: a line when a run starts, every two minutes, and when a run ends."""
    out = io.StringIO()
    (run,) = [SimpleNamespace(name="rank 9 [/x]")]
    progress = RunProgress(Console(file=out, width=60))
    with progress.running([run], steps=10, slots=1):
        progress.begin(run)
        for step in range(1, 11):
            clock.now += 50.0
            progress.step(run, step, 5.0)
        progress.finish(run, SimpleNamespace(loss=4.5))
    assert out.getvalue().splitlines() == [
        "1 runs of 10 steps, 1 at a time.",
        "rank 9 [/x] starts",
        "step 3 of 10 of all runs, time unknown; rank 9 [/x]: step 3, loss 5.000",
        "step 6 of 10 of all runs, about 3:20 left; rank 9 [/x]: step 6, loss 5.000",
        "step 9 of 10 of all runs, about 0:50 left; rank 9 [/x]: step 9, loss 5.000",
        "[1/1] rank 9 [/x]: held-out loss 4.5000, 500 s",
    ]


def test_bars_of_a_comparison_are_no_lines(clock):
    out = io.StringIO()
    (run,) = [SimpleNamespace(name="a [/x]")]
    progress = RunProgress(Console(file=out, width=120, force_terminal=True))
    with progress.running([run], steps=4, slots=1):
        progress.begin(run)
        for step in range(1, 5):
            clock.now += 200.0
            progress.step(run, step, 5.0)
        progress.finish(run, None)
    assert "starts" not in out.getvalue()
    assert "of all runs" not in out.getvalue()
