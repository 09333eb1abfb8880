"""Packed storage: what comes back, which bytes lie there, and how many of them.

Bytes are stated by hand and read with ml_dtypes, so that the layout does not rest on its own
inverse.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import reference as ref
import torch
from torch import Tensor

from metis_hf.numerics import (
    QuantizedTensor,
    dequantize,
    fake_quantize,
    get_format,
    quantize,
)
from metis_hf.numerics.storage import pack, unpack
from numerics.cases import (
    INPUTS,
    MX_FORMATS,
    OPTIONS,
    ROW_OPTIONS,
    assert_same_array,
    assert_same_bits,
    label,
    ways,
)
from numerics.helpers import normal, seeded, to_numpy

ROUNDINGS = ["nearest", "stochastic"]


def assert_round_trip(x: Tensor, **options) -> QuantizedTensor:
    """Storage gives back what fake quantization computes, from equal random numbers, twice."""
    before = x.clone()
    q = quantize(x, generator=seeded(7), **options)
    wanted = fake_quantize(x, generator=seeded(7), **options)
    assert_same_bits(dequantize(q), wanted)
    assert_same_bits(q.dequantize(), wanted)
    assert_same_bits(x, before)
    return q


# --- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INPUTS)
def test_dequantize_gives_the_fake_quantized_values(name) -> None:
    """Roundings by turns: each way in both, on half of the tensors."""
    x = INPUTS[name]
    for turn, options in enumerate(ways(x), list(INPUTS).index(name)):
        q = assert_round_trip(x, rounding=ROUNDINGS[turn % 2], **options)
        assert (q.shape, q.dtype) == (x.shape, x.dtype)
        assert q.codes.is_contiguous()
        assert q.scale.is_contiguous()  # as safetensors wants what it writes
        assert (q.codes.numel() == 0) == (x.numel() == 0)
        assert (q.codes.dtype, q.scale.dtype) == (torch.uint8, q.fmt.scale.dtype)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_any_dim_round_trips(rounding) -> None:
    """Stochastic noise belongs to elements, so it must not move with the dimension."""
    for x, options in itertools.product((normal(34, 3, 5), torch.empty(2, 0, 4)), ROW_OPTIONS):
        for dim in (0, 1, 2, -1, -3):
            q = assert_round_trip(x, dim=dim, rounding=rounding, **options)
            assert q.dim == dim
            others = torch.Size(n for i, n in enumerate(x.shape) if i != dim % 3)
            assert q.codes.shape[:-1] == q.scale.shape[:-1] == others
            assert q.codes.is_contiguous()
            assert q.scale.is_contiguous()


def test_stochastic_storage_without_a_generator_follows_the_default_one() -> None:
    x = normal(8, 64, seed=16)
    torch.manual_seed(3)
    wanted = fake_quantize(x, rounding="stochastic")
    torch.manual_seed(3)
    first = quantize(x, rounding="stochastic").dequantize()
    second = quantize(x, rounding="stochastic").dequantize()
    assert_same_bits(first, wanted)
    assert not torch.equal(first, second)


def test_storage_carries_no_graph() -> None:
    q = quantize(normal(2, 32).requires_grad_())
    assert not q.codes.requires_grad
    assert not q.dequantize().requires_grad


# --- bytes ---------------------------------------------------------------------------------------


def test_low_nibble_is_the_even_element() -> None:
    """One-level, block maximum 6: the scale is 1 and the codes are what is written.

    E2M1 codes: 0, .5, 1, 1.5, 2, 3, 4, 6 are 0 to 7; the sign is 8.
    """
    x = [6, 0.5, -6, 1, -0.0, 0, 1.5, -1.5, 2, 3, -4, -0.5, 4, -3, -2, -1]
    q = quantize(torch.tensor(x), "nvfp4", two_level=False)
    assert q.codes.tolist() == [0x17, 0x2F, 0x08, 0xB3, 0x54, 0x9E, 0xD6, 0xAC]
    assert q.scale.view(torch.uint8).tolist() == [0x38]  # E4M3: exponent 7, the bias, is 2^0
    assert q.global_scale is None
    assert_same_bits(q.dequantize(), torch.tensor(x))


def test_odd_row_ends_in_a_padded_byte() -> None:
    q = quantize(torch.tensor([[6.0, -6.0, 0.5], [3.0, 2.0, -1.0]]), "mxfp4")
    assert q.codes.shape == (2, 16)  # blocks are stored whole
    assert q.codes[0, :3].tolist() == [0xF7, 0x01, 0x00]
    # floor: 3 = 1.5 * 2^1, 4 = 2^2 is the top binade of the format, so the scale is 2^-1
    assert q.scale.view(torch.uint8).tolist() == [[127], [126]]
    assert q.codes[1, :3].tolist() == [0x67, 0x0C, 0x00]  # 6 4 | -2


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_is_one_little_endian_number(bits) -> None:
    """Code i sits at bit i * bits of the row read as one integer; every code in every place."""
    codes = torch.randint(0, 2**bits, (3, 64), generator=seeded(17), dtype=torch.uint8)
    codes[0] = torch.arange(64) % 2**bits
    packed = pack(codes, bits)
    assert packed.shape == (3, 64 * bits // 8)
    for row, line in zip(packed.tolist(), codes.tolist()):
        number = sum(code << bits * i for i, code in enumerate(line))
        assert int.from_bytes(bytes(row), "little") == number
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize(("bits", "length", "count"), [(4, 3, 2), (6, 5, 6), (6, 4, 3), (8, 3, 3)])
def test_packing_fills_up_with_zeros(bits, length, count) -> None:
    codes = torch.full((length,), 2**bits - 1, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.tolist() == list((2 ** (bits * length) - 1).to_bytes(count, "little"))


def test_codes_and_scales_are_those_of_the_reference() -> None:
    """Scales in their own dtype, laid out as documented; the tensor scale apart."""
    x = normal(33, 40, seed=18)
    for options in OPTIONS:
        q = quantize(x, **options)
        fmt = get_format(options["fmt"])
        wanted = ref.fake_quantize(to_numpy(x), **options)
        codes = fmt.element.decode(unpack(q.codes, fmt.element.bits))[..., :40]
        assert_same_array(codes.numpy(), wanted.codes)
        size = fmt.block_size
        places = {
            "tensor": (0, 0),
            "square": (slice(None, None, size), slice(None, None, size)),
            "row": (slice(None), slice(None, None, size or 40)),
        }
        scales = np.asarray(wanted.scales[places[options["tile"]]])
        assert_same_array(q.scale.float().numpy(), scales)
        two_level = bool(options.get("two_level"))
        assert (q.global_scale is not None) == two_level
        if two_level:
            assert (q.global_scale.shape, q.global_scale.dtype) == ((), torch.float32)
            assert q.global_scale.item() == wanted.inv_global


@pytest.mark.parametrize("fmt", ["nvfp4", *MX_FORMATS])
def test_other_readers_see_the_same_numbers(fmt) -> None:
    """Bytes read by ml_dtypes and multiplied in numpy: no code of this package."""
    names = {"mxfp6-e2m3": "float6_e2m3fn", "mxfp6-e3m2": "float6_e3m2fn"}
    names |= {"mxfp8-e4m3": "float8_e4m3fn", "mxfp8-e5m2": "float8_e5m2"}
    x = normal(6, 96, seed=19)
    q = quantize(x, fmt)
    codes = q.codes.numpy()
    if codes.shape[-1] == 48:
        codes = np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(6, 96)
    elif codes.shape[-1] == 72:
        low, mid, high = (codes[:, i::3].astype(np.uint32) for i in range(3))
        word = low | mid << 8 | high << 16
        codes = np.stack([word >> s & 0x3F for s in (0, 6, 12, 18)], -1).reshape(6, 96)
        codes = codes.astype(np.uint8)
    elements = codes.view(getattr(ml_dtypes, names.get(fmt, "float4_e2m1fn")))
    scale_dtype = ml_dtypes.float8_e4m3fn if fmt == "nvfp4" else ml_dtypes.float8_e8m0fnu
    scales = q.scale.view(torch.uint8).numpy().view(scale_dtype).astype(np.float32)
    values = elements.astype(np.float32) * np.repeat(scales, 96 // scales.shape[1], axis=1)
    if fmt == "nvfp4":
        assert scales.shape == (6, 6)
        values = values * q.global_scale.numpy()
    assert_same_array(values, to_numpy(q.dequantize()))


# --- size, device, metadata ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shape", "nbytes"),
    [
        ({"fmt": "nvfp4"}, (64, 128), 64 * 64 + 64 * 8 + 4),
        ({"fmt": "nvfp4", "two_level": False}, (64, 128), 64 * 64 + 64 * 8),
        ({"fmt": "nvfp4", "tile": "square"}, (64, 128), 64 * 64 + 4 * 8 + 4),
        ({"fmt": "nvint4"}, (64, 128), 64 * 64 + 64 * 8 + 4),
        ({"fmt": "mxfp4"}, (64, 128), 64 * 64 + 64 * 4),
        ({"fmt": "mxfp4", "tile": "square"}, (64, 128), 64 * 64 + 2 * 4),
        ({"fmt": "mxfp6-e2m3"}, (64, 128), 64 * 96 + 64 * 4),
        ({"fmt": "mxfp6-e3m2"}, (64, 128), 64 * 96 + 64 * 4),
        ({"fmt": "mxfp8-e4m3"}, (64, 128), 64 * 128 + 64 * 4),
        ({"fmt": "mxfp8-e5m2"}, (64, 128), 64 * 128 + 64 * 4),
        ({"fmt": "fp8-e4m3"}, (64, 128), 64 * 128 + 64 * 4),
        ({"fmt": "fp8-e5m2", "tile": "tensor"}, (64, 128), 64 * 128 + 4),
        ({"fmt": "int4"}, (64, 128), 64 * 64 + 64 * 4 * 4),
        ({"fmt": "int4", "tile": "tensor"}, (64, 128), 64 * 64 + 4),
        ({"fmt": "nvfp4"}, (3, 17), 3 * 16 + 3 * 2 + 4),  # padded to two blocks of 16
        ({"fmt": "mxfp6-e2m3"}, (5,), 24 + 1),
        ({"fmt": "nvfp4", "tile": "square"}, (3, 17), 3 * 16 + 2 + 4),  # rows are not padded
    ],
    ids=label,
)
def test_nbytes(options, shape, nbytes) -> None:
    q = quantize(normal(*shape, seed=20), **options)
    assert q.nbytes == nbytes
    fmt = get_format(options["fmt"])
    if shape == (64, 128) and options.get("tile", "row") == "row" and fmt.block_size:
        tensor_scale = 0 if q.global_scale is None else 4
        assert 8 * (q.nbytes - tensor_scale) / (64 * 128) == fmt.bits_per_element


@pytest.mark.parametrize("options", [{}, {"fmt": "mxfp4"}, {"fmt": "int4"}], ids=label)
def test_to_moves_every_tensor(options) -> None:
    """The meta device shows a move without a second device."""
    q = quantize(normal(4, 64, seed=21), **options)
    moved = q.to("meta")
    for name in ("codes", "scale", "global_scale"):
        before, after = getattr(q, name), getattr(moved, name)
        if before is None:
            assert after is None
        else:
            assert before.device.type == "cpu"
            assert after.device.type == "meta"
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
    assert (moved.fmt, moved.tile, moved.shape, moved.dim) == (q.fmt, q.tile, q.shape, q.dim)
    assert_same_bits(q.to("cpu").dequantize(), q.dequantize())
