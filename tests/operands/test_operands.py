"""The schemes against the table of operands, and layers against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from design import cases
from layers.layer_reference import (
    Recording,
    array,
    assert_quantized_as,
)
from layers.layer_tools import (
    CONTRACTION_ONLY,
    FP4_SCHEMES,
    FP4_STRUCTURES,
    NEAREST,
)

from metis_hf import MetisConfig
from metis_hf.layers.gemm import GemmPlan
from metis_hf.operands import (
    Quantized,
)
from metis_hf.schemes import Role, build_scheme
from metis_hf.transforms.hadamard import hadamard_matrix
from operands.operand_reference import expected_results, has_rank, rank_of, run
from operands.operand_table import (
    ALL_MODES,
    ALL_QUANTIZED_MODES,
    IN,
    OPERANDS,
    OUT,
    RANKS,
    ROUNDINGS,
    SLOTS,
    slot_of,
)


def test_the_table_is_complete():
    assert set(OPERANDS) == set(ALL_MODES)
    assert [slot_of(role) for role in Role] == SLOTS
    for section in OPERANDS.values():
        assert list(section) == SLOTS


def test_mode_of_a_scheme_by_default():
    for scheme in FP4_SCHEMES:
        mode = "contraction" if scheme in CONTRACTION_ONLY else "shared"
        default, chosen = (
            build_scheme(MetisConfig(scheme=scheme, operand_mode=each), IN, OUT)
            for each in (None, mode)
        )
        assert default == chosen, scheme


def test_copies_per_gemm_have_no_shared_mode():
    for scheme in CONTRACTION_ONLY:
        with pytest.raises(ValueError, match=f'"{scheme}".*operand_mode'):
            build_scheme(MetisConfig(scheme=scheme, operand_mode="shared"), IN, OUT)


# Options of Metis one at a time, and formats of mixed blocks: each in its other mode, or in if4.
OTHERS = [("metis of activations", "contraction"), ("metis of weights", "contraction"),
          ("metis split", "contraction"), ("mixfp4", "contraction"),
          ("w4a16", "contraction")]  # fmt: skip


@cases({"scheme, mode": ALL_MODES}, rotated={"ranks": list(RANKS)}, slow=OTHERS)
def test_layers_do_what_the_table_says(scheme, mode, ranks):
    """Every quantization of a layer, and its results, against float64 by the table."""
    layer, x, dy, calls, results = run(scheme, mode, **NEAREST, **RANKS[ranks])
    assert not has_rank(scheme) or rank_of(layer) == {"thin": 3, "full block": 16}[ranks]
    expected = expected_results(scheme, mode, layer, x, dy, Recording(calls, ROUNDINGS))
    assert results.keys() == expected.keys()
    for name, terms in expected.items():
        Recording([], ROUNDINGS).check(results[name], terms, name)


@pytest.mark.parametrize(("scheme", "mode"), ALL_QUANTIZED_MODES)
def test_roundings_of_a_layer(scheme, mode):
    """A layer with the scheme's own roundings quantizes slot by slot as the table says."""
    calls, table = run(scheme, mode)[3], OPERANDS[scheme, mode]
    expected = []
    for row in table.values():
        matrices = 3 if row.conditioner.split()[0] in ("spectral", "split") else 1
        matrices = {"split smooth": 1, "hot": 2}.get(row.conditioner, matrices)
        if row.conditioner.split()[0] == "mean" and row.conditioner != "mean exact":
            expected.append(replace(row, along="in"))  # the mean, along its length
        expected += [row] * (matrices if row.quantized else 0)
        gemm = [r for r in table.values() if r.slot.split(".")[0] == row.slot.split(".")[0]]
        if row is gemm[1]:  # then the errors of both in the directions of the other
            corrected = [table[r.reuses or r.slot] for r in gemm if r.corrected]
            expected += [replace(r, source="x", along="in") for r in corrected]
    assert len(calls) == len(expected)
    for call, row in zip(calls, expected):
        assert_quantized_as(call, row)
        assert call.quantizer.rounding.value == row.rounding, row.slot


@pytest.mark.parametrize(("scheme", "mode"), FP4_STRUCTURES)
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
    per_tensor = {"spectral": 3, "mean": 2, "mean exact": 1, "hot": 2}
    kinds = [table[slot_of(role)].conditioner for role, _ in tensors]
    assert seen == sum(per_tensor.get(k, per_tensor.get(k.split()[0], 1)) for k in kinds)


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


def test_the_error_of_a_scaled_operand_is_that_of_the_product_with_its_scale():
    """Computed in fp32: a GEMM in BF16 multiplies by the scale after it, and rounds no value."""
    values = torch.tensor([[3.0, 6.0]], dtype=torch.bfloat16)
    scale = torch.tensor(1 / 3)
    x = torch.tensor([[1.0, 2.5]], dtype=torch.bfloat16)
    found = Quantized(values, scale).error_along(x, torch.eye(2), torch.ones(2), None)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5]]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("scale", [None, (), (1025, 1), (1, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_a_large_operand(scale, dtype):
    """A CPU computes it in pieces of rows."""
    x, values = torch.randn(2, 1025, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = None if scale is None else torch.rand(scale) + 0.5
    directions, lengths = torch.randn(1024, 3), torch.rand(3)
    found = Quantized(values, scale).error_along(x, directions, lengths, None)
    error = x.double() - values.double() * (1 if scale is None else scale)
    wanted = (error.to(dtype).double() @ directions.to(dtype).double()) * lengths
    assert found.shape == (1025, 3)
    rounding = torch.finfo(dtype).eps * error.norm(dim=1)[:, None] * directions.norm(dim=0)
    assert ((found - wanted).abs() <= rounding * lengths).all()
