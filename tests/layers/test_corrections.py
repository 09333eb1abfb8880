"""What rounding took off one operand, added where the other operand of the GEMM is large."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from design import cases
from torch import nn

from layers.layer_tools import NEAREST, STOCHASTIC, key_values, layer_of, record
from metis_hf import MetisConfig
from metis_hf.config import DECOMPOSABLE
from metis_hf.layers.gemm import GemmPlan
from metis_hf.layers.make import convert_linear
from metis_hf.schemes import Role, Scheme, build_scheme

TOKENS, IN, OUT, RANK = 96, 128, 80, 8
MODES = ["shared", "contraction"]
FORMS = pytest.mark.parametrize("split", [None, True], ids=["split at use", "stored split"])
CORRECTABLE = tuple(Role)[:-1]
CORRECTED_BY = {  # of metis: the tensor that is split, and what it corrects
    "weight": Role.FPROP_INPUT,
    "activation": Role.FPROP_WEIGHT,
    "gradient": Role.DGRAD_WEIGHT,
}
CORRECTED = set(CORRECTED_BY.values())
FORWARD = {Role.FPROP_INPUT, Role.FPROP_WEIGHT}
RESULTS = {  # the GEMM that a role's operand is in
    Role.FPROP_INPUT: "y",
    Role.FPROP_WEIGHT: "y",
    Role.DGRAD_GRAD_OUTPUT: "dx",
    Role.DGRAD_WEIGHT: "dx",
    Role.WGRAD_GRAD_OUTPUT: "dw",
}


def name_of(level):
    return getattr(level, "name", str(level))


def steep(rows, columns, seed=0):
    """(matrix, u, v): 8 directions that are 30 times as large as the others."""
    g = torch.Generator().manual_seed(seed)
    n = min(rows, columns)
    u, _ = torch.linalg.qr(torch.randn(rows, n, generator=g))
    v, _ = torch.linalg.qr(torch.randn(columns, n, generator=g))
    s = torch.ones(n)
    s[:8] = 30
    return (u * s) @ v.T, u, v


W, X, DY = steep(OUT, IN), steep(TOKENS, IN, 1), steep(TOKENS, OUT, 2)


def metis_layer(weight=W[0], **changes):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    own = {"rank": RANK, "gradient_rank_frac": 1, "decompose": DECOMPOSABLE}
    config = MetisConfig(**{**own, **changes})
    return convert_linear(linear, config, name="layer").train()


def correcting(layer, roles):
    """The layer, of whose scheme only these operands are corrected."""
    layer.scheme = replace(layer.scheme, corrected=frozenset(roles))
    layer.eval_scheme = replace(layer.eval_scheme, corrected=frozenset(roles))
    return layer


def one_pass(layer, x=X[0], dy=DY[0]):
    """{"y": .., "dx": .., "dw": ..}, of a stored split dL/dw_hat."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight_params()[-1].grad.clone()}


def exact(x=X[0], w=W[0], dy=DY[0]):
    return {"y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}


def operands(layer, x, dy):
    """role -> (exact matrix, operand, (a_hat, lam, v_hat)), made one by one."""
    params = [p.detach() for p in layer.weight_params()]
    w = layer.weight_form.dense(params)
    keys = layer.call_keys(x)
    plan = GemmPlan(layer.scheme, layer.weight_form, torch.float32, keys)
    tensors = dict(zip(Role, (x, w, dy, w, dy, x), strict=True))
    made = {}
    for role, tensor in tensors.items():
        weight = role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)
        hat = plan.weight_operand(role, params) if weight else plan.matrix_operand(role, tensor)
        if weight and layer.scheme.weight.is_split:
            factors = hat.low
        else:
            used, operand = layer.scheme.resolve(role)
            dim = 0 if used in (Role.DGRAD_WEIGHT, *tuple(Role)[4:]) else -1
            a, v, _ = operand.conditioner.parts(
                tensor, operand.quantizer, dim=dim, key=keys[used], row_mask=None
            )
            factors = a.after, (tensor @ v.before.T).norm(dim=0), v.after
        made[role] = tensor, hat.values, factors
    return keys, made


def added(layer, role, x=X[0], dy=DY[0]):
    """What a correction adds to its GEMM, by the formulas of `gemm`."""
    keys, made = operands(layer, x, dy)
    tensor, hat, _ = made[role]
    a, lam, v = made[Role(role ^ 1)][2]
    error = tensor - hat
    key = keys.call_key.fold(32 + role)
    quantizer = layer.scheme.resolve(role)[1].quantizer

    def q(coordinates):
        return quantizer(coordinates, dim=-1, key=key)

    return {
        Role.FPROP_INPUT: lambda: q(error @ v.T * lam) @ a.T,
        Role.FPROP_WEIGHT: lambda: a @ q(error @ v.T * lam).T,
        Role.DGRAD_GRAD_OUTPUT: lambda: q(error @ a * lam) @ v,
        Role.DGRAD_WEIGHT: lambda: a @ q(error.T @ v.T * lam).T,
        Role.WGRAD_GRAD_OUTPUT: lambda: q(error.T @ a * lam) @ v,
    }[role]()


