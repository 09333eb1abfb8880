"""What kernels share within a layer's call: fingerprints in one launch, zeros, and magnitudes.

test_kernels_on_gpu.py runs `CallCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from metis_hf import MetisConfig, noise
from metis_hf.layers.make import convert_linear
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import pack_with_values, unpack, use_kernels
from metis_hf.numerics.kernels.layout import Groups
from metis_hf.numerics.kernels.scratch import Measured
from numerics.cases import assert_same_bits
from numerics.helpers import seeded
from numerics.kernels.kernel_tools import rotated

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

    @pytest.mark.parametrize("rotated_first", [True, False])
    @pytest.mark.parametrize("shape", [(1, 16), (70, 48), (128, 300)])
    def test_magnitudes_that_come_next_are_found_with_the_first(self, shape, rotated_first) -> None:
        """Of a tensor as it is and rotated, and of another one of another size and dtype.

        The next launches find nothing: what they are made of is known.
        """
        x = torch.randn(shape, generator=seeded(0)).bfloat16().to(self.device)
        for other in (torch.randn(33, 48, generator=seeded(1)), torch.randn(300, 70).T):
            other, key = other.to(self.device) * 1e-4, self.key(x)
            quantizer, groups = Quantizer(), Groups(16, noise.Key(3))
            options = {"dim": 0, "key": None, "dtype": torch.float32}
            with use_kernels("triton"):
                wanted = rotated(x, quantizer, groups, **options)
            measured = Measured(x), Measured(x, groups, 0), Measured(other)
            key.scratch.expect(*measured)
            with use_kernels("triton"):
                first = None if rotated_first else quantizer(x, key=key)
                assert key.scratch.expected() == ([] if first is not None else list(measured))
                found = rotated(x, quantizer, groups, **{**options, "key": key})
                assert key.scratch.expected() == []
                first = quantizer(x, key=key) if first is None else first
                second = quantizer(other, key=key)
            assert_same_bits(found.cpu(), wanted.cpu())
            with use_kernels("reference"):
                assert_same_bits(first.cpu(), quantizer(x.cpu()))
                assert_same_bits(second.cpu(), quantizer(other.cpu()))

    @pytest.mark.parametrize("dim", [0, -1])
    @pytest.mark.parametrize("tile", ["row", "square"])
    def test_codes_and_values_of_one_launch_are_equal(self, dim, tile) -> None:
        for place, shape in enumerate([(1, 1), (1, 48), (40, 33), (17, 32), (48, 64)]):
            x = torch.randn(shape, generator=seeded(place)).to(DTYPES[place % 3])
            if dim == 0 and tile == "row" and shape[1] % 16:
                continue  # the reference's form, in which kernels do not pack
            for scaled, dtype in ((True, torch.float32), (False, torch.bfloat16)):
                quantizer = Quantizer(rounding="stochastic", tile=tile)
                options = {"dim": dim, "key": 7, "dtype": dtype, "scaled": scaled}
                with use_kernels("triton"):
                    packed, values = pack_with_values(x.to(self.device), quantizer, **options)
                    read = {"dim": dim, "shape": shape, "dtype": dtype, "scaled": scaled}
                    again = unpack(packed, quantizer, **read)
                assert values is not None
                assert_same_bits(values.cpu(), again.cpu())
                with use_kernels("reference"):
                    wanted, none = pack_with_values(x, quantizer, **options)
                    assert none is None
                    assert_same_bits(values.cpu(), unpack(wanted, quantizer, **read))

    @pytest.mark.parametrize(
        ("scheme", "inputs"),
        [("nvfp4-rne", 48), ("nvidia", 48), ("quartet2", 48), ("metis", 48), ("metis", 96)],
    )
    def test_a_layer_gives_what_the_reference_gives(self, scheme, inputs) -> None:
        """To the bit without rotations and splits; these are added up in another order."""
        found = {}
        for name in ("reference", "triton"):
            torch.manual_seed(0)
            linear = torch.nn.Linear(inputs, 32, dtype=torch.bfloat16)
            layer = convert_linear(linear, MetisConfig(scheme=scheme), name="layer").train()
            layer = layer.to(self.device)
            x = torch.randn(33, inputs, generator=seeded(1)).bfloat16().to(self.device)
            dy = torch.randn(33, 32, generator=seeded(2)).bfloat16().to(self.device)
            x.requires_grad_()
            with use_kernels(name):
                y = layer(x)
                y.backward(dy)
            found[name] = y.detach(), x.grad, layer.weight.grad
        moved = {"nvfp4-rne": 0, "nvidia": 1, "quartet2": 2, "metis": 3}[scheme]  # the last ones
        for place, (actual, wanted) in enumerate(zip(found["triton"], found["reference"])):
            assert (actual - wanted).norm() <= 0.01 * wanted.norm()
            assert torch.equal(actual, wanted) or place >= 3 - moved

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
