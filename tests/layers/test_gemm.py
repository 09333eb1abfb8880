"""The three GEMMs of one layer: nn.Linear without quantizers, in every dtype, shape and mode."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from design import cases
from tensors import assert_same, same
from torch import nn
from transformers.pytorch_utils import Conv1D

from layers.layer_tools import (
    DEPLOYED,
    FP4_SCHEMES,
    FP4_STRUCTURES,
    NEAREST,
    STRUCTURES,
    autocast,
    layer_of,
    with_exact_quantizers,
)
from metis_hf import MetisConfig, QuantLinear
from metis_hf.layers.linear import MetisLinear
from metis_hf.layers.make import convert_linear
from metis_hf.operands import DifferentiableEstimator
from metis_hf.schemes import Role

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
AUTOCASTS = [None, torch.bfloat16, torch.float16]
SHAPES = [(48,), (5, 48), (2, 7, 48), (2, 3, 2, 48), (0, 48), (2, 0, 48), (1, 48)]
FLOAT64_TOLERANCE = 1e-12  # sums of at most 48 terms near 1, some of them split in three


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def forward_backward(layer, x, dtype=None):
    """y, dx and the gradients of the parameters by name."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(dtype):
        y = layer(x)
    y.backward(torch.ones_like(y).cumsum(-1))  # no two outputs get the same gradient
    return y, x.grad, {name: p.grad for name, p in layer.named_parameters()}


class TestBf16IsLinear:
    """The control computes what the replaced layer computes, bit for bit."""

    @staticmethod
    def assert_same(original, converted, x, dtype):
        results = [forward_backward(layer, x, dtype) for layer in (original, converted)]
        (ya, dxa, grads_a), (yb, dxb, grads_b) = results
        assert_same((yb, dxb), (ya, dxa))
        assert_same(grads_b, grads_a)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("kind", ["bias", "no bias", "conv1d"])
    def test_every_shape(self, kind, dtype):
        if kind == "conv1d":
            original = Conv1D(32, 48).to(dtype)
            config = MetisConfig(scheme="bf16")
            layer = convert_linear(copy.deepcopy(original), config, name="layer")
        else:
            original, layer = layer_of("bf16", bias=kind == "bias", dtype=dtype)
        for shape, autocast_dtype in itertools.product(SHAPES, AUTOCASTS):
            self.assert_same(original, layer, torch.randn(shape, dtype=dtype), autocast_dtype)

    def test_conv1d_of_a_transposed_input(self):
        conv = Conv1D(32, 48)
        layer = convert_linear(copy.deepcopy(conv), MetisConfig(scheme="bf16"), name="layer")
        x = torch.randn(5, 3, 48)
        assert torch.equal(layer(x.transpose(0, 1)), conv(x.transpose(0, 1).contiguous()))


