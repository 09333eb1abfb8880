"""The three GEMMs: exact without quantizers, and equal to the equations written out with them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from metis_hf import MetisConfig, scheme_names
from metis_hf.gemm import CallKeys
from metis_hf.linear import MetisLinear, QuantLinear, convert_linear
from metis_hf.numerics import fake_quantize
from metis_hf.operands import Hadamard, Operand, Spectral
from metis_hf.schemes import Role, Scheme

FP4_SCHEMES = [name for name in scheme_names() if not name.startswith("bf16")]


@dataclass(frozen=True)
class Exact:
    """A quantizer that changes nothing."""

    two_level: bool = False

    def __call__(self, x, *, dim=-1, key=None):
        return x

    def deterministic(self):
        return self


def layer_of(scheme: str, i=48, o=32, bias=True, dtype=torch.float32, **changes):
    linear = nn.Linear(i, o, bias=bias, dtype=dtype)
    config = MetisConfig(scheme=scheme, **changes)
    return linear, convert_linear(copy.deepcopy(linear), config, name="layer").train()


def with_exact_quantizers(scheme: Scheme) -> Scheme:
    changes = {}
    for role in Role:
        operand = scheme.operand(role)
        if operand is not None and operand.quantizer is not None:
            changes[role.name.lower()] = replace(operand, quantizer=Exact())
    return replace(scheme, **changes)


@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 7, 48), (2, 3, 2, 48), (0, 48), (1, 48)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_bf16_is_bitwise_linear(shape, dtype, bias):
    linear, layer = layer_of("bf16", bias=bias, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ya, yb = linear(a), layer(b)
    assert torch.equal(ya, yb)
    dy = torch.randn_like(ya)
    ya.backward(dy)
    yb.backward(dy)
    assert torch.equal(a.grad, b.grad)
    assert torch.equal(linear.weight.grad, layer.weight.grad)
    assert not bias or torch.equal(linear.bias.grad, layer.bias.grad)


def test_bf16_is_bitwise_linear_under_autocast():
    linear, layer = layer_of("bf16")
    x = torch.randn(5, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear(x), layer(x))


@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("shape", [(48,), (40, 48), (2, 20, 48), (0, 48), (1, 48)])
def test_exact_quantizers_give_linear(scheme, shape):
    """Without rounding every scheme computes nn.Linear, forward and backward, in float64."""
    linear, layer = layer_of(scheme, dtype=torch.float64)
    layer.scheme = with_exact_quantizers(layer.scheme)
    x = torch.randn(shape, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ya, yb = linear(a), layer(b)
    torch.testing.assert_close(ya, yb, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(ya)
    ya.backward(dy)
    yb.backward(dy)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
    dw = layer.weight_params()[-1].grad
    torch.testing.assert_close(linear.weight.grad, dw, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear.bias.grad, layer.bias.grad)


@pytest.mark.parametrize("scheme", ["metis", "metis-paper", "bf16-split"])
def test_gradcheck_of_split_weights(scheme):
    """u, s, vh, residual, bias and x by finite differences in float64.

    The compensated weight treats its correction as a constant; with exact quantizers the
    correction is zero, but not its derivative, so the finite difference is taken without it.
    """
    _, layer = layer_of(scheme, i=6, o=5, dtype=torch.float64, rank_frac=0.4, rank_multiple=1)
    layer.scheme = replace(with_exact_quantizers(layer.scheme), compensated=False)
    layer.weight_form = replace(layer.weight_form, compensated=False)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
    assert torch.autograd.gradcheck(call, (x, *values))


@pytest.mark.parametrize("decompose", [(), ("activation",), ("gradient",), ("weight",), None])
def test_paper_equations(decompose):
    """metis-paper agrees with the paper's forward and five derivatives, branches expanded.

    Y = Xq Uq S Vq' + Xq WRq with Xq = Aq L Bq' + XRq, and likewise for D = dL/dY; see
    section "Spectral Decomposition". The quantized factors come from the library's own
    quantizers and keys, everything else is written out here in float64.
    """
    changes = {} if decompose is None else {"decompose": decompose}
    _, layer = layer_of("metis-paper", i=64, o=80, bias=False, rank_frac=0.1, **changes)
    x = (torch.randn(96, 64) * torch.logspace(0, -2, 64)).requires_grad_()
    y = layer(x)
    dy = torch.randn(96, 80) * torch.logspace(-2, -5, 80)
    y.backward(dy)

    scheme = layer.scheme
    params = [p.detach() for p in layer.weight_params()]
    keys = CallKeys(layer.noise_key(), x, params[-1])

    def branches(operand, tensor, role):
        """(Q(a), diag, Q(v^T), Q(residual)) in float64; one zero branch without a split."""
        key = keys[role]
        if isinstance(operand.conditioner, Spectral):
            quantizer = operand.quantizer
            parts = operand.conditioner.parts(tensor, quantizer, dim=-1, key=key)
            a, v, residual = parts
            lam = torch.linalg.vector_norm(tensor @ v.before.T, dim=0)
            return a.after.double(), lam.double(), v.after.double(), residual.after.double()
        direct = operand.quantizer(tensor, dim=-1, key=key).double()
        t, c = tensor.shape
        return direct.new_zeros(t, 1), direct.new_zeros(1), direct.new_zeros(1, c), direct

    a, lam, bt, xr = branches(scheme.fprop_input, x.detach(), Role.FPROP_INPUT)
    p, tt, qt, dr = branches(scheme.dgrad_grad_output, dy, Role.DGRAD_GRAD_OUTPUT)
    quantizer, key = scheme.fprop_weight.quantizer, keys[Role.FPROP_WEIGHT]
    if isinstance(layer, MetisLinear):
        # The paper's W is [in, out]: its U_k is our vh^T, its V_k our u.
        u, s, vh, residual = params
        uq = quantizer(vh, dim=-1, key=key.fold(2)).double().T
        vq = quantizer(u, dim=-1, key=key.fold(1)).double()
        wr = quantizer(residual, dim=-1, key=key.fold(3)).double().T
        s = s.double()
    else:
        wr = quantizer(params[0], dim=-1, key=key).double().T
        uq, vq, s = wr.new_zeros(64, 1), wr.new_zeros(80, 1), wr.new_zeros(1)

    xq = (a * lam) @ bt + xr
    expected_y = (xq @ uq * s) @ vq.T + xq @ wr
    low = p * tt
    dx = (low @ (qt @ vq) * s) @ uq.T + low @ (qt @ wr.T) + ((dr @ vq) * s) @ uq.T + dr @ wr.T
    dw = (xq.T @ low) @ qt + xq.T @ dr
    du = ((xq.T @ low) @ (qt @ vq)) * s + (xq.T @ (dr @ vq)) * s
    ds = torch.diagonal(((uq.T @ xq.T) @ low) @ (qt @ vq) + (uq.T @ xq.T) @ (dr @ vq))
    dv = (s[:, None] * ((uq.T @ xq.T) @ low) @ qt + s[:, None] * ((uq.T @ xq.T) @ dr)).T

    def close(found, expected):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 2e-6, error  # fp32 products of 64 to 96 terms

    close(y, expected_y)
    close(x.grad, dx)
    close(layer.weight_params()[-1].grad, dw.T)
    if isinstance(layer, MetisLinear):
        close(layer.vh.grad, du.T)
        close(layer.s.grad, ds)
        close(layer.u.grad, dv)


def test_nvidia_operands():
    """nvidia's six operands, each from the high-precision tensor, against fake_quantize."""
    linear, layer = layer_of("nvidia", i=64, o=48, bias=False, backward_rounding="nearest")
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 48)
    w = linear.weight.detach()
    y = layer(x)
    y.backward(dy)

    h = Hadamard(seed=layer.scheme.wgrad_input.conditioner.seed)
    pad = 48 - 40

    def rotated(t):  # rows padded to whole blocks of 16 tokens, rotated, quantized along tokens
        from metis_hf.transforms.hadamard import hadamard_matrix

        t = torch.cat([t, t.new_zeros(pad, t.shape[1])]).view(3, 16, -1)
        t = torch.einsum("hj,bjc->bhc", hadamard_matrix(h.seed), t).reshape(48, -1)
        return fake_quantize(t, dim=0).double()

    w_hat = fake_quantize(w, tile="square").double()
    xd = x.detach()
    torch.testing.assert_close(
        y.double(), fake_quantize(xd).double() @ w_hat.T, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        x.grad.double(), fake_quantize(dy).double() @ w_hat, rtol=1e-5, atol=1e-5
    )
    # The rotation cancels in the contraction over tokens, so it need not be undone.
    torch.testing.assert_close(
        layer.weight.grad.double(), rotated(dy).T @ rotated(xd), rtol=1e-5, atol=1e-4
    )


