"""How weights are stored: each form's parameters, what they stand for, and who can take them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layers.layer_tools import DEPLOYED, layer_of

from metis_hf import MetisConfig, scheme_names
from metis_hf.layers.make import convert_linear
from metis_hf.noise import Key
from metis_hf.operands import ClippedWeight, DenseWeight, Operand, SplitWeight
from metis_hf.schemes import build_scheme

OUT, IN, RANK = 48, 70, 6
FORMS = [
    DenseWeight(),
    ClippedWeight(),
    SplitWeight(RANK),
    SplitWeight(RANK, unit_rms=True).sized(OUT, IN),
    SplitWeight(RANK, compensated=False, exact_factors=True),
]


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_parameters_stand_for_the_weight(form):
    w = torch.randn(OUT, IN)
    params = form.decompose(w, Key(1))
    shapes = form.shapes(OUT, IN)
    assert tuple(tuple(p.shape) for p in params) == shapes
    assert len(form.names) == len(shapes)
    assert shapes[-1] == (OUT, IN)
    torch.testing.assert_close(form.dense(params), w)
    unquantized = form.quantize(params, Operand(), dim=-1, key=Key(2), dtype=torch.float64)
    torch.testing.assert_close(unquantized.values, w.double(), rtol=1e-5, atol=1e-6)
    # What is added to the last parameter is added to the weight.
    *others, last = params
    torch.testing.assert_close(form.dense((*others, last + 1)), w + 1)
    split = isinstance(form, SplitWeight)
    assert form.is_split == split
    assert form.rank == (RANK if split else None)
    assert form.factor_bits((OUT, IN), 4.5) == pytest.approx(
        0 if not split
        else ((16 if form.exact_factors else 4.5) * (OUT + IN) + 32) * RANK / (OUT * IN)
    )  # fmt: skip
    assert set(form.undecayed) <= set(form.names)


def test_units_of_factors():
    """Unit RMS: u and vh times the roots of their lengths, which the gain takes back."""
    w = torch.randn(OUT, IN)
    plain = SplitWeight(RANK)
    unit = SplitWeight(RANK, unit_rms=True).sized(OUT, IN)
    assert plain.sized(OUT, IN) == plain
    assert unit.gain == (OUT * IN) ** -0.5
    (u, s, vh, _), (u1, s1, vh1, _) = (form.decompose(w, Key(1)) for form in (plain, unit))
    torch.testing.assert_close(u1, u * OUT**0.5)
    torch.testing.assert_close(vh1, vh * IN**0.5)
    assert torch.equal(s1, s)
    for params, form in (((u, s, vh, w), plain), ((u1, s1, vh1, w), unit)):
        for basis, side in zip(form.orthonormal(params), (0, 1)):
            gram = basis.T @ basis if side == 0 else basis @ basis.T
            torch.testing.assert_close(gram, torch.eye(RANK), rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", [None, True, False])
def test_a_layer_has_the_parameters_of_its_scheme(split):
    """The form is decided by `build_scheme` alone; layers and their checkpoints follow it."""
    for scheme in scheme_names():
        stored = split and scheme not in DEPLOYED
        config = MetisConfig(scheme=scheme, split_weight=stored, rank=RANK)
        built = build_scheme(config, IN, OUT)
        assert built.rank == RANK
        linear = torch.nn.Linear(IN, OUT, bias=False)
        layer = convert_linear(linear, config, name="layer")
        assert layer.weight_form == built.weight == layer.scheme.weight == layer.eval_scheme.weight
        named = dict(layer.named_parameters())
        assert set(named) == set(built.weight.names)
        shapes = [tuple(named[name].shape) for name in built.weight.names]
        assert shapes == list(built.weight.shapes(OUT, IN))
        assert layer.rank == built.weight.rank


class TestOtherConfigs:
    """`MetisLayer.check_config`: a config that the stored parameters do not fit."""

    def test_another_rank(self):
        _, layer = layer_of("metis", i=64, o=48, rank=8, split_weight=True)
        layer.check_config(layer.config.replace(scheme="nvidia"))
        with pytest.raises(ValueError, match="rank 9 does not match the stored factors of rank 8"):
            layer.check_config(layer.config.replace(rank=9))

    def test_a_dense_weight_has_no_rank(self):
        _, layer = layer_of("metis", i=64, o=48, rank=8)
        layer.check_config(layer.config.replace(rank=9))

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"scheme": "metis"}, {"split_weight": True}),
            ({"scheme": "metis", "split_weight": True}, {"split_weight": False}),
            ({"scheme": "nvfp4"}, {"scheme": "omniquant"}),
            ({"scheme": "metis-paper"}, {"scheme": "svdquant", "rank_multiple": 1}),
            ({"scheme": "bf16-split", "rank_multiple": 1}, {"scheme": "metis-paper"}),
        ],
        ids=str,
    )  # fmt: skip
    def test_another_form(self, first, second):
        _, layer = layer_of(**first, i=64, o=48)
        with pytest.raises(ValueError, match="a different form"):
            layer.check_config(layer.config.replace(**second))


def test_storing_keeps_a_form_that_is_as_wanted():
    scheme = build_scheme(MetisConfig(scheme="svdquant", rank=RANK), IN, OUT)
    assert scheme.storing(split=True) is scheme
    assert scheme.storing(split=False).weight == DenseWeight()
    clipped = build_scheme(MetisConfig(scheme="omniquant"), IN, OUT)
    assert clipped.storing(split=False) is clipped
    stored = replace(clipped, rank=RANK).storing(split=True)
    assert stored.weight == SplitWeight(RANK, unit_rms=True)