class TestExactQuantizers:
    """Without rounding every scheme is nn.Linear: conditioners and splits cancel."""

    @pytest.mark.parametrize(("scheme", "mode"), STRUCTURES)
    def test_linear(self, scheme, mode):
        """Whatever the shape of the input, and with the weight stored split."""
        for split in (None, True)[: 1 if scheme in DEPLOYED else 2]:
            linear, layer = layer_of(scheme, mode, dtype=torch.float64, split_weight=split)
            layer.scheme = with_exact_quantizers(layer.scheme)
            if "weight_clip" in layer.weight_form.names:
                layer.weight_clip.data.fill_(40)  # a strength of 1
            for shape in ((40, 48), (48,), (2, 19, 48), (0, 48), (1, 48)):
                self.assert_linear(linear, layer, torch.randn(shape, dtype=torch.float64))

    @staticmethod
    def assert_linear(linear, layer, x):
        ya, dxa, grads_a = forward_backward(linear, x)
        yb, dxb, grads_b = forward_backward(layer, x)
        grads_b["weight"] = grads_b.get("weight", grads_b.get("weight_residual"))
        for found, expected in (
            (yb, ya),
            (dxb, dxa),
            (grads_b["weight"], grads_a["weight"]),
            (grads_b["bias"], grads_a["bias"]),
        ):
            limit = FLOAT64_TOLERANCE * max(
                expected.abs().max().item() if expected.numel() else 0, 1
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=limit)

    @pytest.mark.parametrize("scheme", ["nvfp4", "metis", "metis-paper", "svdquant", "omniquant"])
    def test_gradcheck(self, scheme):
        """x and every parameter (u, s, vh, residual of a split weight) by finite differences.

        With exact quantizers the compensation of a residual is zero everywhere, and so is its
        derivative, so that the compensated weight needs no exception.
        """
        sizes = {"i": 6, "o": 5, "rank_frac": 0.4, "rank_multiple": 1}
        _, layer = layer_of(scheme, dtype=torch.float64, **sizes)
        layer.scheme = with_exact_quantizers(layer.scheme)
        names = [name for name, _ in layer.named_parameters()]
        x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)

        def call(x, *values):
            return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

        values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
        assert len(values) == 1 + len(layer.weight_form.names)
        assert torch.autograd.gradcheck(call, (x, *values))


class TestFewTokens:
    """Zero tokens (an expert that is not chosen) and one (generation), training and evaluating."""

    # Training and dtype change how elements are rounded, not which of them there are.
    @cases(
        {"scheme, mode": FP4_STRUCTURES},
        rotated={"autocast_dtype": [None, torch.bfloat16], "train": [True, False]},
    )
    def test_zero_and_one(self, scheme, mode, autocast_dtype, train):
        """Close to nn.Linear: NVFP4 errors of the operands are near 10 %, stochastic ones 14 %."""
        linear, layer = layer_of(scheme, mode)
        layer.train(train)
        for shape in ((0, 48), (2, 0, 48)):
            y, dx, grads = forward_backward(layer, torch.randn(shape), autocast_dtype)
            assert y.shape == (*shape[:-1], 32)
            assert y.dtype is (autocast_dtype or torch.float32)
            assert dx.shape == shape
            assert all(grad is not None and not grad.any() for grad in grads.values())
        x = torch.randn(1, 48)
        ya, dxa, grads_a = forward_backward(linear, x)
        yb, dxb, grads_b = forward_backward(layer, x, autocast_dtype)
        dw = grads_b.get("weight", grads_b.get("weight_residual"))
        # The slope that a gradient estimator puts in the place of 1 is no error.
        conditioner = layer.scheme.fprop_weight.conditioner
        straight = not isinstance(conditioner, DifferentiableEstimator)
        pairs = [(yb, ya), (dxb, dxa), (dw, grads_a["weight"])][: 2 + straight]
        for found, expected in pairs:
            error = (found.float() - expected).norm() / expected.norm()
            assert error < 0.5, error.item()  # two operands of 14 % each; 1 if anything is lost
        torch.testing.assert_close(grads_b["bias"], grads_a["bias"])

    @pytest.mark.parametrize(("scheme", "mode"), FP4_STRUCTURES)
    def test_leading_dimensions_do_not_matter(self, scheme, mode):
        _, layer = layer_of(scheme, mode)
        x = torch.randn(40, 48)
        y, dx, grads = forward_backward(layer, x)
        for shape in ((40, 1, 48), (2, 20, 48), (2, 2, 10, 48)):
            y2, dx2, grads2 = forward_backward(layer, x.view(shape))
            assert torch.equal(y2.view_as(y), y)
            assert torch.equal(dx2.view_as(dx), dx)
            assert same(grads2, grads)


