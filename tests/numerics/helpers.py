"""Tensors to quantize and comparisons with the reference, shared by the tests of this folder."""

from __future__ import annotations

import numpy as np
import reference as ref
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SCALE_ROUNDINGS = ["nearest", "up"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=dtype)


def operators(counter: CompileCounterWithBackend) -> list[str]:
    """The package's operators in the graphs of a compiled function."""
    targets = (str(node.target) for graph in counter.graphs for node in graph.graph.nodes)
    return [name.split(".")[1] for name in targets if name.startswith("metis_hf.")]


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
