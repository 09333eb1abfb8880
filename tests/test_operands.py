"""Which tensor enters which GEMM, and how: the table, the schemes against it, layers against it."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from layer_reference import (
    UNIT,
    Recording,
    Slot,
    SplitParts,
    Terms,
    array,
    assert_quantized_as,
    exact,
    hadamard_operand,
    rotation,
    spectral_operand,
    split_weight,
)
from layer_tools import (
    FP4_SCHEME_MODES,
    FP4_SCHEMES,
    NEAREST,
    SCHEME_MODES,
    distinct,
    layer_of,
    record,
)

from metis_hf import MetisConfig
from metis_hf.operands import IDENTITY, Hadamard, Spectral
from metis_hf.schemes import Role, build_scheme
from metis_hf.transforms.hadamard import hadamard_matrix
from metis_hf.transforms.spectral import default_rows, find_subspace

# y [t o] = x [t i] w [o i]^T;  dx = dy w;  dw = dy^T x. Columns: slot (GEMM and operand), source,
# shape of a block, dimension that it runs along, element rounding, rounding of the block scales,
# conditioner. Every scale has two levels. "split": the weight is stored as u s vh + residual;
# "spectral": x or dy is split as a lam v^T + residual. Each of the three matrices is quantized
# alone, with the blocks of its line: along its last dimension, or its first for "tokens". Residuals
# are taken against the exact factors ("published") or the quantized ones ("compensated").
TABLE = """
bf16, shared
    fprop.input        x   -      -       -           -        direct
    fprop.weight       w   -      -       -           -        direct
    dgrad.grad_output  dy  -      -       -           -        direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
bf16-split, shared
    fprop.input        x   -      -       -           -        direct
    fprop.weight       w   -      -       -           -        split
    dgrad.grad_output  dy  -      -       -           -        direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
nvfp4, shared
    fprop.input        x   1x16   in      stochastic  up       direct
    fprop.weight       w   1x16   in      stochastic  up       direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
nvfp4, contraction
    fprop.input        x   1x16   in      stochastic  up       direct
    fprop.weight       w   16x16  -       stochastic  up       direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  stochastic  up       direct
nvidia, contraction
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   16x16  -       nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  nearest  direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest  hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest  hadamard
metis-paper, shared
    fprop.input        x   1x16   in      stochastic  up       spectral published
    fprop.weight       w   1x16   in      stochastic  up       split published
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral published
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
metis-paper, contraction
    fprop.input        x   1x16   in      stochastic  up       spectral published
    fprop.weight       w   16x16  -       stochastic  up       split published
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral published
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       spectral published
    wgrad.input        x   1x16   tokens  stochastic  up       spectral published
metis, shared
    fprop.input        x   1x16   in      nearest     nearest  spectral compensated
    fprop.weight       w   1x16   in      nearest     nearest  split compensated
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral compensated
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
metis, contraction
    fprop.input        x   1x16   in      nearest     nearest  spectral compensated
    fprop.weight       w   16x16  -       nearest     nearest  split compensated
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral compensated
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       spectral compensated
    wgrad.input        x   1x16   tokens  nearest     nearest  spectral compensated