class TestNonFinite:
    """A NaN or inf shows in everything that nn.Linear would show it in; it is never clamped."""

    @staticmethod
    def poison(layer, x, dy, where, value):
        """(names of what must not be finite, with the index of the row or column)."""
        if where == "x":
            x[3, 5] = value
            return {"y": (3, slice(None)), "weight": (slice(None), 5)}
        if where == "dy":
            dy[3, 2] = value
            return {"x": (3, slice(None)), "weight": (2, slice(None))}
        layer.weight_params()[-1].data[2, 5] = value
        return {"y": (slice(None), 2), "x": (slice(None), 5)}

    # A scheme decides where a value goes; which value, dtype and scale it is, quantizers do, whose
    # tests have all of them.
    @pytest.mark.filterwarnings("ignore:two_level=False")
    @cases(
        {"scheme, mode": STRUCTURES},
        rotated={
            "value": [float("nan"), float("inf"), float("-inf")],
            "autocast_dtype": AUTOCASTS,
            "two_level": [True, False],
        },
    )
    def test_shows(self, scheme, mode, value, autocast_dtype, two_level):
        two_level = two_level or scheme in ("w4a4", "w4a16")  # which have no other form
        for where in ("x", "w", "dy"):
            _, layer = layer_of(scheme, mode, two_level=two_level)
            self.assert_shows(layer, where, value, autocast_dtype)

    def assert_shows(self, layer, where, value, autocast_dtype):
        x, dy = torch.randn(40, 48), torch.randn(40, 32)
        shown = self.poison(layer, x, dy, where, value)
        x.requires_grad_()
        for train in (True, False):
            layer.zero_grad()
            x.grad = None
            with autocast(autocast_dtype):
                y = layer.train(train)(x)
            y.backward(dy.to(y.dtype))
            results = {"y": y, "x": x.grad, "weight": layer.weight_params()[-1].grad}
            for name, index in shown.items():
                assert not results[name][index].isfinite().any(), (where, name)

    @pytest.mark.parametrize("scheme", ["bf16-split", "metis-paper", "metis"])
    def test_factors_of_a_weight(self, scheme):
        for factor in ("u", "s", "vh"):
            _, layer = layer_of(scheme, split_weight=True)
            getattr(layer, factor).data.view(-1)[0] = float("nan")
            y, dx, _ = forward_backward(layer, torch.randn(40, 48))
            assert y.isnan().any()
            assert dx.isnan().any()


@cases({"scheme, mode": FP4_STRUCTURES}, rotated={"dtype": [torch.bfloat16, torch.float16]})
def test_autocast_output_dtype_and_accuracy(scheme, mode, dtype):
    """Forward and backward agree with fp32 to a few roundings of the GEMM's dtype."""
    _, layer = layer_of(scheme, mode, **NEAREST)
    x = torch.randn(64, 48)
    y, dx, grads = forward_backward(layer, x)
    y2, dx2, grads2 = forward_backward(layer, x, dtype)
    assert y2.dtype is dtype
    assert all(grad.dtype is torch.float32 for grad in (dx2, *grads2.values()))
    pairs = {"y": (y2, y), "x": (dx2, dx)} | {name: (grads2[name], grads[name]) for name in grads}
    for name, (found, expected) in pairs.items():
        error = (found.float() - expected).norm() / expected.norm()
        # Operands, output and the upstream gradient are rounded once each: 4 halves of eps.
        assert error < 4 * torch.finfo(dtype).eps, (name, error.item())


@cases({"scheme, mode": FP4_STRUCTURES}, rotated={"dtype": [torch.bfloat16, torch.float16]})
def test_half_precision_parameters(scheme, mode, dtype):
    """A layer in 16 bits is as near to the exact product as the same layer in fp32.

    The results need not be equal: a compensated residual is computed in the parameters' dtype,
    and where that crosses a tie the codes differ.
    """
    _, layer = layer_of(scheme, mode, i=128, o=128, dtype=dtype, **NEAREST)
    same = copy.deepcopy(layer).float()
    x = torch.randn(64, 128, dtype=dtype)
    y, dx, grads = forward_backward(layer, x)
    y32, dx32, _ = forward_backward(same, x.float())
    assert {tensor.dtype for tensor in (y, dx, *grads.values())} == {dtype}
    weight = same.weight.detach()
    exact_y = x.float() @ weight.T + same.bias.detach()
    exact_dx = torch.ones(64, 128).cumsum(-1) @ weight
    for found, fp32, expected in ((y, y32, exact_y), (dx, dx32, exact_dx)):
        error, error32 = ((t.float() - expected).norm() / expected.norm() for t in (found, fp32))
        assert error32 > 0.01  # four bits are four bits
        assert error < 1.05 * error32 + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("scheme", "mode"), FP4_STRUCTURES)
