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
import reference as ref
import reference_formats as formats
import torch
from design import cases
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
from metis_hf.numerics.formats import INT4_ELEMENT, ElementFormat, FloatFormat
from metis_hf.numerics.rounding import round_nearest
from numerics.cases import (
    BLOCK_SIZES,
    FORMAT_NAMES,
    INT_FORMATS,
    MIXED_FORMATS,
    OPTIONS,
    ROW_OPTIONS,
    assert_same_array,
    assert_same_bits,
    fp32,
    has_tensor_scale,
    label,
    probes,
)
from numerics.helpers import DTYPES, expected, normal, seeded, to_numpy

FLOATS: dict[str, tuple[FloatFormat, type]] = {
    "e2m1": (E2M1, ml_dtypes.float4_e2m1fn),
    "e2m3": (E2M3, ml_dtypes.float6_e2m3fn),
    "e3m2": (E3M2, ml_dtypes.float6_e3m2fn),
    "e4m3": (E4M3, ml_dtypes.float8_e4m3fn),
    "e5m2": (E5M2, ml_dtypes.float8_e5m2),
}
OF_TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ELEMENTS: dict[str, ElementFormat] = {name: pair[0] for name, pair in FLOATS.items()}
ELEMENTS["int4"] = INT4_ELEMENT
FLT_MAX = float(np.finfo(np.float32).max)


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
def test_nearest_agrees_with_ml_dtypes(name) -> None:
    fmt, dtype = FLOATS[name]
    x = probes(formats.ELEMENTS[name])
    wanted = x.astype(dtype).astype(np.float32)
    assert_same_array(round_nearest(fp32(x), fmt).numpy(), wanted)
    reference = np.array([formats.element_nearest(v, formats.ELEMENTS[name]) for v in x])
    assert_same_array(reference, wanted)


def test_int4_nearest_agrees_with_rint() -> None:
    """Integers have one zero: what rounds to -0 is +0."""
    x = probes(formats.ELEMENTS["int4"])
    wanted = np.rint(x) + np.float32(0)
    assert not np.signbit(wanted[wanted == 0]).any()
    assert_same_array(round_nearest(fp32(x), INT4_ELEMENT).numpy(), wanted)
    reference = np.array([formats.element_nearest(v, formats.ELEMENTS["int4"]) for v in x])
    assert_same_array(reference, wanted)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_nearest_agrees_with_torch(name) -> None:
    x = fp32(probes(formats.ELEMENTS[name]))
    assert_same_bits(round_nearest(x, FLOATS[name][0]), x.to(OF_TORCH[name]).float())


@pytest.mark.parametrize("name", ELEMENTS)
def test_nearest_keeps_nan(name) -> None:
    assert round_nearest(torch.tensor([math.nan, 1.0]), ELEMENTS[name]).isnan().tolist() == [
        True,
        False,
    ]


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


@pytest.mark.parametrize(
    ("name", "infinities", "nans"),
    [
        ("e2m1", [], []),
        ("e2m3", [], []),
        ("e3m2", [], []),
        ("e4m3", [], [0x7F, 0xFF]),
        ("e5m2", [0x7C, 0xFC], [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]),
    ],
)
def test_special_codes_of_ml_dtypes(name, infinities, nans) -> None:
    codes, values = every_code(name)
    assert codes[torch.from_numpy(np.isinf(values))].tolist() == infinities
    assert codes[torch.from_numpy(np.isnan(values))].tolist() == nans


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_codes_are_the_bytes_of_torch(name) -> None:
    fmt, _ = FLOATS[name]
    values = torch.tensor(fmt.grid)
    values = torch.cat([values, -values])
    assert torch.equal(fmt.encode(values), values.to(OF_TORCH[name]).view(torch.uint8))


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


def test_fp8_row_takes_the_whole_row() -> None:
    """One small and one large half in a row share a scale: the small half loses its bits."""
    x = torch.cat([torch.full((32,), 1e-6), torch.full((32,), 1.0)])
    y = fake_quantize(torch.stack([x, x * 1e-6]), "fp8-e4m3")
    assert (y[:, :32] == 0).all()
    assert torch.equal(y[0, 32:], x[32:])  # the other row has its own scale
    assert (y[1, 32:] != 0).all()
    assert (fake_quantize(torch.stack([x, x * 1e-6]), "fp8-e4m3", tile="tensor")[1] == 0).all()


# --- nearest: bit for bit ------------------------------------------------------------------------

SHAPES = [(), (1,), (5,), (33,), (3, 40), (2, 3, 35)]
MATRIX_SHAPES = [(1, 1), (5, 40), (33, 17), (2, 18, 34)]


def shapes_of(options) -> list[tuple[int, ...]]:
    return MATRIX_SHAPES if options["tile"] == "square" else SHAPES


def assert_equals_reference(x: Tensor, **options) -> Tensor:
    before = x.clone()
    actual = fake_quantize(x, **options)
    assert_same_bits(actual, expected(x, **options))
    assert_same_bits(x, before)  # the input is left alone
    return actual


# Arithmetic is fp32 whatever comes in, and is the same for all ways to lay blocks out: dtypes,
# dimensions, shapes and sizes take turns beside the ways to quantize.
@cases({"options": OPTIONS}, rotated={"first": range(len(DTYPES))}, ids=label)
def test_any_shape_and_dtype_equals_reference(options, first) -> None:
    for seed, shape in enumerate(shapes_of(options)):
        dtype = DTYPES[(first + seed) % len(DTYPES)]
        assert_equals_reference(normal(*shape, seed=seed, dtype=dtype), **options)