"""


def parse(table: str) -> dict[tuple[str, str], dict[str, Slot]]:
    """(scheme, mode) -> slot name -> line."""
    sections: dict[tuple[str, str], dict[str, Slot]] = {}
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            scheme, mode = line.split(", ")
            section = sections.setdefault((scheme, mode), {})
            continue
        slot, source, *rest = line.split(maxsplit=6)
        section[slot] = (
            Slot(slot, "", reuses=rest[0]) if source == "=" else Slot(slot, source, *rest)
        )
    # Nothing is quantized in them, so that the mode changes nothing.
    for scheme in ("bf16", "bf16-split"):
        sections[scheme, "contraction"] = sections[scheme, "shared"]
    return sections


OPERANDS = parse(TABLE)
SLOTS = ["fprop.input", "fprop.weight", "dgrad.grad_output"]
SLOTS += ["dgrad.weight", "wgrad.grad_output", "wgrad.input"]

# No dimension is a multiple of 8: every block shape has an incomplete last one.
TOKENS, IN, OUT = 37, 70, 52
# Terms go through one sum over each dimension at most, and a few single operations each time.
ROUNDINGS = TOKENS + IN + OUT + 32
RANKS = {"thin": {"rank_frac": 0.05, "rank_multiple": 1}, "full block": {"rank_multiple": 16}}
FAR = 16  # modes that differ by this many tolerances cannot be taken for each other


def slot_of(role: Role) -> str:
    gemm, operand = role.name.lower().split("_", 1)
    return f"{gemm}.{operand}"


def test_the_table_is_complete():
    assert set(OPERANDS) == set(SCHEME_MODES)
    assert [slot_of(role) for role in Role] == SLOTS
    for section in OPERANDS.values():
        assert list(section) == SLOTS


def described(scheme, role: Role) -> Slot:
    """What a Scheme object says of one slot, in the words of the table."""
    slot = slot_of(role)
    used, operand = scheme.resolve(role)
    if used is not role:
        return Slot(slot, "", reuses=slot_of(used))
    source = {"input": "x", "weight": "w", "grad_output": "dy"}[slot.split(".")[1]]
    if source == "w":
        assert operand.conditioner is IDENTITY  # a split weight is conditioned by how it is stored
        split = f"split {'compensated' if scheme.compensated else 'published'}"
        conditioner = split if scheme.split_weight else "direct"
    else:
        conditioner = {
            type(IDENTITY): lambda c: "direct",
            Hadamard: lambda c: "hadamard",
            Spectral: lambda c: f"spectral {'compensated' if c.compensated else 'published'}",
        }[type(operand.conditioner)](operand.conditioner)
    quantizer = operand.quantizer
    if quantizer is None:
        return Slot(slot, source, conditioner=conditioner.split()[0])
    assert quantizer.fmt.name == "nvfp4"
    assert quantizer.two_level
    assert quantizer.scale_rule.value == "absmax"
    square = quantizer.tile.value == "square"
    along = "tokens" if slot.startswith("wgrad") else "out" if source == "dy" else "in"
    return Slot(
        slot,
        source,
        "16x16" if square else "1x16",
        "-" if square else along,
        quantizer.rounding.value,
        quantizer.scale_rounding.value,
        conditioner,
    )


@pytest.mark.parametrize(("scheme", "mode"), SCHEME_MODES)
def test_schemes_say_what_the_table_says(scheme, mode):
    """Dimensions are no part of a Scheme: the tests of the layer hold them to the table."""
    built = build_scheme(MetisConfig(scheme=scheme, operand_mode=mode), IN, OUT)
    assert [described(built, role) for role in Role] == list(OPERANDS[scheme, mode].values())


@pytest.mark.parametrize("scheme", FP4_SCHEMES)
def test_mode_of_a_scheme_by_default(scheme):
    default = build_scheme(MetisConfig(scheme=scheme), IN, OUT)
    mode = "contraction" if scheme == "nvidia" else "shared"
    assert [described(default, role) for role in Role] == list(OPERANDS[scheme, mode].values())


def test_nvidia_has_no_shared_mode():
    with pytest.raises(ValueError, match="operand_mode"):
        build_scheme(MetisConfig(scheme="nvidia", operand_mode="shared"), IN, OUT)


def inputs():
    """x and dy with a dominant direction and columns of different size, as in a network."""
    g = torch.Generator().manual_seed(3)

    def matrix(rows, columns):
        noise = torch.randn(rows, columns, generator=g)
        direction = torch.randn(rows, 1, generator=g) * torch.randn(1, columns, generator=g)
        return (noise + 2 * direction) * torch.logspace(0, -1, columns)

    return matrix(TOKENS, IN), matrix(TOKENS, OUT) * 1e-3


def run(scheme, mode, **changes):
    """(layer, x, dy, distinct quantizations, results by name) of one forward and backward pass."""
    torch.manual_seed(0)
    _, layer = layer_of(scheme, mode, i=IN, o=OUT, **changes)
    calls = record(layer)
    x, dy = inputs()
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    results = {"y": array(y), "x": array(x.grad)}
    results |= {name: array(p.grad) for name, p in layer.named_parameters()}
    return layer, x, dy, distinct(calls), results


def expected_results(scheme, mode, layer, x, dy, recording) -> dict[str, Terms]:
    """y and all gradients by the table, in float64, from operands checked on the way."""
    table = OPERANDS[scheme, mode]
    params = {name: array(p) for name, p in layer.named_parameters()}
    keys = layer.call_keys(x)
    tensors = {"x": x.detach(), "dy": dy}
    done: dict[str, Terms | SplitParts] = {}

    def matrix(slot: str) -> Terms:
        row = table[slot]
        if row.reuses:
            return done[row.reuses]
        tensor = tensors[row.source]
        if not row.quantized:
            return exact(tensor)
        if row.conditioner == "direct":
            return recording.quantize(array(tensor), row)
        if row.conditioner == "hadamard":
            conditioner = layer.scheme.operand(Role(SLOTS.index(slot))).conditioner
            signs = np.sign(array(hadamard_matrix(conditioner.seed))[0])  # Sylvester's has none
            return hadamard_operand(recording, array(tensor), row, signs)
        rank = min(layer.rank, *tensor.shape)
        basis = find_subspace(
            tensor,
            rank,
            sample_frac=layer.config.sample_frac,
            min_rows=default_rows(rank, layer.config.oversample),
            oversample=layer.config.oversample,
            n_iter=layer.config.n_iter,
            key=keys[Role(SLOTS.index(slot))],
        )
        return spectral_operand(recording, array(tensor), row, array(basis))

    def weight(slot: str) -> Terms | SplitParts:
        row = table[slot]
        if row.reuses:
            return done[row.reuses]
        if row.conditioner.startswith("split"):
            gain = 1.0 if scheme == "metis-paper" else (IN * OUT) ** -0.5
            return split_weight(recording, params, row, gain)
        return (
            recording.quantize(params["weight"], row) if row.quantized else exact(params["weight"])
        )

    for slot in SLOTS:
        done[slot] = weight(slot) if slot.endswith("weight") else matrix(slot)
    assert next(recording.calls, None) is None, "more was quantized than the table has"
    w_hat, w_dgrad = (
        w.w_hat if isinstance(w, SplitParts) else w
        for w in (done["fprop.weight"], done["dgrad.weight"])
    )
    dw = done["wgrad.grad_output"].T @ done["wgrad.input"]
    expected = {
        "y": done["fprop.input"] @ w_hat.T + exact(params["bias"]),
        "x": done["dgrad.grad_output"] @ w_dgrad,
        "bias": exact(np.ones(TOKENS)) @ exact(dy),
    }
    if isinstance(done["fprop.weight"], SplitParts):
        return expected | dict(done["fprop.weight"].gradients(dw))
    return expected | {"weight": dw}


def has_rank(scheme: str) -> bool:
    return "metis" in scheme or "split" in scheme


@functools.cache
def checked(scheme, mode, ranks) -> tuple[dict[str, np.ndarray], dict[str, Terms]]:
    """(results, expected results) of a layer whose quantizations have all been checked."""
    layer, x, dy, calls, results = run(scheme, mode, **NEAREST, **RANKS[ranks])
    assert not has_rank(scheme) or layer.rank == {"thin": 3, "full block": 16}[ranks]
    recording = Recording(calls, ROUNDINGS)
    return results, expected_results(scheme, mode, layer, x, dy, recording)


@pytest.mark.parametrize(
    ("scheme", "mode", "ranks"),
    [
        (*pair, ranks)
        for pair in SCHEME_MODES
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
    for name in terms.keys() - {"bias"}:  # the bias gradient is the plain sum of dy in both
        tolerance = ROUNDINGS * UNIT * np.linalg.norm(terms[name].size)
        assert np.linalg.norm(shared[name] - contraction[name]) > FAR * tolerance, name


@pytest.mark.parametrize(("scheme", "mode"), FP4_SCHEME_MODES)
def test_roundings_of_a_layer(scheme, mode):
    """A layer with the scheme's own roundings quantizes slot by slot as the table says."""
    calls = run(scheme, mode)[3]
    expected = []
    for row in OPERANDS[scheme, mode].values():
        matrices = 3 if row.conditioner.split()[0] in ("spectral", "split") else 1
        expected += [row] * (0 if row.reuses else matrices)
    assert len(calls) == len(expected)
    for call, row in zip(calls, expected):
        assert_quantized_as(call, row)
        assert call.quantizer.rounding.value == row.rounding, row.slot


@pytest.mark.parametrize(("scheme", "mode"), FP4_SCHEME_MODES)
def test_parts_are_what_the_layer_quantizes(scheme, mode):
    """Health statistics measure `Conditioner.parts`: the very tensors that enter the GEMMs."""
    layer, x, dy, calls, _ = run(scheme, mode)
    keys = layer.call_keys(x)
    seen = 0
    for role, tensor in ((Role.FPROP_INPUT, x.detach()), (Role.DGRAD_GRAD_OUTPUT, dy)):
        operand = layer.scheme.operand(role)
        for part in operand.conditioner.parts(
            tensor, operand.quantizer.quantizer, dim=-1, key=keys[role], row_mask=None
        ):
            assert any(
                torch.equal(part.before, call.before) and torch.equal(part.after, call.after)
                for call in calls
            ), part.name
            seen += 1
    assert seen == (6 if has_rank(scheme) else 2)


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
