"""The default scheme's directions, and configs that contradict a scheme."""

from __future__ import annotations

import pytest
import torch
from numerics.helpers import gaussian

from metis_hf import MetisConfig
from metis_hf.noise import Key
from metis_hf.schemes import Role, build_scheme
from metis_hf.transforms.spectral import find_basis

INPUT, GRADIENT = Role.FPROP_INPUT, Role.DGRAD_GRAD_OUTPUT


def directions(i: int = 576, o: int = 1536, **config) -> tuple[int, int]:
    """Those of inputs and of output gradients, of a layer [o i]."""
    scheme = build_scheme(MetisConfig(**config), i, o)
    found = scheme.directions(INPUT), scheme.directions(GRADIENT)
    assert found[0] == scheme.rank
    # Copies for wgrad are split alike, where it has its own.
    assert scheme.directions(Role.WGRAD_INPUT) == found[0]
    assert scheme.directions(Role.WGRAD_GRAD_OUTPUT) == found[1]
    return found


@pytest.mark.parametrize("mode", [None, "contraction"])
def test_gradients_have_a_quarter_of_the_directions_rounded_up(mode):
    for rank, gradients in ((1, 1), (4, 1), (5, 2), (9, 3), (48, 12), (98, 25)):
        assert directions(rank=rank, operand_mode=mode) == (rank, gradients)


def test_ranks_are_at_least_48_in_blocks_and_no_more_than_a_layer_has():
    for sides, rank in {
        (576, 192): 48, (96, 256): 48, (32, 96): 32, (4096, 14336): 64, (8192, 8192): 128,
    }.items():  # fmt: skip
        assert directions(*sides) == (rank, rank // 4)


def test_a_multiple_of_the_config_s_own_has_no_floor():
    assert directions(rank_multiple=1) == (9, 3)
    assert directions(rank_multiple=16) == (16, 4)


def test_stored_factors_have_the_rank_that_they_have_under_any_scheme():
    for scheme in ("metis", "nvidia", "bf16-split", "svdquant"):
        assert build_scheme(MetisConfig(scheme=scheme, split_weight=True), 576, 576).rank == 32
    assert build_scheme(MetisConfig(scheme="metis-paper", split_weight=True), 576, 576).rank == 9


def test_the_share_is_an_option():
    assert directions(rank=32, gradient_rank_frac=1) == (32, 32)
    assert directions(rank=30, gradient_rank_frac=0.1) == (30, 3)  # no 4 by a rounding error
    assert directions(rank=9, gradient_rank_frac=1e-9) == (9, 1)
    assert directions(rank_frac=0.06, rank_multiple=1, gradient_rank_frac=0.5) == (35, 18)


def test_the_paper_s_gradients_have_all_directions():
    assert directions(scheme="metis-paper", rank=9) == (9, 9)
    assert directions(scheme="metis-paper", rank=9, gradient_rank_frac=0.25) == (9, 3)


def test_what_is_not_split_has_no_directions():
    for config, roles in (
        (MetisConfig(scheme="nvidia"), Role),
        (MetisConfig(decompose=("activation",)), [GRADIENT]),
        (MetisConfig(), [Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT]),
    ):
        scheme = build_scheme(config, 64, 64)
        assert not any(scheme.directions(role) for role in roles)
    stored = build_scheme(MetisConfig(scheme="svdquant", rank=8), 64, 64)
    assert stored.directions(Role.DGRAD_WEIGHT) == stored.directions(Role.FPROP_WEIGHT) == 8


def test_a_weight_that_is_named_and_kept_whole_is_refused():
    config = MetisConfig(scheme="metis-paper", decompose=("weight",), split_weight=False)
    with pytest.raises(ValueError, match="split_weight=False keeps weights whole"):
        build_scheme(config, 64, 64)
    assert not build_scheme(config.replace(decompose=None), 64, 64).weight.is_split


def test_weights_are_split_by_all_rows_and_inputs_by_sums_of_them():
    scheme = build_scheme(MetisConfig(decompose=("activation", "weight"), rank=4), 32, 1024)
    x, key = gaussian(1024, 32), Key(1)
    of_all_rows = find_basis(x, 4, key=key)
    for role in (Role.FPROP_WEIGHT, INPUT):
        basis = scheme.operand(role).conditioner.split(x, key=key)[2]
        assert torch.equal(basis, of_all_rows) == (role is not INPUT)


def test_what_stands_beside_stored_factors_is_corrected():
    """They are a split, whatever `decompose` names."""
    for tensors in (("activation", "gradient"), ("activation",), None):
        config = MetisConfig(scheme="metis", split_weight=True, decompose=tensors)
        assert Role.FPROP_INPUT in build_scheme(config, 64, 64).corrected
        whole = config.replace(split_weight=False)
        assert Role.FPROP_INPUT not in build_scheme(whole, 64, 64).corrected


@pytest.mark.parametrize("scheme", ["w4a4", "w4a16"])
@pytest.mark.filterwarnings("ignore:two_level")
def test_what_is_deployed_has_one_form(scheme):
    for changes, message in (
        ({"split_weight": True}, "stores factors, which no deployed layer has"),
        ({"scale_rounding": "up"}, "rounds block scales to nearest, as the kernels"),
        ({"two_level": False}, "fixes tensor scales, but two_level=False has none"),
    ):
        with pytest.raises(ValueError, match=message):
            build_scheme(MetisConfig(scheme=scheme, **changes), 64, 64)
