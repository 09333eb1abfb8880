"""Codes and scales of compiled kernels are the reference's and give its values back, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import (
    fake_quantize,
    pack_with_values,
    unpack,
    use_kernels,
)
from metis_hf.numerics.kernels.layout import covers, packs
from numerics.cases import assert_same_bits
from numerics.helpers import seeded
from numerics.kernels.kernel_tools import (
    ALL,
    TENSORS,
    VARIANTS,
    check,
    low_rank,
    needs_compiler,
)


@needs_compiler
@pytest.mark.parametrize("name", TENSORS)
def test_kernels_pack_as_the_reference(name) -> None:
    """Every third choice and layout, others for the next tensor."""
    for quantizer, dim in VARIANTS[list(TENSORS).index(name) % 3 :: 3]:
        check(TENSORS[name], quantizer, dim)


@needs_compiler
@settings(max_examples=40, derandomize=True)
@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.sampled_from(ALL),
    st.sampled_from([-1, 0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_shapes_and_strides(rows, columns, quantizer, dim, dtype, flip) -> None:
    """Odd numbers of blocks and of columns among them."""
    x = torch.randn(rows, columns, generator=seeded(rows)).to(dtype)
    low = low_rank(x.shape)
    if flip:
        x, low = x.t().contiguous().t(), low.t().contiguous().t()
    check(x, quantizer, dim, torch.bfloat16 if flip else torch.float32, low)


@needs_compiler
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("columns", [64, 70])
def test_values_may_take_the_memory_of_what_is_subtracted_and_added(dim, columns) -> None:
    x, low = torch.randn(2, 37, columns, generator=seeded(columns))
    options = {"dim": dim, "key": 5}
    for quantizer in ALL:
        wanted = fake_quantize(x, quantizer, minus=low, plus=low, **options)[0]
        out, other, last = low.clone(), low.clone(), low.clone()
        given = {"dtype": torch.float32, "scaled": True, **options}
        with use_kernels("compiled"):
            found = fake_quantize(x, quantizer, minus=out, plus=out, out=out, **options)[0]
            assert (found is out) == covers(x, quantizer, dim, torch.float32, out, out)
            packed, values = pack_with_values(
                x, quantizer, minus=other, plus=other, out=other, **given
            )
            # A matrix whose column blocks are ragged is packed without values.
            assert values is (other if packs(x.shape, quantizer.tile, dim) else None)
            shape = (37, columns)
            unpacked = unpack(packed, quantizer, dim=dim, shape=shape, plus=last, out=last)
        for each in (found, unpacked, *([] if values is None else [values])):
            assert_same_bits(each, wanted)


@pytest.mark.parametrize("kernels", ["reference", pytest.param("compiled", marks=needs_compiler)])
def test_memory_of_another_dtype_or_layout_is_left_alone(kernels) -> None:
    x, low = torch.randn(2, 32, 32, generator=seeded(2))
    for dtype, out in ((torch.bfloat16, low.clone()), (torch.float32, low.t().contiguous().t())):
        options = {"dtype": dtype, "minus": out, "plus": out}
        with use_kernels(kernels):
            found = fake_quantize(x, Quantizer(), out=out, **options)[0]
            assert_same_bits(found, fake_quantize(x, Quantizer(), **options)[0])
        assert torch.equal(out, low)


def test_what_is_packed_by_kernels() -> None:
    tile = Quantizer().tile
    assert packs((5, 33), tile, -1)
    assert packs((5, 32), tile, 0)
    assert not packs((5, 33), tile, 0)  # the reference does not pad columns
    assert packs((5, 33), Quantizer(tile="square").tile, 0)