class TestEachOperand:
    @cases({"role": CORRECTABLE, "split": [None, True]}, rotated={"mode": MODES}, ids=name_of)
    def test_is_the_formula(self, role, mode, split):
        """And the two other GEMMs are as they were."""
        layer = metis_layer(operand_mode=mode, split_weight=split)
        without = one_pass(correcting(layer, ()))
        found = one_pass(correcting(layer, {role}))
        for name, value in found.items():
            expected = without[name]
            if name == RESULTS[role]:
                expected = expected + added(layer, role)
                assert not torch.equal(value, without[name])
            size = exact()[name].abs().max().item()
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-5 * size)

    @cases({"role": CORRECTABLE}, rotated={"mode": MODES, "split": [None, True]}, ids=name_of)
    def test_reduces_the_error_where_the_other_operand_is_large(self, role, mode, split):
        """The error of a random operand; in the directions of the 8, and nothing lost elsewhere."""
        g = torch.Generator().manual_seed(5)
        tensors = {"x": X[0], "w": W[0], "dy": DY[0]}
        name = {"I": "x", "W": "w", "G": "dy"}[role.name.split("_")[1][0]]
        tensors[name] = torch.randn(tensors[name].shape, generator=g)
        layer = metis_layer(tensors["w"], operand_mode=mode, split_weight=split)
        result = RESULTS[role]
        target = exact(**tensors)[result]
        passes = {
            which: one_pass(correcting(layer, roles), tensors["x"], tensors["dy"])[result] - target
            for which, roles in (("with", {role}), ("without", ()))
        }
        # The side of the output on which the other operand's directions are.
        basis = {
            Role.FPROP_INPUT: W[1],
            Role.FPROP_WEIGHT: X[1].T,
            Role.DGRAD_GRAD_OUTPUT: W[2],
            Role.DGRAD_WEIGHT: DY[1].T,
            Role.WGRAD_GRAD_OUTPUT: X[2],
        }[role]
        left = role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)

        def norm(error, part):
            vectors = basis[part] if left else basis[:, part]
            return (vectors @ error if left else error @ vectors).norm().item()

        large, small = slice(None, 8), slice(8, None)
        # The rest of the large part is the other operand's own rounding, which stays.
        assert norm(passes["with"], large) < 0.6 * norm(passes["without"], large)
        # Rounded directions carry a little of what is added elsewhere.
        assert norm(passes["with"], small) < 1.2 * norm(passes["without"], small)


def test_gradients_stay_unbiased():
    """dy_hat w_hat + Q(..) has the mean dy w_hat: nothing clips in either quantizer."""
    layer = metis_layer(operand_mode="contraction")
    params = [p.detach() for p in layer.weight_params()]
    errors = []
    for seed in range(100):
        layer.key = layer.key.fold(seed)
        correcting(layer, {Role.DGRAD_GRAD_OUTPUT})
        dx = one_pass(layer)["dx"]
        plan = GemmPlan(layer.scheme, layer.weight_form, torch.float32, layer.call_keys(X[0]))
        errors.append(dx - DY[0] @ plan.weight_operand(Role.DGRAD_WEIGHT, params).values)
    draws = torch.stack(errors)
    z = draws.mean(0) / (draws.std(0) / len(draws) ** 0.5 + 1e-9)
    assert z.square().mean() < 1.15  # 1.25 and more where gradients are rounded to nearest


@FORMS
def test_few_tokens_and_rows_of_zeros(split):
    layer = metis_layer(split_weight=split)
    for tokens in (1, 5):  # fewer than there are directions
        results = one_pass(layer, X[0][:tokens], DY[0][:tokens])
        for name, target in exact(X[0][:tokens], W[0], DY[0][:tokens]).items():
            assert (results[name] - target).norm() < 0.1 * target.norm()
    x = X[0].clone()
    x[3] = 0
    assert not layer(x)[3].any()


def test_noise_is_of_this_layer():
    """Layers that read one input share its noise, but not that of their own coordinates."""
    keys = []
    for name in ("a", "b"):
        split = {"decompose": DECOMPOSABLE, **STOCHASTIC}
        _, layer = layer_of("metis", i=IN, o=OUT, name=name, **split)
        calls = record(layer)
        layer(X[0])
        keys.append([key_values(call.key) for call in calls])
    # Three parts of the input, three of the weight, the coordinates.
    forward = len(FORWARD)
    assert [a == b for a, b in zip(*keys, strict=True)] == [True] * 3 + [False] * (3 + forward)
    assert len(set(keys[0])) == 6 + forward


@pytest.mark.parametrize(
    ("options", "roles"),
    [
        ({"decompose": None}, FORWARD - {Role.FPROP_INPUT} | {Role.DGRAD_WEIGHT}),
        ({"decompose": None, "split_weight": True}, CORRECTED),
        ({"decompose": ("weight",)}, {Role.FPROP_INPUT}),
        ({"decompose": ()}, set()),
        ({"high_precision": ("forward",)}, CORRECTED - FORWARD),
        ({"high_precision": ("backward",)}, CORRECTED & FORWARD),
    ],
    ids=str,
)
def test_only_where_the_other_operand_is_split(options, roles):
    split = {"decompose": DECOMPOSABLE, **NEAREST, **options}
    _, layer = layer_of("metis", i=IN, o=OUT, **split)
    assert layer.scheme.corrected == layer.eval_scheme.corrected == roles
    results, without = one_pass(layer), one_pass(correcting(layer, ()))
    changed = {name for name in results if not torch.equal(results[name], without[name])}
    assert changed == {RESULTS[role] for role in roles}


def test_schemes_that_cannot():
    """An operand beside one that is not split, and inputs in wgrad."""
    scheme = build_scheme(MetisConfig(), IN, OUT)
    with pytest.raises(ValueError, match="WGRAD_INPUT cannot be corrected"):
        replace(scheme, corrected=frozenset({Role.WGRAD_INPUT}))
    with pytest.raises(ValueError, match=r"FPROP_INPUT cannot be corrected.*must be split"):
        Scheme(corrected=frozenset({Role.FPROP_INPUT}))
