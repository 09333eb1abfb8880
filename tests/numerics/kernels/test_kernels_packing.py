"""Codes and scales of compiled kernels are the reference's and give its values back, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import (
    Packed,
    choice,
    cpu,
    fake_quantize,
    formulation,
    pack,
    unpack,
    use_kernels,
)
from metis_hf.numerics.kernels.layout import packs
from numerics.cases import assert_same_bits
from numerics.helpers import seeded
from numerics.kernels.test_kernels import ALL, TENSORS, needs_compiler


def finite(x: Tensor) -> bool:
    return bool(x.float().isfinite().all())


def check(
    x: Tensor, quantizer: Quantizer, dim: int, dtype=torch.float32, low=None, name="compiled"
) -> None:
    """Codes, scales and values with the kernels against the reference, with and without a split."""
    exact = None if low is None else low * 1.03
    for minus, plus in {(None, None), (low, low), (exact, low), (None, low)}:
        found: dict[str, tuple[Packed, Tensor, Tensor, Tensor]] = {}
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


def low_rank(shape: tuple[int, ...]) -> Tensor:
    g = seeded(9)
    return torch.randn(shape[0], 2, generator=g) @ torch.randn(2, shape[1], generator=g)


@pytest.fixture(params=["formulation", pytest.param("C++", marks=needs_compiler)])
def kernels(request) -> Iterator[None]:
    """The formulation, operation by operation, or the C++."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "formulation":
            patched.setattr(cpu, "run", formulation.run)
            patched.setattr(cpu, "missing", lambda: None)
        yield


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", TENSORS)
def test_kernels_pack_as_the_reference(name) -> None:
    x = TENSORS[name]
    for quantizer in ALL:
        for dim in (-1, 0) if quantizer.tile == "row" else (-1,):
            check(x, quantizer, dim)


@pytest.mark.usefixtures("kernels")
@settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
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
def test_a_nan_spoils_no_other_block() -> None:
    """Two blocks share bytes; with one level of scales the other one stays what it is."""
    quantizer = Quantizer(two_level=False)
    x = torch.randn(4, 32, generator=seeded(3))
    x[1, 5] = torch.nan
    with use_kernels("compiled"):
        values = unpack(pack(x, quantizer), quantizer, shape=(4, 32))
    assert values[1, :16].isnan().all()
    others = torch.cat([values[1, 16:], values[[0, 2, 3]].flatten()])
    assert others.isfinite().all()


def test_what_is_packed_by_kernels() -> None:
    tile = Quantizer().tile
    assert packs((5, 33), tile, -1)
    assert packs((5, 32), tile, 0)
    assert not packs((5, 33), tile, 0)  # the reference does not pad columns
    assert packs((5, 33), Quantizer(tile="square").tile, 0)


@pytest.mark.parametrize("task", ["pack", "unpack"])
def test_a_failing_compilation_leaves_the_reference(task, monkeypatch) -> None:
    """In the middle: packed by the kernels, unpacked by the reference, and the other way round."""
    x, low = torch.randn(256, 256, generator=seeded(0)), low_rank((256, 256))
    quantizer = Quantizer()
    with use_kernels("reference"):
        wanted = fake_quantize(x, quantizer, minus=low, plus=low)[0]

    def fail(variant, *rest):
        if variant.task == task:
            raise cpu.CompilationError("cc1plus: out of memory")
        return formulation.run(variant, *rest)

    def there_and_back() -> Tensor:
        packed = pack(x, quantizer, minus=low)
        return unpack(packed, quantizer, shape=(256, 256), plus=low)

    monkeypatch.setattr(choice, "_chosen", None)
    monkeypatch.setattr(cpu, "missing", lambda: None)
    monkeypatch.setattr(cpu, "run", fail)
    monkeypatch.setattr(choice, "_failed", False)
    monkeypatch.setattr(choice, "_warned", set())
    with pytest.warns(UserWarning, match="out of memory"):
        assert_same_bits(there_and_back(), wanted)
