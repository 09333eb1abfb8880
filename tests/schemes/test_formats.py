"""`MetisConfig.format`: the number format of a scheme's operands, chosen by the config."""

from __future__ import annotations

import pytest
import torch
from conftest import llama
from layers.layer_tools import DEPLOYED, FP4_SCHEMES

from metis_hf import MetisConfig, get_metis_model, metis_layers, scheme_names, set_precision
from metis_hf.numerics import FORMATS, SCALE_FP32, BlockFormat, CodebookFormat
from metis_hf.operands import ClippedWeight
from metis_hf.schemes import Role, build_scheme
from metis_hf.schemes.parts import quantizer

NVFP4_ONLY = {"four-over-six", "quartet2", "tetrajet2", *DEPLOYED}
NVFP4_ONLY |= {"nvidia-unbiased", "four-over-six-unbiased"}
OWN = {"mxfp4": "mxfp4", "mxfp4-hadamard": "mxfp4", "ufp4": "ufp4"}  # others: NVFP4
OWN |= {"if4": "if4", "mixfp4": "mixfp4"}
DEFINED = dict.fromkeys(NVFP4_ONLY, "nvfp4") | {"if4": "if4", "mixfp4": "mixfp4"}
SIDE = 64


def formats_of(scheme):
    operands = (scheme.resolve(role)[1] for role in Role)
    return {operand.quantizer.fmt.name for operand in operands if operand.quantizer is not None}


def test_every_scheme_takes_it_or_refuses_it_by_name():
    for name in (*FP4_SCHEMES, *DEPLOYED):
        check_formats(name)


def check_formats(name):
    for fmt in ("mxfp8-e4m3", "int4", "nvint4", "mxfp4", "nvfp4", "if4"):
        config = MetisConfig(scheme=name, format=fmt)
        if DEFINED.get(name, fmt) != fmt:
            own = DEFINED[name]
            message = f"scheme '{name}' does not take format='{fmt}': it is defined only for {own}"
            with pytest.raises(ValueError, match=message):
                build_scheme(config, SIDE, SIDE)
        elif (name, fmt) == ("occ", "if4"):
            message = "scheme 'occ' does not take format='if4'.*estimator.*one grid"
            with pytest.raises(ValueError, match=message):
                build_scheme(config, SIDE, SIDE)
        else:
            assert formats_of(build_scheme(config, SIDE, SIDE)) == {fmt}, name
    own, config = OWN.get(name, "nvfp4"), MetisConfig(scheme=name)
    scheme = build_scheme(config, SIDE, SIDE)
    assert formats_of(scheme) == {own}, name
    assert build_scheme(config.replace(format=own), SIDE, SIDE) == scheme, name


def test_occ_refuses_a_codebook(monkeypatch):
    """Its estimator reads the codes above zero for both signs."""
    element = CodebookFormat("lopsided", (-2, -0.5, 0, 1))
    fmt = BlockFormat("lopsided", element, SCALE_FP32, 32, "a test")
    monkeypatch.setitem(FORMATS, "lopsided", fmt)
    with pytest.raises(ValueError, match=r"same on both sides of zero.*lopsided may not have"):
        build_scheme(MetisConfig(scheme="occ", format="lopsided"), SIDE, SIDE)


def test_what_quantizes_nothing_is_left_alone():
    """So that `scheme_pattern` can leave single layers in BF16 under any format."""
    for name in ("bf16", "bf16-split"):
        assert not formats_of(build_scheme(MetisConfig(scheme=name, format="int4"), SIDE, SIDE))


class TestRoundingOfScales:
    def test_one_that_the_format_has(self):
        for fmt, wanted, expected in (
            ("nvfp4", "up", "up"),
            ("mxfp8-e4m3", "up", "up"),
            ("mxfp8-e4m3", "nearest", "floor"),  # the specification's
            ("int4", "up", "nearest"),  # fp32 scales are as good as exact
        ):
            config = MetisConfig(format=fmt)
            made = quantizer(config, rounding="nearest", scale_rounding=wanted)
            assert made.scale_rounding.value == expected
            assert made.two_level == FORMATS[fmt].scale.tensor_scale

    def test_one_that_the_config_asks_for_is_not_changed(self):
        config = MetisConfig(scheme="nvfp4", format="int4", scale_rounding="up")
        message = r"scheme 'nvfp4' does not take format='int4' .*scale_rounding='up' does not exist"
        with pytest.raises(ValueError, match=message):
            build_scheme(config, SIDE, SIDE)


class TestRefusals:
    def test_unknown(self):
        config = MetisConfig(format="mxfp8")
        with pytest.raises(ValueError, match="format 'mxfp8' is unknown; did you mean 'mxfp8"):
            build_scheme(config, SIDE, SIDE)

    @pytest.mark.parametrize("name", ["nvidia", "omniquant"])
    def test_rows_without_blocks(self, name):
        """Square tiles, and clipping by blocks, where the format has one scale for a row."""
        config = MetisConfig(scheme=name, format="fp8-e4m3")
        message = f"scheme '{name}' does not take format='fp8-e4m3' in this configuration: "
        with pytest.raises(ValueError, match=message):
            build_scheme(config, SIDE, SIDE)

    def test_what_is_refused_with_any_format_is_not_blamed_on_it(self):
        config = MetisConfig(scheme="nvidia", format="nvfp4", operand_mode="shared")
        with pytest.raises(ValueError, match=r'^scheme "nvidia" quantizes a copy for each GEMM'):
            build_scheme(config, SIDE, SIDE)


def test_clipping_is_by_the_blocks_of_the_format():
    for fmt, size in (("nvfp4", 16), ("mxfp4", 32)):
        form = build_scheme(MetisConfig(scheme="omniquant", format=fmt), SIDE, SIDE).weight
        assert form == ClippedWeight(size)


@pytest.mark.parametrize("fmt", ["mxfp8-e4m3", "int4"])
def test_a_model_trains_and_more_bits_are_nearer(fmt, token_ids):
    """Eight bits lose less than four; a switch while the model lives changes the same layers."""
    torch.manual_seed(0)
    plain = llama()
    model = get_metis_model(llama(), MetisConfig(scheme="nvfp4-rne", format=fmt))
    model.load_state_dict(plain.state_dict())
    model(input_ids=token_ids, labels=token_ids).loss.backward()
    assert all(layer.weight.grad.isfinite().all() for _, layer in metis_layers(model))
    errors = {}
    with torch.no_grad():
        exact = plain(token_ids).logits
        for name in (fmt, "nvfp4"):
            set_precision(model, format=name)
            errors[name] = (model(token_ids).logits - exact).norm().item()
    assert model.config.quantization_config.format == "nvfp4"
    assert errors["nvfp4"] > 0
    assert (errors[fmt] < errors["nvfp4"] / 2) == ("fp8" in fmt)


def test_every_name_is_covered():
    assert {*FP4_SCHEMES, *DEPLOYED, "bf16", "bf16-split"} == set(scheme_names())
    assert {*DEFINED, *OWN} <= {*FP4_SCHEMES, *DEPLOYED}