def test_eval_is_deterministic_and_rounds_to_nearest(scheme, mode):
    _, layer = layer_of(scheme, mode, i=64, o=64)
    layer.eval()
    assert layer.active_scheme() is layer.eval_scheme
    for role in Role:
        operand = layer.active_scheme().operand(role)
        assert operand is None or not operand.quantizer.needs_noise
    # Noise repeats with the name and the input: that of another layer is another.
    other = copy.deepcopy(layer)
    other.key = layer.key.fold(1)
    x = torch.randn(40, 64)
    assert torch.equal(layer(x), other(x))


def test_frozen_parameters_get_no_gradient():
    """Any of them alone, and the others keep their exact gradients.

    But for a frozen residual: noise then follows a factor (test_split_weight.py).
    """
    for scheme in FP4_SCHEMES:
        _, layer = layer_of(scheme)
        x = torch.randn(40, 48)
        _, _, grads = forward_backward(layer, x)
        for frozen, parameter in layer.named_parameters():
            parameter.requires_grad_(False)
            _, _, others = forward_backward(layer, x)
            parameter.requires_grad_(True)
            assert others.pop(frozen) is None
            same = [torch.equal(grads[name], grad) for name, grad in others.items()]
            assert all(same) or frozen == "weight_residual"


def test_compensation_reduces_the_error():
    """On an anisotropic weight the compensated residual beats the published one and direct FP4."""
    u, _ = torch.linalg.qr(torch.randn(256, 256))
    v, _ = torch.linalg.qr(torch.randn(256, 256))
    s = torch.ones(256)
    s[:8] = 60.0
    linear = nn.Linear(256, 256, bias=False)
    linear.weight.data = (u * s) @ v.T
    errors = {}
    for name, scheme, kind in (
        ("metis", "metis", QuantLinear),
        ("metis stored split", "metis", MetisLinear),
        ("metis-paper", "metis-paper", MetisLinear),
        ("nvfp4", "nvfp4", QuantLinear),
    ):
        split = kind is MetisLinear
        config = MetisConfig(
            scheme=scheme,
            rank_frac=0.04,
            forward_rounding="nearest",
            split_weight=split,
            decompose=("weight", "activation", "gradient"),
        )
        layer = convert_linear(copy.deepcopy(linear), config, name="layer")
        assert isinstance(layer, kind)
        w_hat, *_ = layer.weight_form.quantize(
            layer.weight_params(),
            layer.scheme.fprop_weight,
            dim=-1,
            key=layer.key,
            dtype=torch.float32,
        )
        errors[name] = ((w_hat - linear.weight).norm() / linear.weight.norm()).item()
    assert errors["metis"] < 0.5 * errors["nvfp4"]
    assert errors["metis stored split"] < 0.5 * errors["nvfp4"]
    assert errors["nvfp4"] < errors["metis-paper"]  # quantized factors cost more than they save


@pytest.mark.parametrize("again", [copy.deepcopy, pickled])
def test_a_copied_layer_computes_the_same_in_bf16(again):
    """Nothing may depend on which object a scheme's part is: a BF16 GEMM chooses by its kind."""
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    for scheme, mode in FP4_STRUCTURES:
        _, layer = layer_of(scheme, mode, i=64, o=48, dtype=torch.bfloat16)
        assert torch.equal(again(layer)(x), layer(x)), scheme
