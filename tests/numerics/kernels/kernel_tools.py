"""What tests of kernels share: quantizers, tensors where shortcuts show, comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import (
    Packed,
    cpu_library,
    fake_quantize,
    fused,
    pack,
    pack_with_values,
    unpack,
    use_kernels,
)
from metis_hf.numerics.kernels.layout import Groups
from numerics.cases import assert_same_bits
from numerics.helpers import seeded

FP32_MAX = torch.finfo(torch.float32).max
needs_compiler = pytest.mark.skipif(cpu_library.missing() is not None, reason="no C++ compiler")
# Together they have every branch of the library.
COMPILED = {
    "rows": (Quantizer(), -1, torch.float32),
    "rows, one level, up, bf16": (
        Quantizer(two_level=False, scale_rounding="up"),
        -1,
        torch.bfloat16,
    ),
    "columns, stochastic": (Quantizer(rounding="stochastic"), 0, torch.float32),
    "rows, 4/6": (Quantizer(scale_rule="four-over-six"), -1, torch.float32),
    "squares, 4/6, one level": (
        Quantizer(tile="square", scale_rule="four-over-six", two_level=False),
        -1,
        torch.float32,
    ),
    "columns, 4/6, stochastic": (
        Quantizer(rounding="stochastic", scale_rule="four-over-six"),
        0,
        torch.bfloat16,
    ),
    "rows, search": (Quantizer(scale_rule="search"), -1, torch.float32),
    "rows, MS-EDEN": (Quantizer(scale_rule="eden"), -1, torch.float32),
    "columns, MS-EDEN": (Quantizer(scale_rule="eden"), 0, torch.float32),
    "squares, MS-EDEN, up, one level": (
        Quantizer(tile="square", scale_rule="eden", scale_rounding="up", two_level=False),
        -1,
        torch.float32,
    ),
    "squares, up": (Quantizer(tile="square", scale_rounding="up"), -1, torch.float32),
    "rows, 16/17, stochastic": (
        Quantizer(rounding="stochastic", scale_rule="unbiased"),
        -1,
        torch.float32,
    ),
}
ALL = [
    Quantizer(
        rounding=rounding, scale_rounding=scale, two_level=two_level, tile=tile, scale_rule=rule
    )
    for rule in ("absmax", "four-over-six", "unbiased")
    for rounding in ("nearest", "stochastic")
    for scale in ("nearest", "up")
    for two_level in (True, False)
    for tile in ("row", "square")
] + [
    Quantizer(scale_rule=rule, scale_rounding=scale, two_level=two_level, tile=tile)
    for rule in ("search", "eden")
    for scale in ("nearest", "up")
    for two_level in (True, False)
    for tile in ("row", "square")
]


def variants(quantizers: Sequence[Quantizer]) -> list[tuple[Quantizer, int]]:
    """With rows along both dimensions."""
    return [(q, dim) for q in quantizers for dim in ((-1, 0) if q.tile == "row" else (-1,))]


VARIANTS = variants(ALL)


def both(quantizer: Quantizer, x: Tensor, kernel: str = "compiled", **options) -> None:
    """The kernel's result is the reference's; the input is left alone."""
    before = x.clone()
    with use_kernels("reference"):
        wanted = quantizer(x, key=5, **options)
    with use_kernels(kernel):
        actual = quantizer(x, key=5, **options)
    assert_same_bits(actual, wanted)
    assert_same_bits(x, before)


def adversarial() -> dict[str, Tensor]:
    """Tensors [32 48] where shortcuts in the arithmetic show."""
    g = seeded(0)
    normal = torch.randn(32, 48, generator=g)
    wide = normal * torch.exp2(torch.rand(32, 1, generator=g) * 40 - 20)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(32, 6)
    ties[::2] *= -1
    ties[0] = 2688
    scales = torch.zeros(32, 48)
    scales[:, ::16] = torch.exp2(torch.linspace(-20, 9, 96)).view(32, 3) * 6
    bits = torch.randint(-(2**31), 2**31 - 1, (32, 48), generator=g, dtype=torch.int64)
    tensors = {
        "normal": normal,
        "wide rows": wide,
        "ties": ties,
        "every E4M3 scale": scales,
        "ties of scales": scales * 1.0625,
        "any finite bits": bits.to(torch.int32).view(torch.float32).nan_to_num(1.0, 1.0, 1.0),
        "zero": torch.zeros(32, 48),
        "minus zero": -torch.zeros(32, 48),
        "some zero blocks": torch.where(torch.arange(48) < 20, normal, -0.0),
        "subnormal": normal * 1e-42,
        "tiny": normal * 1e-36,
        "largest": torch.full((32, 48), FP32_MAX),
        "largest and smallest": torch.where(torch.arange(48) % 2 == 0, FP32_MAX, -1e-45).repeat(
            32, 1
        ),
    }
    for name, value in {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}.items():
        tensors[name] = normal.clone()
        tensors[name][3, 20] = value
    return tensors


TENSORS = adversarial()


@st.composite
def tensors(draw, quantizers=tuple(ALL)) -> tuple[Tensor, Quantizer, int]:
    """A tensor of any shape and stride, how to quantize it, and along what."""
    quantizer = draw(st.sampled_from(quantizers))
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    dim = draw(st.integers(-len(shape), -1))
    x = torch.randn(shape, generator=seeded(draw(st.integers(0, 99))))
    x = x * 2.0 ** draw(st.integers(-130, 120))
    x = x.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    if draw(st.booleans()) and len(shape) > 1:
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if draw(st.booleans()):
        x = torch.cat([x, x], -1)[..., 1::2][..., : shape[-1]]
    return x, quantizer, dim


def finite(x: Tensor) -> bool:
    return bool(x.float().isfinite().all())


def check(
    x: Tensor, quantizer: Quantizer, dim: int, dtype=torch.float32, low=None, name="compiled"
) -> None:
    """Codes, scales and values with the kernels against the reference, with and without a split."""
    exact = None if low is None else low * 1.03
    for minus, plus in {(None, None), (low, low), (exact, low), (None, low)}:
        found: dict[str, tuple[Packed, Tensor, Tensor, Tensor]] = {}
        given = {"dim": dim, "dtype": dtype, "key": 5, "minus": minus, "plus": plus}
        with use_kernels(name):
            codes, values = pack_with_values(x, quantizer, scaled=True, **given)
        for kernels in ("reference", name):
            options = {"dim": dim, "dtype": dtype}
            with use_kernels(kernels):
                packed = pack(x, quantizer, dim=dim, key=5, minus=minus)
                found[kernels] = (
                    packed,
                    unpack(packed, quantizer, shape=tuple(x.shape), plus=plus, **options),
                    unpack(packed, quantizer, shape=tuple(x.shape), scaled=False, **options),
                    fake_quantize(x, quantizer, key=5, minus=minus, plus=plus, **options)[0],
                )
        wanted, actual = found["reference"], found[name]
        if finite(x):  # codes of NaN are arbitrary
            assert torch.equal(actual[0].codes.flatten(), wanted[0].codes.flatten())
            assert torch.equal(codes.codes.flatten(), wanted[0].codes.flatten())
        assert_same_bits(codes.scale.float(), wanted[0].scale.float())
        if values is not None:
            assert_same_bits(values, wanted[1])
        assert_same_bits(actual[0].scale.float(), wanted[0].scale.float())
        for part in (1, 3):
            assert_same_bits(actual[part], wanted[part])
        if finite(x):  # else the tensor scale has the infinity, and zeros have any sign without it
            assert_same_bits(actual[2], wanted[2])
        assert_same_bits(wanted[1], wanted[3])  # half way and on is the whole way
        # What one packs the other unpacks: a compilation may fail between the two.
        for kernels, other in (("reference", actual), (name, wanted)):
            with use_kernels(kernels):
                crossed = unpack(
                    other[0], quantizer, dim=dim, shape=tuple(x.shape), dtype=dtype, plus=plus
                )
            assert_same_bits(crossed, wanted[1])


def rotated(
    x: Tensor,
    quantizer: Quantizer,
    groups: Groups,
    *,
    dim: int,
    key: noise.Key | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values of a matrix that a kernel rotates, quantizes and rotates back."""
    kernels = fused.taking_groups(x, quantizer, dim=dim, dtype=dtype)
    assert kernels is not None
    options = {"dim": dim, "key": key, "dtype": dtype, "scaled": True, "groups": groups}
    return kernels.fake_quantize(x, quantizer, **options)[0]


def low_rank(shape: tuple[int, ...]) -> Tensor:
    g = seeded(9)
    return torch.randn(shape[0], 2, generator=g) @ torch.randn(2, shape[1], generator=g)
