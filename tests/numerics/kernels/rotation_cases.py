"""Quantizers that rotate groups by themselves: what they must give, on any device.

test_kernels_on_gpu.py runs `RotationCases` on GPUs, and this file in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics import Quantizer, Tile
from metis_hf.numerics.kernels import fused, unpack, use_kernels
from metis_hf.numerics.kernels.layout import Groups
from metis_hf.numerics.scaling import OuterScale
from metis_hf.operands import Hadamard, RandomHadamard
from metis_hf.transforms.hadamard import group_size
from numerics.cases import assert_same_bits
from numerics.helpers import seeded
from numerics.kernels.kernel_tools import rotated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STOCHASTIC = Quantizer(rounding="stochastic", scale_rounding="up")
QUANTIZERS = {
    "nearest": Quantizer(),
    "stochastic": STOCHASTIC,
    "one level": replace(STOCHASTIC, two_level=False),
    "four over six": Quantizer(scale_rule="four-over-six"),
    "eden": Quantizer(scale_rule="eden"),
    "token": replace(STOCHASTIC, outer_scale=OuterScale.TOKEN),
}
# Groups of 16 to 128 along each dimension; each shape has another dtype, key and dtype of results.
SHAPES = [(1, 16), (40, 128), (17, 32), (3, 5), (128, 48), (60, 70)]
NOISE = noise.Key(5, torch.tensor(-77, dtype=torch.int32))
CONTENT = torch.tensor(1234567, dtype=torch.int32)


def signs_of(groups: Groups) -> Tensor:
    """The diagonal D [size]."""
    if groups.signs is None:
        return torch.ones(groups.size)
    return 1.0 - 2.0 * (noise.random_bits(groups.size, groups.signs) < 0)


def sums(x: Tensor) -> Tensor:
    """H x, not divided, of groups [.. size]: sums and differences of entries 1, 2, 4 .. apart."""
    size, apart = x.shape[-1], 1
    while apart < size:
        pairs = x.unflatten(-1, (-1, 2, apart))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        apart *= 2
    return x


def turned(x: Tensor, groups: Groups, dim: int, back: bool = False) -> Tensor:
    """The rotation of a matrix, padded to blocks along `dim`, in the dtype of x."""
    lines = x.movedim(dim, -1)
    lines = F.pad(lines, (0, -lines.shape[-1] % 16)).unflatten(-1, (-1, groups.size))
    signs = signs_of(groups).to(x.dtype)
    factor = torch.tensor(groups.size**-0.5, dtype=x.dtype)
    lines = sums(lines * factor) * signs if back else sums(lines * (signs * factor))
    return lines.flatten(-2).movedim(-1, dim)


def by_hand(
    x: Tensor, quantizer: Quantizer, groups: Groups, dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Butterflies in torch around the reference quantizer."""
    with use_kernels("reference"):
        values = quantizer(turned(x.float(), groups, dim), dim=dim, key=NOISE)
    return turned(values, groups, dim, back=True).to(dtype)


def groups_for(n: int, signs: noise.Key | None = None) -> Groups:
    return Groups(group_size(n), signs)