def test_contraction_mode_quantizes_along_each_contraction():
    """Every operand of nvfp4 in contraction mode against fake_quantize, nearest rounding."""
    roundings = {"forward_rounding": "nearest", "backward_rounding": "nearest"}
    linear, layer = layer_of("nvfp4", i=64, o=48, operand_mode="contraction", **roundings)
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 48)
    y = layer(x)
    y.backward(dy)

    def q(t, **options):
        return fake_quantize(t.detach(), scale_rounding="up", **options).double()

    w_hat = q(linear.weight, tile="square")  # the same blocks for fprop and dgrad
    exact = q(x) @ w_hat.T + linear.bias.detach().double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), q(dy) @ w_hat, rtol=1e-5, atol=1e-5)
    dw = q(dy, dim=0).T @ q(x, dim=0)  # blocks along tokens
    torch.testing.assert_close(layer.weight.grad.double(), dw, rtol=1e-5, atol=1e-5)
    shared = q(dy).T @ q(x)
    assert (dw - shared).abs().max() > 0.1  # the modes differ by far more than the tolerance


@pytest.mark.parametrize("scheme", FP4_SCHEMES)
def test_operand_modes_of_each_scheme(scheme):
    if scheme == "nvidia":
        with pytest.raises(ValueError, match="operand_mode"):
            layer_of(scheme, operand_mode="shared")
    else:
        shared = layer_of(scheme)[1].scheme
        assert all(shared.reuses(role) for role in list(Role)[3:])
    contraction = layer_of(scheme, operand_mode="contraction")[1].scheme
    assert not contraction.reuses(Role.WGRAD_INPUT)
    assert not contraction.reuses(Role.WGRAD_GRAD_OUTPUT)
    assert contraction.reuses(Role.DGRAD_WEIGHT)
    assert contraction.fprop_weight.quantizer.tile.value == "square"


