"""What layers keep for their backward pass: that no bit is lost by it.

The reference is dense saving, written out in `DenseGemm`: the operand itself where forward and
wgrad share one, else x, quantized in backward.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from design import cases
from tensors import assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import metis_hf.layers.linear
from layers.layer_tools import (
    FP4_SCHEME_MODES,
    FP4_STRUCTURES,
    Halved,
    autocast,
    layer_of,
    matrix,
)
from metis_hf import MetisConfig
from metis_hf.layers.make import convert_linear
from metis_hf.noise import Key
from metis_hf.numerics import FORMATS, Quantizer, Tile
from metis_hf.numerics.kernels import pack, unpack
from metis_hf.operands import Operand
from metis_hf.schemes import Role, Scheme


class DenseGemm(torch.autograd.Function):
    """`QuantizedGemm` without codes."""

    @staticmethod
    def forward(ctx, x, bias, plan, *params):
        with torch.autocast("cpu", enabled=False):
            x_hat = plan.matrix_operand(Role.FPROP_INPUT, x)
            w_hat = plan.weight_operand(Role.FPROP_WEIGHT, params)
            y = plan.fprop(x, x_hat, params, w_hat)
            if bias is not None:
                y += bias.to(plan.dtype)
        ctx.save_for_backward(x, *params)
        ctx.plan, ctx.x_dtype, ctx.x_hat = plan, x.dtype, x_hat
        return y

    @staticmethod
    def backward(ctx, dy):
        plan = ctx.plan
        x, *params = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            d_hat = plan.matrix_operand(Role.DGRAD_GRAD_OUTPUT, dy)
            w_hat = plan.weight_operand(Role.DGRAD_WEIGHT, params)
            dx = plan.dgrad(dy, d_hat, params, w_hat).to(ctx.x_dtype)
            if not plan.scheme.reuses(Role.WGRAD_GRAD_OUTPUT):
                d_hat = plan.matrix_operand(Role.WGRAD_GRAD_OUTPUT, dy)
            x_hat = ctx.x_hat
            if not plan.scheme.reuses(Role.WGRAD_INPUT):
                x_hat = plan.matrix_operand(Role.WGRAD_INPUT, x)
            dw = plan.wgrad(dy, d_hat, x_hat)
            key = plan.keys[Role.FPROP_WEIGHT]
            grads = plan.weight.gradients(params, dw, plan.scheme.fprop_weight, key=key)
            dbias = dy.sum(0).to(params[-1].dtype)
        return dx, dbias if ctx.needs_input_grad[1] else None, None, *grads


def results(layer, x, autocast_dtype=None, call=None, **kwargs):
    """y, dx and the gradients of the parameters, all as bytes (NaN and the sign of 0 count)."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with autocast(autocast_dtype):
        y = (call or layer)(x, **kwargs)
    y.backward((y.detach().float().square() + 0.1).to(y.dtype))
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {
        name: t.detach().contiguous().view(torch.uint8)
        for name, t in {"y": y, "x": x.grad, **grads}.items()
    }


def assert_as_dense(monkeypatch, layer, x, *args, **kwargs):
    """Saving codes gives what dense saving gives, to the bit."""
    found = results(layer, x, *args, **kwargs)
    with monkeypatch.context() as patched:
        patched.setattr(metis_hf.layers.linear, "QuantizedGemm", DenseGemm)
        expected = results(layer, x, *args, **kwargs)
    assert_same(found, expected)


# (parameters and input, autocast)
DTYPES = [
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float64, None),
]
# Many rows, incomplete blocks, one token; no multiple of the block size; odd: half a byte is empty.
SHAPES = [(64, 64), (37, 64), (1, 64), (40, 50), (40, 17)]


# What a scheme saves depends on the shape. Dtypes are the quantizers' matter: each shape has
# another one, and the next scheme starts one further.
@cases({"scheme, mode": FP4_SCHEME_MODES}, rotated={"first": range(len(DTYPES))})
def test_same_bits(scheme, mode, first, monkeypatch):
    """Outputs and all gradients, for every scheme, mode and shape."""
    for place, (rows, columns) in enumerate(SHAPES):
        dtype, autocast_dtype = DTYPES[(first + place) % len(DTYPES)]
        _, layer = layer_of(scheme, mode, i=columns, o=48, dtype=dtype)
        assert_as_dense(monkeypatch, layer, matrix(rows, columns, dtype), autocast_dtype)


