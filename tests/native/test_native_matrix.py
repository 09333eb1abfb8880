"""Operands as FP4 units read them: the very codes and scales of emulation."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from design import cases
from layers.layer_tools import FP4_SCHEME_MODES, layer_of

from metis_hf import scheme_names
from metis_hf.layers.gemm import GemmPlan
from metis_hf.layers.native import NativePlan, obstacle
from metis_hf.noise import Key
from metis_hf.numerics import MXFP4, Quantizer, Tile
from metis_hf.numerics.kernels import pack, use_kernels
from metis_hf.numerics.native import NativeMatrix, native_matrix, swizzle, unswizzle
from metis_hf.operands import Requantized
from metis_hf.operands.conditioner import AroundQuantizer
from metis_hf.schemes import Role
from native.slow_gemm import block_values, place_of_scale

NATIVE = [
    scheme
    for scheme, mode in FP4_SCHEME_MODES
    if mode == "contraction" and obstacle(layer_of(scheme, mode)[1].scheme) is None
]
# Tokens, in_features, out_features: whole, in need of padding everywhere, and very small.
SHAPES = [(64, 64, 32), (37, 40, 24), (3, 17, 9), (150, 80, 144)]


def read(matrix: NativeMatrix) -> torch.Tensor:
    """fp32 [rows n]: code * block scale * tensor scale, element by element."""
    size = 32 if matrix.scale.dtype is torch.float8_e8m0fnu else 16
    values = block_values(matrix.codes, matrix.scale, size)
    assert not values[matrix.rows :].any()
    assert not values[:, matrix.length :].any()
    if matrix.global_scale is not None:
        values *= matrix.global_scale.numpy()
    return torch.from_numpy(values[: matrix.rows, : matrix.length])


def test_these_schemes_can_run_natively():
    claimed = {"nvfp4", "nvfp4-rne", "nvidia", "nvidia-paper", "four-over-six", "quartet2", "mxfp4"}
    claimed |= {"nvidia-unbiased", "four-over-six-unbiased", "mxfp4-hadamard"}
    assert claimed | {"metis", "tetrajet2", "quarot", "quip", "omniquant"} == set(NATIVE)


def test_the_page_says_which_schemes_can():
    page = (Path(__file__).parents[2] / "docs" / "native.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    said = {
        name: not answer.strip().startswith("no:")
        for names, answer in rows
        for name in re.findall(r"`([\w-]+)`", names)
    }
    schemes = set(scheme_names()) - {"bf16"}
    assert schemes <= said.keys()
    assert {name for name in schemes if said[name]} == set(NATIVE)


def operands(scheme: str, shape: tuple[int, int, int], **changes):
    """(role, emulated operand, native operand, plan, matrix) of each place in the three GEMMs."""
    t, i, o = shape
    _, layer = layer_of(scheme, "contraction", i=i, o=o, **changes)
    x, dy = torch.randn(t, i), torch.randn(t, o) * 1e-4
    x[:, 0] *= 30
    keys = layer.call_keys(x)
    state = layer.call_state(x, keys, update=True)
    emulated, native = (
        kind(layer.scheme, layer.weight_form, torch.float32, keys, state=state)
        for kind in (GemmPlan, NativePlan)
    )
    params = layer.weight_params()
    for role in Role:
        name = role.name.lower().split("_", 1)[1]
        matrix = {"input": x, "grad_output": dy, "weight": layer.weight.detach()}[name]
        args = (role, params) if name == "weight" else (role, matrix)
        method = "weight_operand" if name == "weight" else "matrix_operand"
        yield role, getattr(emulated, method)(*args), getattr(native, method)(*args), native, matrix


@cases({"scheme": NATIVE}, rotated={"shape": SHAPES})
def test_operands_are_those_of_emulation_to_the_bit(scheme, shape):
    changes = {"rank": 3} if scheme == "metis" else {}
    for role, emulated, native, plan, matrix in operands(scheme, shape, **changes):
        # [m n], of which the GEMM contracts n
        across = role in (Role.DGRAD_WEIGHT, Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT)
        values = read(native.main)
        values = values.T if across else values
        source, operand = plan.resolve(role)
        conditioner = operand.conditioner
        if isinstance(conditioner, Requantized):
            conditioner = conditioner.second
        if isinstance(conditioner, AroundQuantizer):  # its codes are in another basis
            own = conditioner.for_matrix(matrix, plan.keys[source])
            values = own.inverse(values.contiguous(), dim=0 if across else -1)
        if emulated.low is None:
            assert native.near is None
        else:
            left, lengths, right = emulated.low
            near = left.T if across else right
            far = (lengths[:, None] * right).T if across else left * lengths
            assert torch.equal(read(native.near), near)
            assert torch.equal(native.far, far)
            values = values + (left * lengths) @ right
        if isinstance(conditioner, AroundQuantizer):  # BLAS sums by where memory lies
            bound = 2**-20 * emulated.values.norm(dim=0 if across else -1, keepdim=True)
            assert ((values - emulated.values).abs() <= bound).all(), role
        else:
            assert torch.equal(values, emulated.values), role


def test_square_tiles_serve_both_dimensions():
    x = torch.randn(40, 50)
    for quantizer in (Quantizer(tile=Tile.SQUARE), Quantizer(MXFP4, tile=Tile.SQUARE)):
        packed, wanted = pack(x, quantizer), quantizer(x)
        for contracted, values in ((-1, wanted), (0, wanted.T)):
            matrix = native_matrix(packed, quantizer, dim=-1, shape=(40, 50), contracted=contracted)
            assert torch.equal(read(matrix), values)


@pytest.mark.parametrize(("dim", "two_level"), [(-1, True), (0, False)])
def test_blocks_along_each_dimension(dim, two_level):
    """In the layout of compiled kernels too, which the reference shares."""
    x, quantizer = torch.randn(48, 80), Quantizer(two_level=two_level, rounding="stochastic")
    with use_kernels("reference"):
        packed, wanted = pack(x, quantizer, dim=dim, key=Key(3)), quantizer(x, dim=dim, key=Key(3))
    matrix = native_matrix(packed, quantizer, dim=dim, shape=(48, 80), contracted=dim)
    assert torch.equal(read(matrix), wanted.T if dim == 0 else wanted)
    assert (matrix.global_scale == 1).item() is not two_level
    # `values` is the package's own way back.
    scaled = matrix.values() * matrix.global_scale
    assert torch.equal(scaled, wanted.T if dim == 0 else wanted)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_stays_visible():
    x = torch.randn(16, 64)
    x[3, 20] = torch.nan
    quantizer = Quantizer(MXFP4)
    matrix = native_matrix(pack(x, quantizer), quantizer, dim=-1, shape=(16, 64), contracted=-1)
    seen = read(matrix).isnan()
    assert seen[3, :32].all()
    assert seen.sum() == 32


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (130, 5), (300, 9)])
def test_swizzle(rows, blocks):
    scale = torch.randint(1, 256, (rows, blocks), dtype=torch.uint8)
    flat = swizzle(scale)
    assert flat.shape == (128 * -(-rows // 128) * 4 * -(-blocks // 4),)
    expected = np.zeros(len(flat), np.uint8)
    for row in range(rows):
        for block in range(blocks):
            expected[place_of_scale(row, block, blocks)] = scale[row, block]
    assert np.array_equal(flat.numpy(), expected)
    assert torch.equal(unswizzle(flat, rows, blocks), scale)


def test_an_element_and_its_scale():
    """By hand: row 37's second element, 1.5 of a block that has 6, and that block's scale."""
    x = torch.zeros(40, 64)
    x[37, :2] = torch.tensor([6.0, 1.5])
    x[37, 48] = -12.0
    quantizer = Quantizer(two_level=False)
    matrix = native_matrix(pack(x, quantizer), quantizer, dim=-1, shape=(40, 64), contracted=-1)
    assert matrix.codes.shape == (48, 32)
    assert matrix.codes[37, 0] == 0x37  # 6 is code 7, in the low nibble; 1.5 is code 3
    assert matrix.codes[37, 24] == 0x0F
    assert matrix.codes.count_nonzero() == 2
    scale = matrix.scale.float()
    assert scale.shape == (512,)
    assert (scale[16 * 5 + 4], scale[16 * 5 + 4 + 3]) == (1.0, 2.0)  # row 37 = 32 + 5
