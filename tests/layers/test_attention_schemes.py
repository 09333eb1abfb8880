"""Schemes that attention products take, and those that they refuse by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import fake_quantize

from layers.attention_tools import (
    ACCEPTED,
    products_of,
)
from layers.layer_reference import array
from metis_hf import MetisConfig, scheme_names
from metis_hf.layers.attention import (
    ProductOperands,
    build_attention_scheme,
)
from metis_hf.noise import key_of
from metis_hf.numerics import Quantizer
from metis_hf.operands import Identity, Operand, Requantized
from metis_hf.schemes import Role, Scheme
from metis_hf.schemes.noise_keys import CallKeys

REASONS = {
    "metis": "splits tensors",
    "svdquant": "splits tensors",
    "omniquant": "trains factors in addition to a weight",
    "w4a4": r"keeps state \(StaticScales\)",
    "smoothquant": r"keeps state \(Smoothing\)",
    "tetrajet2": r"keeps state \(Oscillation\)",
    "quarot": "rotates operands in the forward pass",
    "ufp4": "rotates operands in the forward pass",
    "averis": r"has a conditioner \(MeanRemoved\)",
    "occ": r"has a conditioner \(Clamped\)",
}


class TestSchemes:
    def test_accepted(self):
        for scheme in ACCEPTED:
            built = build_attention_scheme(MetisConfig(attention=scheme))
            tiles = {built.resolve(r)[1].quantizer.tile.value for r in Role if scheme != "bf16"}
            assert tiles <= {"row"}
            reused = [role for role in Role if built.reuses(role)]
            assert not reused or scheme == "bf16"

    def test_all_others_are_refused_by_name(self):
        for scheme in {*scheme_names()} - ACCEPTED:
            reason = REASONS.get(scheme, "")
            message = rf"^attention='{scheme}' cannot .* because it .*{reason}.*nvfp4"
            with pytest.raises(ValueError, match=message):
                build_attention_scheme(MetisConfig(attention=scheme))

    def test_unknown_scheme_and_foreign_format(self):
        with pytest.raises(ValueError, match="did you mean 'nvfp4'"):
            build_attention_scheme(MetisConfig(attention="nvfp-4"))
        with pytest.raises(ValueError, match="'quartet2' does not take format='int4'"):
            build_attention_scheme(MetisConfig(attention="quartet2", format="int4"))

    def test_config_overrides_apply(self):
        config = MetisConfig(
            attention="nvfp4", format="int4", forward_rounding="nearest", split_weight=True
        )
        quantizer = build_attention_scheme(config).fprop_weight.quantizer
        assert (quantizer.fmt.name, quantizer.rounding.value) == ("int4", "nearest")
        for passes, exact in (("forward", {0, 1}), ("backward", {2, 3, 4, 5})):
            scheme = build_attention_scheme(config.replace(high_precision=(passes,)))
            operands = {role: scheme.resolve(role)[1] for role in Role}
            assert {role for role in Role if operands[role].quantizer is None} == exact

    def test_bf16_quantizes_nothing(self):
        assert products_of("bf16").active_scheme().is_high_precision

    def test_requantized_copies_are_of_the_forward_copy(self):
        """TetraJet's double quantization, along the other dimension, head by head."""
        quantizer = Quantizer()
        again = Operand(quantizer, Requantized(Identity()))
        direct = Operand(quantizer)
        scheme = Scheme(direct, direct, direct, again, direct, again)
        b = torch.randn(2, 20, 12)
        plan = ProductOperands(scheme, torch.float32, CallKeys(key_of("a"), b, b))
        first = fake_quantize(array(b), dim=-1).values
        second = fake_quantize(first, dim=-2).values
        assert np.array_equal(array(plan.operand(Role.DGRAD_WEIGHT, b).values), second)