def test_bf16_gemm_applies_tensor_scales_to_the_product():
    """In bf16 the operand keeps code * block scale, exactly; the fp32 tensor scale comes after."""
    operand = Operand(layer_of("nvidia")[1].scheme.fprop_input.quantizer)
    x = torch.randn(32, 64) * 1e-3
    values, scale = operand(x, dim=-1, key=None, dtype=torch.bfloat16)
    assert values.dtype is torch.bfloat16
    assert torch.equal(values.float() * scale, fake_quantize(x))


@pytest.mark.parametrize("scheme", FP4_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_output_dtype_and_accuracy(scheme, dtype):
    _, layer = layer_of(scheme, forward_rounding="nearest", backward_rounding="nearest")
    x = torch.randn(64, 48)
    exact = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    y.float().square().mean().backward()
    assert y.dtype is dtype
    assert all(p.grad.dtype is torch.float32 for p in layer.parameters())
    assert (y - exact).norm() / exact.norm() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("scheme", FP4_SCHEMES)
def test_nan_shows(scheme):
    _, layer = layer_of(scheme)
    x = torch.randn(40, 48)
    x[3, 5] = float("nan")
    assert layer(x).isnan().any()
    x[3, 5] = float("inf")
    assert not layer(x).isfinite().all()


@pytest.mark.parametrize("scheme", FP4_SCHEMES)
def test_eval_is_deterministic_and_rounds_to_nearest(scheme):
    _, layer = layer_of(scheme, i=64, o=64)
    layer.eval()
    x = torch.randn(40, 64)
    assert torch.equal(layer(x), layer(x))
    for role in Role:
        operand = layer.eval_scheme.operand(role)
        assert operand is None or operand.quantizer.rounding.value == "nearest"


@pytest.mark.parametrize("scheme", FP4_SCHEMES)
def test_noise_is_the_layers_own(scheme):
    """Equal calls repeat exactly; another seed or name differs; torch's generator is untouched."""
    linear, layer = layer_of(scheme, i=64, o=64, forward_rounding="stochastic")
    x = torch.randn(40, 64)
    before = torch.get_rng_state()
    y = layer(x)
    assert torch.equal(y, layer(x))
    assert torch.equal(before, torch.get_rng_state())
    other = MetisConfig(scheme=scheme, forward_rounding="stochastic", seed=1)
    for config, name in ((other, "layer"), (layer.config, "another")):
        changed = convert_linear(copy.deepcopy(linear), config, name=name).train()
        assert not torch.equal(changed(x), y)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scheme", FP4_SCHEMES)
def test_checkpointing_recomputes_the_same_values(scheme, reentrant):
    from torch.utils.checkpoint import checkpoint

    grads = []
    for use in (False, True):
        torch.manual_seed(0)
        _, layer = layer_of(scheme, i=64, o=64)
        x = torch.randn(40, 64, requires_grad=True)
        if use:
            y = checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=False)
        else:
            y = layer(x)
        y.square().sum().backward()
        grads.append([x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*grads):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scheme", ["metis", "bf16-split"])
def test_factors_have_entries_of_unit_rms(scheme):
    """Adam moves every entry by the learning rate: in these units no factor turns faster."""
    _, layer = layer_of(scheme, i=64, o=96)
    for factor in (layer.u, layer.vh):
        torch.testing.assert_close(factor.square().mean(), torch.tensor(1.0))
    _, published = layer_of("metis-paper", i=64, o=96)
    torch.testing.assert_close(published.u.T @ published.u, torch.eye(1), rtol=0, atol=1e-5)


def test_frozen_weight_gives_no_gradient():
    _, layer = layer_of("metis")
    layer.u.requires_grad_(False)
    layer(torch.randn(40, 48)).sum().backward()
    assert layer.u.grad is None
    assert layer.vh.grad is not None


def test_compensation_reduces_the_error():
    """On an anisotropic weight the compensated residual beats the published one and direct FP4."""
    u, _ = torch.linalg.qr(torch.randn(256, 256))
    v, _ = torch.linalg.qr(torch.randn(256, 256))
    s = torch.ones(256)
    s[:8] = 60.0
    linear = nn.Linear(256, 256, bias=False)
    linear.weight.data = (u * s) @ v.T
    errors = {}
    for scheme, kind in (
        ("metis", MetisLinear),
        ("metis-paper", MetisLinear),
        ("nvfp4", QuantLinear),
    ):
        config = MetisConfig(scheme=scheme, rank_frac=0.04, forward_rounding="nearest")
        layer = convert_linear(copy.deepcopy(linear), config, name="layer")
        assert isinstance(layer, kind)
        w_hat, _ = layer.weight_form.quantize(
            layer.weight_params(),
            layer.scheme.fprop_weight,
            dim=-1,
            key=layer.key,
            dtype=torch.float32,
        )
        errors[scheme] = ((w_hat - linear.weight).norm() / linear.weight.norm()).item()
    assert errors["metis"] < 0.5 * errors["nvfp4"]
    assert errors["nvfp4"] < errors["metis-paper"]  # quantized factors cost more than they save
