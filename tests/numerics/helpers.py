"""Tensors to quantize and comparisons with the reference, shared by the tests of this folder."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import torch
from torch import Tensor

from metis_hf.numerics.kernels import formulation

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SCALE_ROUNDINGS = ["nearest", "up"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def note_tracing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows each time a quantizer's formulation is traced into a caller's graph."""
    run, noted = formulation.run, []

    @torch.compiler.assume_constant_result  # called while a graph is traced, and no part of it
    def note(task: str) -> None:
        noted.append(task)

    def noting(variant, *rest):
        note(variant.task)
        return run(variant, *rest)

    monkeypatch.setattr(formulation, "run", noting)
    return noted


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian rows whose sizes differ, so that block scales use many E4M3 exponents."""
    x = torch.randn(shape, generator=seeded(seed), dtype=torch.float64)
    if len(shape) > 1:
        rows = torch.rand((*shape[:-1], 1), generator=seeded(seed + 1), dtype=torch.float64)
        x = x * torch.exp2(10 * rows - 8)
    return x.to(dtype)


def to_numpy(x: Tensor) -> np.ndarray:
    """The fp32 array that the quantizer computes with."""
    return x.detach().to(torch.float32).numpy()


def expected(x: Tensor, **options) -> Tensor:
    return torch.from_numpy(ref.fake_quantize(to_numpy(x), **options).values).to(x.dtype)


def assert_bitwise(actual: Tensor, wanted: Tensor) -> None:
    """Same shape, dtype and values. 0 == -0: the sign of a zero carries no information here."""
    assert actual.shape == wanted.shape
    assert actual.dtype == wanted.dtype
    same = (actual == wanted) | (actual.isnan() & wanted.isnan())
    bad = (~same).nonzero()
    assert bool(same.all()), (
        f"{len(bad)} of {same.numel()} differ, first at {bad[0].tolist()}: "
        f"{actual[~same][0].item()!r} instead of {wanted[~same][0].item()!r}"
    )