def matrix(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Entries of many sizes, some of them zero."""
    x = torch.randn(shape, generator=seeded(seed))
    return x * torch.exp2(torch.linspace(-12, 12, shape[1])) * (x.abs() > 0.1)


def on(device: str, key: noise.Key | None) -> noise.Key | None:
    if key is None or key.data is None:
        return key
    return key._replace(data=key.data.to(device))


class RotationCases:
    device: str

    def quantized(
        self,
        x: Tensor,
        quantizer: Quantizer,
        groups: Groups,
        dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Values from the kernel, at once and by way of codes, which are equal."""
        options = {"dim": dim, "dtype": dtype}
        moved = Groups(groups.size, on(self.device, groups.signs))
        x, key = x.to(self.device), on(self.device, NOISE)
        with use_kernels("triton"):
            values = rotated(x, quantizer, moved, key=key, **options)
            kernels = fused.taking_groups(x, quantizer, dim=dim)
            packed = kernels.pack(x, quantizer, dim=dim, key=key, groups=moved)
            options["shape"] = (values.shape[0], values.shape[1])
            kernels = fused.taking_groups(packed.codes, quantizer, **options)
            again = kernels.unpack(packed, quantizer, scaled=True, groups=moved, **options)
            assert_same_bits(again.cpu(), values.cpu())
        return values.cpu()

    @pytest.mark.parametrize("dim", [0, -1])
    @pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
    def test_values_are_those_of_the_reference_between_butterflies(self, quantizer, dim) -> None:
        keys = None, noise.Key(9), noise.Key(9, CONTENT)
        for place, shape in enumerate(SHAPES):
            if dim == 0 and shape[1] % 16 and quantizer.scale_rule.value == "eden":
                continue  # see `test_what_no_kernel_does`
            x = matrix(shape, place).to(DTYPES[place % 3])
            groups = groups_for(shape[dim], keys[(place + dim) % 3])
            dtype = DTYPES[(place // 2) % 3]
            found = self.quantized(x, quantizer, groups, dim, dtype)
            assert_same_bits(found, by_hand(x, quantizer, groups, dim, dtype))

    @pytest.mark.parametrize("dim", [0, -1])
    def test_codes_are_those_of_the_reference(self, dim) -> None:
        for shape in [(128, 32), (40, 70), (5, 16)]:
            groups, x = groups_for(shape[dim], noise.Key(3)), matrix(shape)
            with use_kernels("triton"):
                kernels = fused.taking_groups(x.to(self.device), STOCHASTIC, dim=dim)
                options = {"dim": dim, "key": on(self.device, NOISE), "groups": groups}
                packed = kernels.pack(x.to(self.device), STOCHASTIC, **options)
            there = turned(x, groups, dim)
            with use_kernels("reference"):
                wanted = STOCHASTIC(there, dim=dim, key=NOISE)
                codes = type(packed)(*(part.cpu() for part in packed))
                found = unpack(codes, STOCHASTIC, dim=dim, shape=there.shape)
            assert_same_bits(found, wanted)

    @pytest.mark.parametrize("size", [16, 32, 64, 128])
    def test_butterflies_are_hadamards_matrix(self, size) -> None:
        """Within the rounding of log2(n) sums and of the factor, of all magnitudes added up."""
        groups, x = Groups(size, noise.Key(9)), torch.randn(40, size, generator=seeded(1))
        h = torch.ones(1, 1, dtype=torch.float64)
        while len(h) < size:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        exact = (x.double() * signs_of(groups)) @ h / size**0.5
        stages = size.bit_length() + 1
        bound = stages * 2.0**-24 * x.double().abs().sum(-1, keepdim=True) / size**0.5
        assert ((turned(x, groups, -1) - exact).abs() <= bound).all()
        fine = Quantizer(scale_rule="search")
        with use_kernels("triton"):
            found = rotated(x.to(self.device), fine, groups, dim=-1, key=None)
        assert (found.cpu() - x).norm() < 0.1 * x.norm()

    @pytest.mark.parametrize("dim", [0, -1])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
    def test_a_poisoned_group_leaves_others_alone(self, value, dim) -> None:
        x = torch.randn(128, 128, generator=seeded(2))
        groups, one_level = Groups(64, noise.Key(1)), QUANTIZERS["one level"]
        clean = self.quantized(x, one_level, groups, dim)
        x[3, 5], x[4, 5] = value, -value
        found = self.quantized(x, one_level, groups, dim)
        assert_same_bits(found, by_hand(x, one_level, groups, dim))
        others = torch.ones(128, 128, dtype=torch.bool)
        if dim == 0:
            others[:64, 5] = False
        else:
            others[3:5, :64] = False
        assert torch.equal(found[others], clean[others])
        whole = self.quantized(x, STOCHASTIC, groups, dim)
        assert_same_bits(whole, by_hand(x, STOCHASTIC, groups, dim))

    @pytest.mark.parametrize("dim", [0, -1])
    def test_strides_are_free(self, dim) -> None:
        x = matrix((64, 96))
        for view in (x.T, x[::2], x[:, 1::2], x[3:, 16:80], x[:1].expand(48, 96)):
            groups = groups_for(view.shape[dim], noise.Key(2, CONTENT))
            found = self.quantized(view, STOCHASTIC, groups, dim)
            assert_same_bits(found, by_hand(view, STOCHASTIC, groups, dim))

    def test_what_no_kernel_does(self) -> None:
        x = matrix((32, 40)).to(self.device)
        square = replace(STOCHASTIC, tile=Tile.SQUARE)
        with use_kernels("triton"):
            for tensor, quantizer in [
                (x.double(), STOCHASTIC),
                (x, square),
                (x, Quantizer("mxfp4")),
                (x, QUANTIZERS["eden"]),
                (x[None], STOCHASTIC),
            ]:
                assert fused.taking_groups(tensor, quantizer, dim=0) is None
            assert fused.taking_groups(x, STOCHASTIC, dim=0, dtype=torch.float64) is None
            assert fused.taking_groups(x, STOCHASTIC, dim=0)
        with use_kernels("reference"):
            assert fused.taking_groups(x, STOCHASTIC, dim=0) is None

    @pytest.mark.parametrize("dim", [0, -1])
    @pytest.mark.parametrize(
        "conditioner",
        [Hadamard(seed=3), Hadamard(seed=None), RandomHadamard(seed=3)],
        ids=["signs", "no signs", "random"],
    )
    def test_operands_are_rotated_by_kernels(self, conditioner, dim) -> None:
        """Within a step of the ones that a product with a matrix rotates; codes give the same."""
        key, shape = on(self.device, NOISE), (1, 0)
        for shape in [(1, 48), (40, 70), (128, 32), (0, 16), (16, 0)]:
            x = torch.randn(shape, generator=seeded(4)).bfloat16().to(self.device)
            options = {"dim": dim, "key": key}
            with use_kernels("reference"):
                wanted = conditioner(x, STOCHASTIC, **options)
            with use_kernels("triton"):
                found = conditioner(x, STOCHASTIC, **options)
                if x.numel():
                    encoded = conditioner.encode(x, STOCHASTIC, **options)
                    again = conditioner.decode(encoded, STOCHASTIC, dim=dim, shape=shape)
                    assert_same_bits(again.cpu(), found.cpu())
            assert found.shape == wanted.shape
            if x.numel():
                # A sum that differs in its last bit may round to the next code: a rare one.
                assert (found - wanted).norm() <= 0.05 * wanted.norm()


class TestInInterpreter(RotationCases):
    device = "cpu"
