"""What kernels share within a layer's call: fingerprints in one launch, zeros, and magnitudes.

test_kernels_on_gpu.py runs `CallCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from metis_hf import noise
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import use_kernels
from numerics.cases import assert_same_bits
from numerics.helpers import seeded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class CallCases:
    device: str

    def key(self, x: torch.Tensor) -> noise.Key:
        """A key as a call with x has it."""
        from metis_hf.numerics.kernels import triton_noise

        data, *_, scratch = triton_noise.fingerprints(x, x, 0)
        return noise.Key(4, data, scratch)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("added", [0, 2**31 - 1])
    def test_fingerprints_are_those_of_operations(self, dtype, added) -> None:
        from metis_hf.numerics.kernels import triton_noise

        x = torch.randn(70, 41, generator=seeded(0)).to(dtype)
        for other in (torch.randn(3, generator=seeded(1)), torch.randn(300, 300).T):
            *found, _ = triton_noise.fingerprints(x.to(self.device), other.to(self.device), added)
            own, others = noise.fingerprint(x), noise.fingerprint(other)
            wanted = own + added, others + added, own + added + others + added, others
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))

    def test_one_call_quantizes_one_tensor_again_and_again(self) -> None:
        """More often than there are zeros, along both dimensions, and other tensors between."""
        x = torch.randn(32, 48, generator=seeded(0)).to(self.device)
        key, quantizer = self.key(x), Quantizer()
        for turn in range(40):
            other = torch.randn(32, 48, generator=seeded(turn)).to(self.device) * 2**turn
            for tensor in (x, other, x.T):
                for dim, minus in ((-1, None), (0, None), (-1, tensor * 0.5)):
                    with use_kernels("reference"):
                        wanted = quantizer(tensor.cpu(), dim=dim, minus=_cpu(minus))
                    with use_kernels("triton"):
                        found = quantizer(tensor, dim=dim, key=key, minus=minus)
                    assert_same_bits(found.cpu(), wanted)

    def test_contents_that_changed_have_their_own_magnitude(self) -> None:
        x = torch.randn(32, 48, generator=seeded(0)).to(self.device)
        key, quantizer = self.key(x), Quantizer()
        for factor in (1.0, 3.7, 0.01):
            x.mul_(factor)
            with use_kernels("reference"):
                wanted = quantizer(x.cpu())
            with use_kernels("triton"):
                assert_same_bits(quantizer(x, key=key).cpu(), wanted)


def _cpu(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.cpu()


class TestInInterpreter(CallCases):
    device = "cpu"
