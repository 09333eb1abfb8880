"""Multiply-adds of schemes, against counts by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conftest import llama, mixtral
from operands.test_conditioner_base import Halved

from metis_hf import MetisConfig, get_metis_model, metis_layers, scheme_names
from metis_hf.lab.conditioner_cost import ConditionerCost, conditioner_cost
from metis_hf.lab.cost import inputs_of, model_overhead, overhead, tokens_of_layers
from metis_hf.operands import MeanRemoved, Requantized
from metis_hf.transforms.rotation import rotation_of

IN, OUT, T = 512, 384, 8192
GEMM = 3 * T * IN * OUT
ALL = ("weight", "activation", "gradient")


def of(scheme, tokens=T, **changes):
    return overhead([((IN, OUT), MetisConfig(scheme=scheme, **changes))], tokens)


def test_every_scheme_has_a_cost():
    for scheme in scheme_names():
        found = of(scheme)
        assert all(share > 0 for share in found.parts.values()), scheme
        assert (found.weight_bits >= 16) == (scheme in ("bf16", "bf16-split")), scheme


def test_what_direct_schemes_and_rotations_add():
    for scheme in ("bf16", "nvfp4", "nvfp4-rne", "mxfp4"):
        assert of(scheme).share == 0, scheme
    assert of("nvfp4-rne").weight_bits == 4.5
    # nvidia rotates both operands of wgrad, t i and t o, with 16 x 16 matrices.
    assert of("nvidia").parts == {"rotation": pytest.approx(16 * T * (IN + OUT) / GEMM)}


def test_metis_by_hand():
    """Projections and low-rank parts of x, dy and w; coordinates of each correction."""
    k, g = 16, 4  # directions of x and w, and of dy: a quarter
    found = of("metis", rank=k, decompose=ALL)
    # t i k of x, t o g of dy, o i k of w: once for the projection, once for the residual.
    thin = T * IN * k + T * OUT * g + OUT * IN * k
    assert found.parts["projection"] == pytest.approx(thin / GEMM)
    # And the subtraction of every element, which is no product but runs beside them.
    elements = T * IN + T * OUT + OUT * IN
    assert found.parts["low_rank"] == pytest.approx((thin + elements) / GEMM)
    # Coordinates of errors: x along w, w along x (fprop), w along dy (dgrad); what they are
    # multiplied by then, the low-rank parts beside them are multiplied by anyway.
    corrections = T * IN * k + OUT * IN * k + IN * OUT * g
    assert found.parts["corrections"] == pytest.approx(corrections / GEMM)
    # y = a_x (v_x w) + (x v_w) a_w, and so on: inner products first, then the output.
    fprop = (k * IN * OUT + T * k * OUT) + (T * IN * k + T * k * OUT)
    dgrad = (g * OUT * IN + T * g * IN) + (T * OUT * k + T * k * IN)
    wgrad = (g * T * IN + OUT * g * IN) + (OUT * T * k + OUT * k * IN)
    assert found.parts["thin_products"] == pytest.approx((fprop + dgrad + wgrad) / GEMM)
    # By default the weight is quantized directly, and no rounding of x is added along it.
    found = of("metis", rank=k)
    assert found.parts["projection"] == pytest.approx((T * IN * k + T * OUT * g) / GEMM)
    assert found.parts["corrections"] == pytest.approx(OUT * IN * (k + g) / GEMM)
    fprop, dgrad = k * IN * OUT + T * k * OUT, g * OUT * IN + T * g * IN
    assert found.parts["thin_products"] == pytest.approx((fprop + dgrad + wgrad) / GEMM)
    assert found.weight_bits == 4.5


def test_kept_subspaces_are_found_in_one_step_of_their_interval():
    """And refined in the others: a product with the Gram matrix of the sums that a search takes."""
    k, g = 16, 4
    fresh, kept = of("metis", rank=k), of("metis", rank=k, subspace_interval=8)
    refined = of("metis", rank=k, subspace_interval=8, subspace_refinements=1)
    for part in ("subspace", "factorization"):
        assert kept.parts[part] == pytest.approx(fresh.parts[part] / 8)
    fewest = [max(16 * (rank + 8), -(-T // 100)) for rank in (k, g)]
    sums = [-(-T // (T // least)) for least in fewest]
    products = 2 * sums[0] * IN * k + 2 * sums[1] * OUT * g
    assert refined.parts["subspace"] - kept.parts["subspace"] == pytest.approx(
        7 / 8 * products / GEMM
    )
    bases = 2 * (3 * IN * k**2 + k**3 / 3 + 3 * OUT * g**2 + g**3 / 3) / 2
    assert refined.parts["factorization"] - kept.parts["factorization"] == pytest.approx(
        7 / 8 * bases / GEMM
    )
    assert kept.parts["projection"] == fresh.parts["projection"]


def test_the_quantized_low_rank_part_is_put_together_by_nobody():
    """The published residual is taken against the exact part; emulation makes the other beside."""
    k = 16
    found = of("metis-paper", rank=k)
    thin, elements = T * IN * k + T * OUT * k, T * IN + T * OUT
    assert found.parts["projection"] == pytest.approx(thin / GEMM)
    assert found.parts["low_rank"] == pytest.approx((thin + elements) / GEMM)
    # Of the default width: 62 of 4096 directions of x and dy, and an element's sum and difference.
    wide = overhead([((4096, 4096), MetisConfig(scheme="metis-paper"))], T)
    assert wide.parts["low_rank"] == pytest.approx(2 * (62 + 1) / (3 * 4096))
    assert wide.share == pytest.approx(0.0780, abs=1e-4)


def test_thin_products_of_other_schemes():
    # svdquant: a split weight and nothing else, in fprop and in dgrad.
    k, t = 32, T
    found = of("svdquant", rank=k)
    wanted = (t * IN * k + t * k * OUT) + (t * OUT * k + t * k * IN)
    assert found.parts["thin_products"] == pytest.approx(wanted / GEMM)
    # mean: the mean row of x is one direction, of fprop and of wgrad; of dy the same.
    found = of("mean")
    fprop, wgrad = IN * OUT + t * OUT, (OUT * t + OUT * IN)
    assert found.parts["thin_products"] >= (fprop + wgrad) / GEMM
    assert "thin_products" not in of("nvidia").parts


def test_channels_that_are_there_twice():
    """Patches of x and w lie along in_features, which fprop contracts, and dgrad does not."""
    for i, o in ((1024, 4096), (4096, 1024)):
        found = overhead([((i, o), MetisConfig(scheme="hot-channel"))], T)
        hot = i // 16
        fprop, dgrad = 2 * T * hot * o, T * o * hot
        assert found.parts["thin_products"] == pytest.approx((fprop + dgrad) / (3 * T * i * o))
        assert found.weight_bits == 4.5 * 17 / 16


def test_outputs_of_rotated_operands_are_rotated_back():
    """HALO: x H and w H cancel in fprop; dx is rotated along both dimensions, dw along one."""

    def once(n, columns):
        return rotation_of("hadamard", n, 0, torch.empty(0)).flops(columns) / 2

    operands = once(IN, T) + once(IN, OUT) + once(T, OUT)
    outputs = once(T, IN) + once(IN, T) + once(IN, OUT)
    found = of("halo", operand_mode="contraction")
    # wgrad takes the same x H as fprop.
    assert found.parts["rotation"] == pytest.approx((operands + outputs) / GEMM)
    assert "rotation" not in of("nvfp4").parts
    # Rotated along what a GEMM contracts, its operands' rotations cancel: three GEMMs of two each.
    own = of("quarot", operand_mode="contraction").parts["rotation"]
    along = (once(IN, T), once(IN, OUT), once(OUT, T), once(OUT, IN), once(T, OUT), once(T, IN))
    assert own == pytest.approx(sum(along) / GEMM)


def test_a_sparse_part_is_multiplied_element_by_element():
    found, kept = of("occ"), 2 * int(0.01 * T * IN)
    assert found.parts == {"sparse_products": pytest.approx(2 * kept * OUT / GEMM)}


def test_factors_of_a_stored_split():
    """Their gradients; in compensated splits what they leave, for each copy of the weight."""
    once = OUT * IN * 16 / GEMM
    assert of("metis-paper", rank=16).parts["weight_factors"] == pytest.approx(2 * once)
    compensated = of("metis", rank=16, split_weight=True)
    assert compensated.parts["weight_factors"] == pytest.approx(4 * once)
    own = of("metis", rank=16, split_weight=True, operand_mode="contraction")
    assert own.parts["weight_factors"] == pytest.approx(6 * once)
    assert of("bf16-split", rank=16).parts["weight_factors"] == pytest.approx(3 * once)


def test_layers_that_read_one_tensor_split_it_once():
    k, g, layers = 16, 4, [((IN, OUT), MetisConfig(scheme="metis", rank=16))] * 3
    apart, together = overhead(layers, T), overhead(layers, T, ["x", "x", "y"])
    assert apart.share == pytest.approx(of("metis", rank=k).share)
    thin = 2 * T * IN * k + 3 * T * OUT * g
    assert together.parts["projection"] == pytest.approx(thin / (3 * GEMM))
    assert together.parts["corrections"] == pytest.approx(apart.parts["corrections"])
    # Of another rank it is another operand.
    layers[1] = ((IN, OUT), MetisConfig(scheme="metis", rank=32))
    assert overhead(layers, T, ["x", "x", "y"]) == overhead(layers, T)
    # In contraction mode wgrad's copy is split apart, and both are shared.
    own = [((IN, OUT), MetisConfig(scheme="metis", rank=16, operand_mode="contraction"))] * 2
    thin = 2 * T * IN * k + 4 * T * OUT * g
    found = overhead(own, T, ["x", "x"])
    assert found.parts["projection"] == pytest.approx(thin / (2 * GEMM))


def test_inputs_of_a_llama():
    model = get_metis_model(llama().eval())
    layers = {name.split("layers.")[1]: layer for name, layer in metis_layers(model)}
    found = inputs_of(model, layers | {"unused": torch.nn.Linear(2, 2)}, torch.arange(8)[None])
    groups = {}
    for name, key in found.items():
        groups.setdefault(key, []).append(name)
    attention = [[f"{n}.self_attn.{kind}_proj" for kind in "qkv"] for n in range(2)]
    mlp = [[f"{n}.mlp.{kind}_proj" for kind in ("gate", "up")] for n in range(2)]
    single = [[f"{n}.{kind}_proj"] for n in range(2) for kind in ("self_attn.o", "mlp.down")]
    assert sorted(groups.values()) == sorted([*attention, *mlp, *single, ["unused"]])


def test_a_model_is_counted_from_its_config():
    d, h, kv, count = 64, 96, 32, 2
    metis = MetisConfig(rank=16)
    shapes = [(d, d), (d, kv), (d, kv), (d, d), (d, h), (d, h), (h, d)]
    reads = ["x", "x", "x", "a", "y", "y", "b"]
    wanted = overhead(
        [(shape, metis) for shape in shapes * count],
        T,
        [(block, name) for block in range(count) for name in reads],
    )
    found = model_overhead(llama().config, metis, T)
    assert dict(found.parts) == pytest.approx(dict(wanted.parts))
    assert found.weight_bits == pytest.approx(wanted.weight_bits)


def test_a_conditioner_of_your_own_costs_what_you_register():
    """It multiplies nothing that is counted, until somebody says what."""

    @dataclass(frozen=True)
    class Projected(Halved):
        pass

    @conditioner_cost.register(Projected)
    def _(conditioner, shape, dim):
        return ConditionerCost({"projection": 2.0 * shape[0] * shape[1]}, low_rank=1)

    assert conditioner_cost(Halved(), (37, 70), -1) == ConditionerCost()
    assert conditioner_cost(Projected(), (37, 70), -1).encode == {"projection": 2 * 37 * 70}
    for around in (MeanRemoved, Requantized):
        assert conditioner_cost(around(Projected()), (37, 70), -1).encode["projection"] > 0


def test_an_expert_sees_its_share_of_the_tokens():
    """Two of eight experts a token: a quarter for each, and so work of the weight counts more."""
    metis = MetisConfig(scheme="metis", rank=4)
    model = get_metis_model(mixtral(8, num_experts_per_tok=2), metis)
    seen = tokens_of_layers(model, 512)
    assert {seen[name] for name in seen if "experts" in name} == {128}
    assert {seen[name] for name in seen if "self_attn" in name} == {512}
    # By hand: attention and every expert as layers of their own, with their own tokens.
    layers = dict(metis_layers(model))
    shapes = [((x.in_features, x.out_features), x.config) for x in layers.values()]
    found = overhead(shapes, list(seen.values()))
    gemms = [6 * seen[name] * i * o for name, ((i, o), _) in zip(layers, shapes)]
    shares = [overhead([shape], seen[name]).share for name, shape in zip(layers, shapes)]
    expected = sum(g * s for g, s in zip(gemms, shares)) / sum(gemms)
    assert found.share == pytest.approx(expected, rel=1e-12)
    assert found.share > overhead(shapes, 512).share
