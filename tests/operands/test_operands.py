"""The schemes against the table of operands, and layers against it."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from layers.layer_reference import (
    UNIT,
    Recording,
    Slot,
    Terms,
    array,
    assert_quantized_as,
    exact,
    rotation,
)
from layers.layer_tools import (
    CONTRACTION_ONLY,
    FP4_SCHEMES,
    NEAREST,
    in_one_mode,
    layer_of,
    record,
)

from metis_hf import MetisConfig
from metis_hf.layers.gemm import GemmPlan
from metis_hf.operands import (
    Clamped,
    ClippedWeight,
    DifferentiableEstimator,
    FullHadamard,
    Hadamard,
    HotChannels,
    Identity,
    MeanRemoved,
    PerChannel,
    Quantized,
    RandomHadamard,
    RandomKronecker,
    Requantized,
    Spectral,
    StaticScale,
)
from metis_hf.schemes import Role, build_scheme
from metis_hf.schemes.channel_ranges import Shifting, Smoothing
from metis_hf.transforms.hadamard import hadamard_matrix
from operands.operand_reference import expected_results, has_rank, rank_of, run
from operands.operand_table import (
    ALL_FP4_MODES,
    ALL_MODES,
    FAR,
    IN,
    OPERANDS,
    OUT,
    RANKS,
    ROUNDINGS,
    SLOTS,
    options,
    slot_of,
)


def test_the_table_is_complete():
    assert set(OPERANDS) == set(ALL_MODES)
    assert [slot_of(role) for role in Role] == SLOTS
    for section in OPERANDS.values():
        assert list(section) == SLOTS


# The last column, of each kind of conditioner.
CONDITIONERS = {
    Identity: lambda c: "direct",
    StaticScale: lambda c: "direct",  # until calibration fixes its scale
    Hadamard: lambda c: "hadamard" if c.seed is not None else "sylvester",
    FullHadamard: lambda c: "rotated hadamard" + c.across * " across",
    RandomKronecker: lambda c: "rotated kronecker" + c.across * " across",
    MeanRemoved: lambda c: f"mean {CONDITIONERS[type(c.inner)](c.inner)}".removesuffix(" direct"),
    Requantized: lambda c: f"requantized {CONDITIONERS[type(c.second)](c.second)}",
    RandomHadamard: lambda c: "random",
    Clamped: lambda c: "clamped",
    HotChannels: lambda c: "hot",
    DifferentiableEstimator: lambda c: "direct",  # another gradient, which has its own test
    Spectral: lambda c: f"spectral {'compensated' if c.compensated else 'published'}",
}


def described(scheme, role: Role) -> Slot:
    """What a Scheme object says of one slot, in the words of the table."""
    slot = slot_of(role)
    used, operand = scheme.resolve(role)
    corrected = role in scheme.corrected
    if used is not role:
        return Slot(slot, "", reuses=slot_of(used), corrected=corrected)
    source = {"input": "x", "weight": "w", "grad_output": "dy"}[slot.split(".")[1]]
    if isinstance(operand.conditioner, PerChannel):
        assert operand.conditioner.weight == (source == "w")
        conditioner = {Smoothing: "smooth", Shifting: "shifted"}[type(scheme.state)]
    else:
        conditioner = CONDITIONERS[type(operand.conditioner)](operand.conditioner)
    if isinstance(operand.conditioner, Spectral) and operand.conditioner.rank != scheme.rank:
        assert operand.conditioner.rank == math.ceil(scheme.rank / 4)
        conditioner += " quarter"
    if source == "w" and isinstance(scheme.weight, ClippedWeight):
        conditioner = {"direct": "clipped"}[conditioner]
    if source == "w" and scheme.weight.is_split and scheme.weight.exact_factors:
        conditioner = f"split {conditioner}"
    elif source == "w" and scheme.weight.is_split:
        assert conditioner == "direct"  # a split weight is conditioned by how it is stored
        conditioner = f"split {'compensated' if scheme.weight.compensated else 'published'}"
    quantizer = operand.quantizer
    if quantizer is None:
        return Slot(slot, source, conditioner=conditioner.split()[0], corrected=corrected)
    size = quantizer.fmt.block_size
    fmt = quantizer.fmt.name
    mark = {"nvfp4": "", "mxfp4": "", "ufp4": "u", "if4": "i", "mixfp4": "m"}[fmt]
    assert size == (32 if fmt == "mxfp4" else 16)
    assert quantizer.two_level == (fmt in ("nvfp4", "if4", "mixfp4"))
    square = quantizer.tile.value == "square"
    along = "tokens" if slot.startswith("wgrad") else "out" if slot.startswith("dgrad") else "in"
    rules = {"absmax": "", "four-over-six": "-4/6", "search": "-search", "eden": "-eden"}
    rules["unbiased"] = "-unbiased"
    rule = rules[quantizer.scale_rule.value]
    return Slot(
        slot,
        source,
        (f"{size}x{size}" if square else f"1x{size}") + mark,
        "-" if square else along,
        quantizer.rounding.value,
        quantizer.scale_rounding.value + rule,
        conditioner,
        corrected=corrected,
    )


@pytest.mark.parametrize(("scheme", "mode"), ALL_MODES)
def test_schemes_say_what_the_table_says(scheme, mode):
    """Dimensions are no part of a Scheme: the tests of the layer hold them to the table."""
    built = build_scheme(MetisConfig(**options(scheme), operand_mode=mode), IN, OUT)
    assert [described(built, role) for role in Role] == list(OPERANDS[scheme, mode].values())


@pytest.mark.parametrize("scheme", FP4_SCHEMES)
def test_mode_of_a_scheme_by_default(scheme):
    default = build_scheme(MetisConfig(scheme=scheme), IN, OUT)
    mode = "contraction" if scheme in CONTRACTION_ONLY else "shared"
    assert [described(default, role) for role in Role] == list(OPERANDS[scheme, mode].values())


@pytest.mark.parametrize("scheme", sorted(CONTRACTION_ONLY))
def test_copies_per_gemm_have_no_shared_mode(scheme):
    with pytest.raises(ValueError, match=f'"{scheme}".*operand_mode'):
        build_scheme(MetisConfig(scheme=scheme, operand_mode="shared"), IN, OUT)


@functools.cache
def checked(scheme, mode, ranks) -> tuple[dict[str, np.ndarray], dict[str, Terms]]:
    """(results, expected results) of a layer whose quantizations have all been checked."""
    layer, x, dy, calls, results = run(scheme, mode, **NEAREST, **RANKS[ranks])
    assert not has_rank(scheme) or rank_of(layer) == {"thin": 3, "full block": 16}[ranks]
    recording = Recording(calls, ROUNDINGS)
    return results, expected_results(scheme, mode, layer, x, dy, recording)


@pytest.mark.parametrize(
    ("scheme", "mode", "ranks"),
    [
        (*pair, ranks)
        for pair in ALL_MODES
        for ranks in RANKS
        if has_rank(pair[0]) or ranks == "thin"
    ],
)
def test_layers_do_what_the_table_says(scheme, mode, ranks):
    """Every quantization of a layer, and its results, against float64 by the table."""
    results, expected = checked(scheme, mode, ranks)
    assert results.keys() == expected.keys()
    for name, terms in expected.items():
        Recording([], ROUNDINGS).check(results[name], terms, name)


@pytest.mark.parametrize("scheme", ["nvfp4", "metis-paper", "metis"])
def test_modes_differ_by_far_more_than_the_tolerance(scheme):
    """So that passing in one mode is no accident of the other."""
    (shared, terms), (contraction, _) = (
        checked(scheme, m, "thin") for m in ("shared", "contraction")
    )
    same = {"bias"}  # its gradient is the plain sum of dy in both
    if scheme == "metis":  # the blocks of both operands of fprop run along in_features anyway
        same.add("y")
        np.testing.assert_array_equal(shared["y"], contraction["y"])
    for name in terms.keys() - same:
        tolerance = ROUNDINGS * UNIT * np.linalg.norm(terms[name].size)
        assert np.linalg.norm(shared[name] - contraction[name]) > FAR * tolerance, name


@pytest.mark.parametrize(("scheme", "mode"), ALL_FP4_MODES)
def test_roundings_of_a_layer(scheme, mode):
    """A layer with the scheme's own roundings quantizes slot by slot as the table says."""
    calls, table = run(scheme, mode)[3], OPERANDS[scheme, mode]
    expected = []
    for row in table.values():
        matrices = 3 if row.conditioner.split()[0] in ("spectral", "split") else 1
        matrices = {"split smooth": 1, "hot": 2}.get(row.conditioner, matrices)
        if row.conditioner.split()[0] == "mean":
            expected.append(replace(row, along="in"))  # the mean, along its length
        expected += [row] * (0 if row.reuses else matrices)
        gemm = [r for r in table.values() if r.slot.split(".")[0] == row.slot.split(".")[0]]
        if row is gemm[1]:  # then the errors of both in the directions of the other
            corrected = [table[r.reuses or r.slot] for r in gemm if r.corrected]
            expected += [replace(r, source="x", along="in") for r in corrected]
    assert len(calls) == len(expected)
    for call, row in zip(calls, expected):
        assert_quantized_as(call, row)
        assert call.quantizer.rounding.value == row.rounding, row.slot