@pytest.mark.parametrize(("scheme", "mode"), FP4_STRUCTURES)
class TestInputs:
    def test_rows_that_are_masked_zero_or_missing(self, scheme, mode, monkeypatch):
        _, layer = layer_of(scheme, mode, i=64, o=48)
        x = matrix(256, 64)
        x[::3] *= 50
        mask = torch.arange(256) % 3 > 0
        assert_as_dense(monkeypatch, layer, x, row_mask=mask)
        assert_as_dense(monkeypatch, layer, x, row_mask=torch.zeros(256, dtype=torch.bool))
        x = matrix(64, 64)
        x[20:] = -0.0
        assert_as_dense(monkeypatch, layer, x)
        assert_as_dense(monkeypatch, layer, torch.zeros(64, 64), torch.bfloat16)
        assert_as_dense(monkeypatch, layer, torch.zeros(0, 64))

    def test_strides_and_leading_dimensions(self, scheme, mode, monkeypatch):
        config = MetisConfig(scheme=scheme, operand_mode=mode)
        base = matrix(128, 96)
        for module in (nn.Linear(64, 48), Conv1D(48, 64)):
            layer = convert_linear(module, config, name="layer").train()
            for x in (
                base[::2, 16:80],
                base[:64, :64].T.contiguous().T,
                base[:40, :64].view(2, 20, 64),
            ):
                assert_as_dense(monkeypatch, layer, x, torch.bfloat16)

    @pytest.mark.filterwarnings("ignore:two_level=False")
    def test_options(self, scheme, mode, monkeypatch):
        """One pass in high precision, or no scale above those of blocks."""
        for options in (
            {"high_precision": ("forward",)},
            {"high_precision": ("backward",)},
            {"two_level": False},
        ):
            _, layer = layer_of(scheme, mode, i=64, o=48, **options)
            for autocast_dtype in (None, torch.bfloat16):
                assert_as_dense(monkeypatch, layer, matrix(40, 64), autocast_dtype)

    def test_again(self, scheme, mode):
        """Recomputed activations and a copy of the layer."""
        _, layer = layer_of(scheme, mode, i=64, o=48)
        twin, x = copy.deepcopy(layer), matrix(40, 64)
        plain = results(layer, x)
        for again in (
            results(layer, x, call=lambda x: checkpoint(layer, x, use_reentrant=False)),
            results(layer, x, call=lambda x: checkpoint(layer, x, use_reentrant=True)),
            results(twin, x),
        ):
            assert_same(again, plain)


@pytest.mark.parametrize("shared", [True, False])
def test_a_conditioner_without_codes_is_saved_densely(shared, monkeypatch):
    _, layer = layer_of("nvfp4", i=64, o=48)
    own = Operand(layer.scheme.fprop_input.quantizer, Halved())
    layer.scheme = Scheme(
        fprop_input=own,
        fprop_weight=layer.scheme.fprop_weight,
        wgrad_input=None if shared else own,
    )
    assert_as_dense(monkeypatch, layer, matrix(40, 64), torch.bfloat16)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_packed_matrices_come_back_to_the_bit(fmt):
    """Every block shape and rounding; zeros, huge and tiny values among the rest."""
    for tile, rounding, two_level, dim in itertools.product(
        Tile, ("nearest", "stochastic"), {False, fmt.scale.tensor_scale}, (-1, 0)
    ):
        no_squares = tile is Tile.SQUARE and fmt.block_size is None
        if no_squares or (tile is Tile.TENSOR and fmt.scale.name != "fp32"):
            continue
        quantizer = Quantizer(fmt, tile=tile, rounding=rounding, two_level=two_level)
        for shape in ((32, 64), (37, 33), (5, 1), (1, 16)):
            assert_comes_back(quantizer, shape, dim)


def assert_comes_back(quantizer, shape, dim):
    x = torch.randn(shape) * torch.logspace(-12, 12, shape[0])[:, None]
    x[0] = -0.0
    key = Key(3)
    packed = pack(x, quantizer, dim=dim, key=key)
    found = unpack(packed, quantizer, dim=dim, shape=shape)
    expected = quantizer(x, dim=dim, key=key)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())
    found = unpack(packed, quantizer, dim=dim, shape=shape, scaled=False)
    expected, expected_scale = quantizer.unscaled(x, dim=dim, key=key)
    assert torch.equal(found, expected)
    scale = packed.global_scale
    assert (scale is None) == (expected_scale is None)
    assert scale is None or torch.equal(scale, expected_scale)


def test_codes_survive_a_flushing_processor():
    """Subnormal fp16 numbers carry the code of 0.5, also where fp32 ones are taken for zero."""
    x = torch.linspace(-6, 6, 64).view(2, 32)
    quantizer = Quantizer(two_level=False)
    expected = quantizer(x)
    assert (expected.abs() == 0.5).any()
    torch.set_flush_denormal(True)  # where the processor can
    try:
        packed = pack(x, quantizer, dim=-1, key=Key(0))
        found = unpack(packed, quantizer, dim=-1, shape=(2, 32))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)
