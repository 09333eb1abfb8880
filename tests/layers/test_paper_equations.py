"""The forward pass and the five derivatives of arXiv 2509.00404, term by term.

Section "Spectral Decomposition", with the paper's letters:
    W = U S V' + WR,  X = A L B' + XR,  D = dL/dY = P T Q' + DR;  a bar is Q4 of the matrix,
    X_ = A_ L B_' + XR_
    Y  = X_ U_ S V_' + X_ WR_
    dX = P_ T Q_' V_ S U_' + P_ T Q_' WR_' + DR_ V_ S U_' + DR_ WR_'
    dU = X_' P_ T Q_' V_ S + X_' DR_ V_ S
    dS = U_' X_' P_ T Q_' V_ + U_' X_' DR_ V_      (its diagonal: S is diagonal)
    dV' = S U_' X_' P_ T Q_' + S U_' X_' DR_
    dWR = X_' P_ T Q_' + X_' DR_
"""

from __future__ import annotations

import itertools

import torch
from design import cases

from layers.layer_tools import layer_of
from metis_hf.config import DECOMPOSABLE
from metis_hf.layers.linear import MetisLinear
from metis_hf.operands.conditioners.spectral import Spectral
from metis_hf.schemes import Role

TOKENS, IN, OUT = 96, 64, 80
# Rounding errors of fp32 sums of n <= 96 terms add up like a random walk, to sqrt(96) 2^-24 = 6e-7
# of the norm; the longest product is a chain of three.
TOLERANCE = 3 * TOKENS**0.5 * 2.0**-24
# What is left out of an equation must show: the smallest term is far above the tolerance.
SMALLEST_TERM = 1e-4

SPLITS = [subset for n in range(4) for subset in itertools.combinations(DECOMPOSABLE, n)]  # all 8


def assert_close(found, *terms):
    """The sum of the terms, each of which matters (or belongs to a split that is off)."""
    expected = sum(terms)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE, error.item()
    for term in terms:
        assert not term.any() or term.norm() > SMALLEST_TERM * expected.norm()


@cases({"decompose": SPLITS, "mode": ["shared", "contraction"]}, rotated={"bias": [True, False]})
def test_paper_equations(decompose, mode, bias):
    """metis-paper agrees with the equations above, expanded into their branches, in float64.

    The quantized matrices come from the library's own quantizers and keys, everything else is
    written out here. A tensor that is not split is its residual, with no low-rank part.

    The paper has one copy X_ and one copy D_ in all equations, which is the mode "shared". In the
    mode "contraction" the equations keep their form, but X_ and D_ stand for two copies each: Y
    and dX contract features, dU, dS, dV and dWR contract tokens, and each takes the copies whose
    blocks run along what it contracts. U_, V_ and WR_ are the same in both, in 16x16 blocks.
    """
    _, layer = layer_of(
        "metis-paper", mode, i=IN, o=OUT, bias=bias, rank_frac=0.1, decompose=decompose
    )
    assert isinstance(layer, MetisLinear) == ("weight" in decompose)
    if bias:
        layer.bias.data.normal_()
    x = (torch.randn(TOKENS, IN) * torch.logspace(0, -2, IN)).requires_grad_()
    y = layer(x)
    d = torch.randn(TOKENS, OUT) * torch.logspace(-2, -5, OUT)
    y.backward(d)

    scheme = layer.scheme
    params = [p.detach() for p in layer.weight_params()]
    keys = layer.call_keys(x)

    def branches(role, tensor):
        """(left, diagonal, right', residual) as the GEMM of that role takes them."""
        dim = 0 if mode == "contraction" and role.name.startswith("WGRAD") else -1
        role, operand = scheme.resolve(role)
        quantizer, key = operand.quantizer, keys[role]
        if isinstance(operand.conditioner, Spectral):
            a, v, residual = operand.conditioner.parts(tensor, quantizer, dim=dim, key=key)
            diagonal = torch.linalg.vector_norm(tensor.double() @ v.before.double().T, dim=0)
            # The residual is that of the exact factors: A L B' + XR is X itself.
            low = (a.before.double() * diagonal) @ v.before.double()
            assert_close(tensor, low, residual.before.double())
            return a.after.double(), diagonal, v.after.double(), residual.after.double()
        direct = quantizer(tensor, dim=dim, key=key).double()
        t, c = tensor.shape
        return direct.new_zeros(t, 1), direct.new_zeros(1), direct.new_zeros(1, c), direct

    quantizer, key = scheme.fprop_weight.quantizer, keys[Role.FPROP_WEIGHT]
    assert quantizer.tile.value == {"shared": "row", "contraction": "square"}[mode]
    if "weight" in decompose:
        # The paper's W is [in, out]: its U_k is our vh^T, its V_k our u.
        u, s, vh, residual = params
        uq = quantizer(vh, dim=-1, key=key.fold(2)).double().T
        vq = quantizer(u, dim=-1, key=key.fold(1)).double()
        wr = quantizer(residual, dim=-1, key=key.fold(3)).double().T
        s = s.double()
    else:
        wr = quantizer(params[0], dim=-1, key=key).double().T
        uq, vq, s = wr.new_zeros(IN, 1), wr.new_zeros(OUT, 1), wr.new_zeros(1)

    # Contracting features: Y and dX.
    a, lam, bt, xr = branches(Role.FPROP_INPUT, x.detach())
    xq = (a * lam) @ bt + xr
    extra = [layer.bias.detach().double().expand(TOKENS, -1)] if bias else []
    assert_close(y, (xq @ uq * s) @ vq.T, xq @ wr, *extra)
    p, t, qt, dr = branches(Role.DGRAD_GRAD_OUTPUT, d)
    low = p * t
    assert_close(
        x.grad,
        (low @ (qt @ vq) * s) @ uq.T,
        low @ (qt @ wr.T),
        (dr @ vq * s) @ uq.T,
        dr @ wr.T,
    )

    # Contracting tokens: the parameters.
    a, lam, bt, xr = branches(Role.WGRAD_INPUT, x.detach())
    xq = (a * lam) @ bt + xr
    p, t, qt, dr = branches(Role.WGRAD_GRAD_OUTPUT, d)
    low = p * t
    assert_close(layer.weight_params()[-1].grad.T, (xq.T @ low) @ qt, xq.T @ dr)
    if "weight" in decompose:
        ux = uq.T @ xq.T  # [k t]
        assert_close(layer.vh.grad.T, ((xq.T @ low) @ (qt @ vq)) * s, (xq.T @ (dr @ vq)) * s)
        assert_close(
            layer.s.grad, torch.diagonal((ux @ low) @ (qt @ vq)), torch.diagonal(ux @ (dr @ vq))
        )
        assert_close(layer.u.grad.T, s[:, None] * ((ux @ low) @ qt), s[:, None] * (ux @ dr))
    if bias:  # not in the paper: the plain sum of the gradient itself
        assert_close(layer.bias.grad, d.double().sum(0))
