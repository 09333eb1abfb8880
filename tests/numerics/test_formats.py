"""Element formats, and fake quantization in every format, tile and scale against the reference.

Casts are held to ml_dtypes and torch on every value, every tie and their fp32 neighbours.
"""

from __future__ import annotations

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
import reference_formats as formats
import torch
from torch import Tensor

from metis_hf.numerics import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FORMATS,
    Quantizer,
    fake_quantize,
    get_format,
)
from metis_hf.numerics.formats import INT4_ELEMENT, FloatFormat
from metis_hf.numerics.rounding import round_nearest
from numerics.cases import (
    BLOCK_SIZES,
    FLT_MAX,
    FORMAT_NAMES,
    INPUTS,
    MIXED_FORMATS,
    OPTIONS,
    assert_same_array,
    assert_same_bits,
    fp32,
    has_tensor_scale,
    probes,
    ways,
)
from numerics.helpers import expected, normal

FLOATS: dict[str, tuple[FloatFormat, type]] = {
    "e2m1": (E2M1, ml_dtypes.float4_e2m1fn),
    "e2m3": (E2M3, ml_dtypes.float6_e2m3fn),
    "e3m2": (E3M2, ml_dtypes.float6_e3m2fn),
    "e4m3": (E4M3, ml_dtypes.float8_e4m3fn),
    "e5m2": (E5M2, ml_dtypes.float8_e5m2),
}
OF_TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


# --- element formats -----------------------------------------------------------------------------


def every_code(name: str) -> tuple[Tensor, np.ndarray]:
    """(all bit patterns, their fp32 values by ml_dtypes)."""
    fmt, dtype = FLOATS[name]
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    return torch.from_numpy(codes), codes.view(dtype).astype(np.float32)


@pytest.mark.parametrize("name", FLOATS)
def test_properties_are_those_of_ml_dtypes(name) -> None:
    fmt, dtype = FLOATS[name]
    info = ml_dtypes.finfo(dtype)
    assert fmt.name == name
    assert fmt.bits == info.bits
    assert fmt.mantissa_bits == info.nmant
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.max_power == 2.0 ** math.floor(math.log2(float(info.max)))


@pytest.mark.parametrize("name", FLOATS)
def test_grid_is_every_finite_value_in_the_order_of_the_codes(name) -> None:
    fmt, _ = FLOATS[name]
    values = every_code(name)[1]
    positive = values[: len(values) // 2]
    wanted = positive[np.isfinite(positive)].tolist()
    assert list(fmt.grid) == wanted == formats.ELEMENTS[name].grid


def test_int4_is_symmetric() -> None:
    """-8 is not used: a symmetric scale would reach it from one side only."""
    assert list(INT4_ELEMENT.grid) == formats.ELEMENTS["int4"].grid == [*range(8)]
    assert (INT4_ELEMENT.bits, INT4_ELEMENT.max) == (4, 7)


@pytest.mark.parametrize("name", FLOATS)
def test_nearest_agrees_with_ml_dtypes_and_torch(name) -> None:
    fmt, dtype = FLOATS[name]
    x = probes(formats.ELEMENTS[name])
    wanted = x.astype(dtype).astype(np.float32)
    assert_same_array(round_nearest(fp32(x), fmt).numpy(), wanted)
    reference = np.array([formats.element_nearest(v, formats.ELEMENTS[name]) for v in x])
    assert_same_array(reference, wanted)
    if name in OF_TORCH:
        assert_same_array(fp32(x).to(OF_TORCH[name]).float().numpy(), wanted)


def test_int4_nearest_agrees_with_rint() -> None:
    """Integers have one zero: what rounds to -0 is +0."""
    x = probes(formats.ELEMENTS["int4"])
    wanted = np.rint(x) + np.float32(0)
    assert not np.signbit(wanted[wanted == 0]).any()
    assert_same_array(round_nearest(fp32(x), INT4_ELEMENT).numpy(), wanted)
    reference = np.array([formats.element_nearest(v, formats.ELEMENTS["int4"]) for v in x])
    assert_same_array(reference, wanted)


def test_nearest_keeps_nan() -> None:
    for fmt in (*(fmt for fmt, _ in FLOATS.values()), INT4_ELEMENT):
        assert round_nearest(torch.tensor([math.nan, 1.0]), fmt).isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", FLOATS)
def test_codes_are_the_bit_patterns_of_ml_dtypes(name) -> None:
    """Every finite code, both ways.

    The remaining codes: E4M3 has NaN in 0x7f and 0xff, as here. E5M2 has infinity in 0x7c and 0xfc
    and NaN above; `decode` gives NaN for all of these, `encode` writes none of them.
    """
    fmt, _ = FLOATS[name]
    codes, values = every_code(name)
    finite = np.isfinite(values)
    decoded = fmt.decode(codes)
    assert decoded.dtype == torch.float32
    assert_same_bits(decoded[torch.from_numpy(finite)], fp32(values[finite]))
    assert decoded[torch.from_numpy(~finite)].isnan().all()
    assert torch.equal(fmt.encode(fp32(values[finite])), codes[torch.from_numpy(finite)])


def test_int4_codes_are_twos_complement() -> None:
    values = np.arange(-7, 8)
    wanted = values.astype(ml_dtypes.int4).view(np.uint8) & 0xF
    codes = INT4_ELEMENT.encode(fp32(values))
    assert codes.tolist() == wanted.tolist()
    assert codes.tolist() == [9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7]
    assert_same_bits(INT4_ELEMENT.decode(codes), fp32(values))
    every = torch.arange(16, dtype=torch.uint8)
    assert INT4_ELEMENT.decode(every).tolist() == [*range(8), *range(-8, 0)]


# --- block formats -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "element", "scale", "block", "bits"),
    [
        ("nvfp4", "e2m1", "e4m3", 16, 4.5),
        ("mxfp4", "e2m1", "e8m0", 32, 4.25),
        ("mxfp6-e2m3", "e2m3", "e8m0", 32, 6.25),
        ("mxfp6-e3m2", "e3m2", "e8m0", 32, 6.25),
        ("mxfp8-e4m3", "e4m3", "e8m0", 32, 8.25),
        ("mxfp8-e5m2", "e5m2", "e8m0", 32, 8.25),
        ("fp8-e4m3", "e4m3", "fp32", None, 8),
        ("fp8-e5m2", "e5m2", "fp32", None, 8),
        ("int4", "int4", "fp32", 32, 5),
        ("nvint4", "int4", "e4m3", 16, 4.5),
        ("ufp4", "int4", "fp32", 16, 6),
        ("if4", "e2m1|int4*6/7", "e4m3", 16, 4.5),
        ("mixfp4", "e2m1|int4", "e4m3", 16, 4.5),
    ],
)
def test_format_is_what_its_name_says(name, element, scale, block, bits) -> None:
    fmt = get_format(name)
    assert (fmt.name, fmt.element.name, fmt.scale.name) == (name, element, scale)
    assert (fmt.block_size, fmt.bits_per_element) == (block, bits)
    assert get_format(fmt) is fmt


