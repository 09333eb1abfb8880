"""Coordinates of a tall matrix in a thin basis."""

from __future__ import annotations

import pytest
import torch

from metis_hf.noise import Key
from metis_hf.transforms.products import project
from metis_hf.transforms.spectral import find_basis
from numerics.helpers import seeded
from numerics.kernels.projection_cases import coordinates


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_coordinates(dtype) -> None:
    """In the dtype of the basis; of a direction that x lacks they are zero."""
    x = torch.randn(40, 30, generator=seeded(0)).to(dtype)
    x[:, 3] = 0
    v = torch.randn(30, 4, generator=seeded(1)).to(torch.float64 if dtype.itemsize == 8 else None)
    v[:, 1] = torch.eye(30)[3]
    found = project(x, v)
    for one, other in zip(found, coordinates(x, v)):
        assert one.dtype is v.dtype
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert found[1][1] == 0


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("width", [1, 8, 46])
def test_on_a_gpu_it_is_as_exact_as_fp32(width) -> None:
    x = torch.randn(2048, 768, generator=seeded(0)).bfloat16()
    x[::100] *= 1000
    v = find_basis(x.float(), width, key=Key(1))
    wanted = coordinates(x, v)
    for one, other, single in zip(project(x.cuda(), v.cuda()), wanted, project(x.float(), v)):
        error = (one.cpu().double() - other).abs().max()
        assert error < 4 * (single.double() - other).abs().max()
        assert error < 2e-6 * other.abs().max()
