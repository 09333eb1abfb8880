"""Launches of kernels that are compiled already, with a compiled kernel that only takes notes."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is not installed, or interprets kernels",
)


class Notes:
    """Ordinary launches, and launches of the compiled kernel that they returned."""

    def __init__(self) -> None:
        self.ordinary: list[dict] = []
        self.direct: list[tuple] = []
        self.fails = False

    def run(self, kernel, *args, grid, warmup, **options):
        assert not args
        self.ordinary.append(options)
        return self

    def __getitem__(self, grid):
        def launch(*values) -> None:
            if self.fails:
                raise TypeError("other arguments")
            self.direct.append((grid, values))

        return launch


@pytest.fixture
def notes(monkeypatch):
    import triton

    from metis_hf.numerics.kernels import triton_direct

    importlib.reload(triton_direct)  # nothing is known from other tests
    found = Notes()
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda kernel, *args, **options: found.run(kernel, **options)
    )
    yield found
    importlib.reload(triton_direct)


def launch(**changes) -> None:
    """The kernel that adds up rows, whose last two numbers of rows are not part of its code."""
    from metis_hf.numerics.kernels.triton_direct import launch
    from metis_hf.numerics.kernels.triton_sums import add_rows

    words = dict.fromkeys(("shift0", "shift1", "sign0", "sign1"), 7)
    arguments = {
        "x_ptr": torch.zeros(64, 32),
        "mask_ptr": None,
        "out_ptr": torch.zeros(4, 32),
        "largest_ptr": torch.zeros((), dtype=torch.int32),
        "data_ptr": torch.zeros((), dtype=torch.int32),
        **words,
        "rows": 64,
        "columns": 32,
        "sums": 4,
        "stretches": 16,
        "row_stride": 32,
        "column_stride": 1,
        "ROWS": 16,
        "COLUMNS": 128,
    }
    launch(add_rows, (4, 1), {"enable_fp_fusion": False}, **arguments | changes)


def test_the_second_launch_is_direct_and_has_the_arguments_in_order(notes) -> None:
    launch()
    launch(rows=48, sums=3, sign0=-5)
    assert len(notes.ordinary) == 1
    assert notes.ordinary[0]["enable_fp_fusion"] is False
    ((grid, values),) = notes.direct
    assert grid == (4, 1, 1)
    assert values[1] is None
    assert values[5:] == (7, 7, -5, 7, 48, 32, 3, 16, 32, 1, 16, 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"x_ptr": torch.zeros(64, 32, dtype=torch.bfloat16)},
        {"x_ptr": torch.zeros(64 * 32 + 1)[1:].view(64, 32)},
        {"mask_ptr": torch.zeros(64, dtype=torch.uint8)},
        {"columns": 33},
        {"columns": 2**31 + 16},
        {"column_stride": 2},
        {"row_stride": 1},
        {"rows": 2**31},
        {"ROWS": 32},
    ],
    ids=lambda changes: "".join(changes),
)
def test_other_code_is_not_launched_in_its_place(notes, changes) -> None:
    launch()
    launch(**changes)
    assert len(notes.ordinary) == 2
    assert not notes.direct
    launch(**changes)
    launch()
    assert len(notes.ordinary) == len(notes.direct) == 2


def test_after_a_failure_launches_are_ordinary(notes) -> None:
    launch()
    notes.fails = True
    launch()
    assert len(notes.ordinary) == 2  # launched after all
    notes.fails = False
    launch()
    assert len(notes.ordinary) == 3
    assert not notes.direct


def test_a_kernel_that_cannot_be_compiled_is_tried_once(notes, monkeypatch) -> None:
    """The reason is kept for each form of it; other forms are tried."""
    from metis_hf.numerics.kernels import choice

    choice.forget_failures()
    tried = []

    def refuse(*values, **options) -> None:
        tried.append(options)
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(notes, "run", refuse)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"cannot compile add_rows: Failed to find C comp"):
            launch()
    assert len(tried) == 1
    with pytest.raises(RuntimeError, match="cannot compile add_rows"):
        launch(columns=33)
    assert len(tried) == 2
    choice.forget_failures()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("Triton Error [HIP]: an illegal memory access was encountered"),
        TypeError("x"),
    ],
)
def test_failures_of_running_kernels_are_not_taken_for_the_compiler(
    notes, monkeypatch, error
) -> None:
    def fail(*values, **options) -> None:
        raise error

    monkeypatch.setattr(notes, "run", fail)
    with pytest.raises(type(error), match=str(error)[:6]) as caught:
        launch()
    assert caught.value is error


def test_other_releases_are_left_alone(notes, monkeypatch) -> None:
    import triton

    from metis_hf.numerics.kernels import triton_direct

    monkeypatch.setattr(triton, "__version__", "4.0.0")
    importlib.reload(triton_direct)
    launch()
    launch()
    assert len(notes.ordinary) == 2
    assert not notes.direct