def test_no_format_is_untested() -> None:
    """Those whose blocks choose between two grids have tests of their own."""
    tested = sorted([*FORMAT_NAMES, *MIXED_FORMATS])
    assert sorted(FORMATS) == tested == sorted(formats.FORMATS)


# --- nearest: bit for bit ------------------------------------------------------------------------


@pytest.mark.parametrize("name", INPUTS)
def test_every_way_to_quantize_equals_the_reference(name) -> None:
    """Arithmetic is fp32 whatever comes in; nothing finite gives a NaN; the input is left alone."""
    x = INPUTS[name]
    before = x.clone()
    for options in ways(x):
        every_dim = name == "every dimension" and options["tile"] == "row"
        for dim in range(x.dim()) if every_dim else (-1,):
            actual = fake_quantize(x, dim=dim, **options)
            assert_same_bits(actual, expected(x, dim=dim, **options))
            assert not x.float().isfinite().all() or not actual.isnan().any()
    assert_same_bits(x, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_spoil_all_that_shares_their_scale(bad) -> None:
    """The whole tensor where it has a scale, else the block, and nothing beside it."""
    clean = normal(64, 80, seed=17)
    clean[3, 33] = 0
    x = clean.clone()
    x[3, 33] = bad
    for options in OPTIONS:
        size = BLOCK_SIZES.get(options["fmt"])
        actual = fake_quantize(x, **options)
        wanted = torch.zeros(x.shape, dtype=torch.bool)
        if has_tensor_scale(options):
            wanted[:] = True
        elif size is None:
            wanted[3] = True
        else:
            rows = slice(0, size) if options["tile"] == "square" else slice(3, 4)
            wanted[rows, 33 // size * size : 33 // size * size + size] = True
        assert torch.equal(actual.isnan(), wanted)
        if not has_tensor_scale(options):
            assert_same_bits(actual[~wanted], fake_quantize(clean, **options)[~wanted])


def test_a_copied_quantizer_is_the_same() -> None:
    """Layers are copied and pickled with their quantizers; formats are compared by value."""
    x = normal(20, 40, seed=19)
    for quantizer in (Quantizer(**options) for options in OPTIONS):
        for again in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
            assert again == quantizer
            assert_same_bits(again(x), quantizer(x))


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8-e4m3"])
def test_a_sum_takes_the_largest_number_for_one_beyond_the_range(fmt) -> None:
    """Scales rounded up carry FLT_MAX to infinity, which a sum would not come back from."""
    quantizer = Quantizer(fmt, scale_rounding="up")
    x = torch.full((2, 32), FLT_MAX)
    assert quantizer(x).isinf().all()
    assert_same_bits(quantizer(x, plus=-x), torch.zeros_like(x))