@pytest.mark.parametrize(("scheme", "mode"), in_one_mode(ALL_FP4_MODES))
def test_parts_are_what_the_layer_quantizes(scheme, mode):
    """Health statistics measure `Conditioner.parts`: the very tensors that enter the GEMMs."""
    layer, x, dy, calls, _ = run(scheme, mode)
    keys = layer.call_keys(x)
    seen = 0
    table = OPERANDS[scheme, mode]
    tensors = [(Role.FPROP_INPUT, x.detach()), (Role.DGRAD_GRAD_OUTPUT, dy)]
    if table["fprop.weight"].conditioner.startswith("spectral"):
        tensors.append((Role.FPROP_WEIGHT, layer.weight.detach()))
    for role, tensor in tensors:
        plan = GemmPlan(layer.scheme, layer.weight_form, torch.float32, keys)
        plan = replace(plan, state=layer.call_state(x, keys))
        operand = plan.resolve(role)[1]
        for part in operand.conditioner.parts(
            tensor, operand.quantizer.quantizer, dim=-1, key=keys[role], row_mask=None
        ):
            assert any(
                torch.equal(part.before, call.before) and torch.equal(part.after, call.after)
                for call in calls
            ), part.name
            seen += 1
    per_tensor = {"spectral": 3, "mean": 2, "hot": 2}
    slots = (table[slot_of(role)] for role, _ in tensors)
    assert seen == sum(per_tensor.get(row.conditioner.split()[0], 1) for row in slots)


