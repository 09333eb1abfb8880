"""Kernels on a CUDA device, against the reference on the CPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from metis_hf import noise
from metis_hf.numerics import kernels
from metis_hf.numerics.kernels import choice, use_kernels
from numerics.cases import assert_same_bits
from numerics.helpers import seeded
from numerics.kernels.basis_cases import BasisCases
from numerics.kernels.call_cases import CallCases
from numerics.kernels.epilogue_cases import EpilogueCases
from numerics.kernels.kernel_tools import low_rank
from numerics.kernels.low_rank_cases import LowRankCases
from numerics.kernels.projection_cases import ProjectionCases
from numerics.kernels.rotation_cases import RotationCases
from numerics.kernels.sums_cases import SumsCases
from numerics.kernels.triton_cases import STOCHASTIC, Cases, NoiseCases, on, reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
by_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is not installed, or TRITON_INTERPRET=1: it compiles nothing",
)


@by_triton
class TestTritonOnGpu(Cases):
    kernels = "triton"
    device = "cuda"

    def test_without_synchronization_and_in_a_graph(self) -> None:
        x = torch.randn(200, 300, generator=seeded(0)) * torch.exp2(torch.linspace(-20, 20, 300))
        low = low_rank(x.shape)
        key = noise.Key(5, torch.tensor(7, dtype=torch.int32))
        device, device_low, device_key = x.cuda(), low.cuda(), on("cuda", key)

        def run() -> tuple[torch.Tensor, ...]:
            options = {"dim": 0, "key": device_key}
            with use_kernels("triton"):
                packed = kernels.pack(device, STOCHASTIC, dim=-1, key=device_key)
                values = STOCHASTIC(device, minus=device_low, plus=device_low, **options)
            return values, *packed

        run()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
        wanted = reference(x, STOCHASTIC, dim=0, key=key, minus=low, plus=low)
        assert_same_bits(results[0].cpu(), wanted)
        for result, replayed in zip(results, captured, strict=True):
            bytes_, others = (part.reshape(-1).view(torch.uint8) for part in (result, replayed))
            assert torch.equal(bytes_, others)


@by_triton
class TestNoiseOnGpu(NoiseCases):
    device = "cuda"

    def test_it_is_drawn_in_one_launch(self) -> None:
        key = noise.Key(5, torch.tensor(7, dtype=torch.int32))
        x = torch.randn(300, 40, generator=seeded(0))
        for name in ("triton", "reference"):
            with use_kernels(name):
                assert (choice.noise_backend(x.cuda()) is not None) == (name == "triton")
                assert torch.equal(noise.fingerprint(x.cuda()).cpu(), noise.fingerprint(x))
                drawn = noise.uniform((30, 50), on("cuda", key), torch.device("cuda"))
                assert torch.equal(drawn.cpu(), noise.uniform((30, 50), key))


@by_triton
class TestCallsOnGpu(CallCases):
    device = "cuda"


@by_triton
class TestEpilogueOnGpu(EpilogueCases):
    kernels = "triton"
    device = "cuda"


@by_triton
class TestRotationOnGpu(RotationCases):
    device = "cuda"


@by_triton
class TestSumsOnGpu(SumsCases):
    device = "cuda"


@by_triton
class TestProjectionOnGpu(ProjectionCases):
    device = "cuda"


@by_triton
class TestBasesOnGpu(BasisCases):
    device = "cuda"


@by_triton
class TestLowRankOnGpu(LowRankCases):
    device = "cuda"


class TestEpilogueInTorchOnGpu(EpilogueCases):
    kernels = "reference"
    device = "cuda"