@cases({"options": ROW_OPTIONS}, rotated={"dim": [0, 1, -2]}, ids=label)
def test_any_dim_equals_reference(options, dim) -> None:
    assert_equals_reference(normal(34, 3, 5, seed=11), dim=dim, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_strides_do_not_matter(options) -> None:
    base = normal(36, 20, seed=12)
    for view in (base.t(), base[::3, 1::2], base[:1].expand(9, -1), base[:, :1].expand(-1, 9)):
        assert not view.is_contiguous()
        assert_equals_reference(view, **options)


@cases({"options": OPTIONS}, rotated={"shape": [(0,), (0, 32), (3, 0), (2, 0, 4)]}, ids=label)
def test_empty_in_empty_out(options, shape) -> None:
    actual = fake_quantize(torch.empty(shape, dtype=torch.bfloat16), **options)
    assert (actual.shape, actual.dtype) == (shape, torch.bfloat16)


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_zero_tensor_keeps_its_zeros(options) -> None:
    x = torch.zeros(3, 40)
    x[1] = -0.0
    wanted = x.abs() if options["fmt"] in INT_FORMATS else x
    assert_same_bits(assert_equals_reference(x, **options), wanted)


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_zero_blocks_beside_others_are_zero(options) -> None:
    x = normal(34, 96, seed=13)
    x[:, 32:64] = 0
    x[:32, :32] = 0
    actual = assert_equals_reference(x, **options)
    assert (actual[x == 0] == 0).all()
    assert (actual[x != 0] != 0).any()


# Smallest subnormal, subnormal, smallest normal, and the largest.
SIZES = [2.0**-149, 1e-40, 2.0**-127, 2.0**-126, 1e-36, 1e-20, 1e20, 1e36, 3e38, FLT_MAX]


# Of each format there are four ways to quantize and more: a tiny and a huge size for each.
@cases({"options": OPTIONS}, rotated={"sizes": list(zip(SIZES[:5], SIZES[5:]))}, ids=label)
def test_tiny_and_huge_tensors_equal_reference(options, sizes) -> None:
    """Both ends of fp32, where scales and their reciprocals are subnormal or saturate."""
    for size in sizes:
        x = torch.randn(2, 35, generator=seeded(14), dtype=torch.float64)
        x = (x / x.abs().max() * size).clamp(-FLT_MAX, FLT_MAX).float()
        assert not assert_equals_reference(x, **options).isnan().any(), size


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_rows_of_every_size_equal_reference(options) -> None:
    """2^-149 to 2^127 in one tensor: nothing finite gives a NaN."""
    exponents = torch.linspace(-149, 127, 70, dtype=torch.float64).round()
    x = torch.randn(70, 8, generator=seeded(15), dtype=torch.float64).clamp(-1.9, 1.9)
    x = (x * torch.exp2(exponents)[:, None]).clamp(-FLT_MAX, FLT_MAX).float()
    assert not assert_equals_reference(x, **options).isnan().any()


@cases({"options": OPTIONS}, rotated={"dtype": [torch.float16, torch.bfloat16]}, ids=label)
def test_largest_halves_equal_reference(options, dtype) -> None:
    """Rounding up may leave a 16-bit range: then the result is infinite, and never NaN."""
    x = torch.full((2, 20), torch.finfo(dtype).max, dtype=dtype)
    x[:, 1::2] = -torch.finfo(dtype).max
    x[:, ::5] = torch.finfo(dtype).smallest_normal
    assert not assert_equals_reference(x, **options).isnan().any()


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_zero_keeps_the_sign_of_what_rounded_to_it(options) -> None:
    """Integer codes have one zero; a code other than 0 under a scale of 0 keeps its sign."""
    x = normal(4, 64, seed=16)
    x[:, ::4] = 0.0
    x[:, 1::4] = -0.0
    x[:, 2::4] *= 1e-8
    actual = assert_equals_reference(x, **options)
    zero = actual == 0
    assert (zero & (x < 0)).any()
    if options["fmt"] in INT_FORMATS:
        code_is_zero = torch.from_numpy(ref.fake_quantize(to_numpy(x), **options).codes == 0)
        assert (code_is_zero & x.signbit()).any()
        assert not actual[code_is_zero].signbit().any()
    else:
        assert torch.equal(actual[zero].signbit(), x[zero].signbit())


@cases({"options": OPTIONS}, rotated={"bad": [math.nan, math.inf, -math.inf]}, ids=label)
def test_nan_and_inf_spoil_all_that_shares_their_scale(options, bad) -> None:
    """The whole tensor where it has a scale, else the block, and nothing beside it."""
    fmt, tile = options["fmt"], options["tile"]
    size = BLOCK_SIZES.get(fmt)
    x = normal(64, 80, seed=17)
    x[3, 33] = bad
    actual = fake_quantize(x, **options)
    wanted = torch.zeros(x.shape, dtype=torch.bool)
    if has_tensor_scale(options):
        wanted[:] = True
    elif size is None:
        wanted[3] = True
    else:
        rows = slice(0, size) if tile == "square" else slice(3, 4)
        wanted[rows, 33 // size * size : 33 // size * size + size] = True
    assert torch.equal(actual.isnan(), wanted)
    assert torch.equal(actual.isfinite(), ~wanted)
    clean = x.clone()
    clean[3, 33] = 0
    if not has_tensor_scale(options):
        assert_same_bits(actual[~wanted], fake_quantize(clean, **options)[~wanted])


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_fp64_beyond_fp32_is_not_hidden(options) -> None:
    x = torch.ones(4, 8, dtype=torch.float64)
    x[0, 3] = 1e300
    assert fake_quantize(x, **options)[0].isnan().all()


@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_a_copied_quantizer_is_the_same(options) -> None:
    """Layers are copied and pickled with their quantizers; formats are compared by value."""
    quantizer = Quantizer(**options)
    x = normal(20, 40, seed=19)
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