def test_signs_of_the_rotation_are_random():
    """The reference above takes the signs from the layer; here they are fair, by config seed."""
    signs = []
    for seed in range(64):
        scheme = build_scheme(MetisConfig(scheme="nvidia", seed=seed), IN, OUT)
        rotations = {scheme.wgrad_input.conditioner, scheme.wgrad_grad_output.conditioner}
        assert len(rotations) == 1  # the same one for both operands
        signs.append(np.sign(array(hadamard_matrix(rotations.pop().seed))[0]))
    assert len({tuple(s) for s in signs}) > 60  # of 2^16, 64 draws hardly ever repeat one
    assert abs(np.sum(signs)) < 4 * np.size(signs) ** 0.5


@pytest.mark.parametrize("tokens", [48, 40, 37])
def test_rotation_cancels_in_the_contraction(tokens):
    """dw is the product of the rotated, quantized copies, as hardware computes it.

    Padding tokens are zero before the rotation, but not after rotating quantized values back: they
    belong to the contraction as the others do.
    """
    torch.manual_seed(0)
    _, layer = layer_of("nvidia", i=IN, o=OUT, **NEAREST)
    calls = record(layer)
    x, dy = torch.randn(tokens, IN), torch.randn(tokens, OUT)
    layer(x).backward(dy)
    dy_hat, x_hat = calls[-2:]
    signs = np.sign(array(hadamard_matrix(layer.scheme.wgrad_input.conditioner.seed))[0])
    h = exact(rotation(tokens, signs))
    recording = Recording([], ROUNDINGS)
    recording.check(array(x_hat.before), h @ exact(x), "rotated x")
    recording.check(array(dy_hat.before), h @ exact(dy), "rotated dy")
    dy_hat, x_hat = exact(array(dy_hat.after)), exact(array(x_hat.after))
    # The layer rotates both back, which adds to the terms that are rounded, but not to their sum.
    size = ((h.T @ dy_hat).T @ (h.T @ x_hat)).size
    recording.check(array(layer.weight.grad), Terms((dy_hat.T @ x_hat).value, size), "dw")


def test_the_error_of_a_scaled_operand_is_that_of_the_product_with_its_scale():
    """In fp32: a GEMM in BF16 multiplies by the scale after it, and rounds no value."""
    values = torch.tensor([[3.0, 6.0]], dtype=torch.bfloat16)
    scale = torch.tensor(1 / 3)
    found = Quantized(values, scale).error(torch.tensor([[1.0, 2.5]], dtype=torch.bfloat16))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5]]), rtol=0, atol=1e-7)
