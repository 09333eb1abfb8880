"""Products of a tall matrix in BF16 with a thin one in FP32."""

from __future__ import annotations

import pytest
import torch

from metis_hf.transforms.products import bf16_parts, thin_product
from numerics.helpers import seeded


def test_parts_add_up_to_the_bit() -> None:
    v = torch.randn(5, 300, generator=seeded(0)) * torch.exp2(torch.linspace(-60, 60, 300))
    parts = bf16_parts(v, 8)
    assert parts.shape == (3, 8, 300)
    assert parts.dtype is torch.bfloat16
    assert torch.equal(parts.double().sum(0)[:5], v.double())
    assert not parts[:, 5:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_on_the_cpu_it_is_the_product_in_the_dtype_of_the_thin_matrix(dtype) -> None:
    x = torch.randn(40, 30, generator=seeded(0)).to(dtype)
    v = torch.randn(30, 3, generator=seeded(1)).to(torch.float64 if dtype.itemsize == 8 else None)
    assert torch.equal(thin_product(x, v), x.to(v.dtype) @ v)


def test_the_way_of_cuda_devices(monkeypatch) -> None:
    """With a GEMM that multiplies BF16 and adds up in FP32, which a CPU does not offer."""
    x = torch.randn(40, 30, generator=seeded(0)).bfloat16()
    v = torch.randn(30, 5, generator=seeded(1))
    seen = []

    def mm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        seen.append((a.dtype, b.dtype, b.shape))
        return (a.double() @ b.double()).to(out_dtype)

    monkeypatch.setattr("metis_hf.transforms.products.kernels_for", lambda *tensors: "triton")
    monkeypatch.setattr(torch, "mm", mm)
    found = thin_product(x, v)
    assert seen == [(torch.bfloat16, torch.bfloat16, (30, 24))]
    assert found.shape == (40, 5)
    torch.testing.assert_close(found.double(), x.double() @ v.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("width", [1, 8, 46])
def test_on_a_gpu_it_is_as_exact_as_fp32(width) -> None:
    x = torch.randn(2048, 768, generator=seeded(0)).bfloat16()
    x[::100] *= 1000
    v = torch.linalg.qr(torch.randn(768, width, generator=seeded(1)).double()).Q.float()
    exact = x.double() @ v.double()
    scale = x.double().norm(dim=1, keepdim=True)
    single = ((x.float().cuda() @ v.cuda()).cpu().double() - exact).div(scale).abs().max()
    found = ((thin_product(x.cuda(), v.cuda())).cpu().double() - exact).div(scale).abs().max()
    assert found < 4 * single
    assert found < 2e-6
