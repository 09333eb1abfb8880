"""Rules that choose a block's scale among several by its error: Four Over Six and the search.

test_formats.py holds their values to the reference; here is what they are good for.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from metis_hf.numerics import fake_quantize, quantize
from metis_hf.numerics.storage import unpack
from numerics.helpers import SCALE_ROUNDINGS, expected, normal, seeded

BOTH_TILES = pytest.mark.parametrize("tile", ["row", "square"])

# Share of blocks of N(0, 1) that TransformerEngine's own reference scales to 4, by its error.
SHARE_OF_FOUR, SHARE_TOLERANCE = 0.453, 0.02
FOUR_OVER_SIX = {"fmt": "nvfp4", "scale_rule": "four-over-six"}


def one_block(values: list[float]) -> tuple[list[float], float]:
    """(codes, scale) of one block, one-level: what is written is what is scaled."""
    x = torch.tensor(values + [0.0] * (16 - len(values)))
    q = quantize(x, **FOUR_OVER_SIX, two_level=False)
    return q.fmt.element.decode(unpack(q.codes, 4))[: len(values)].tolist(), q.scale.item()


def test_a_block_that_fits_four_takes_four() -> None:
    """4.5 has no code under scale 1 and is 3 * 1.5 under scale 1.5."""
    assert one_block([6.0, 4.5]) == ([4.0, 3.0], 1.5)
    assert one_block([6.0, 4.0]) == ([6.0, 4.0], 1.0)


@pytest.mark.parametrize(
    "values", [[6.0], [6.0, 3.0, 1.5], [6.0, 4.25], [6.0, 4.25, -4.25]], ids=str
)
def test_a_tie_takes_six(values) -> None:
    """Both exact, or both a quarter off: 4.25 lies between 4 = 4 * 1 and 4.5 = 3 * 1.5."""
    codes, scale = one_block(values)
    assert scale == 1.0
    assert codes[0] == 6.0


def test_the_error_is_squared_and_not_absolute() -> None:
    """Errors (.25, .25) under 6 and (0, .3) under 4: the sums .5 > .3, the squares .125 > .09."""
    assert one_block([6.0, 2.25, 2.25])[1] == 1.5


@BOTH_TILES
def test_the_tensor_scale_leaves_room_for_four(tile) -> None:
    """The largest block's scale is 256 on 6 or 384 on 4, both E4M3 values; absmax takes 448."""
    largest = set()
    for seed in range(8):
        x = torch.randn(32, 32, generator=seeded(seed))
        q = quantize(x, tile=tile, **FOUR_OVER_SIX)
        assert q.global_scale.item() == pytest.approx(x.abs().max().item() / 1536, rel=1e-6)
        block = int(x.abs().argmax())
        size = 16 if tile == "square" else 1
        largest.add(q.scale.float()[block // 32 // size, block % 32 // 16].item())
        assert quantize(x, tile=tile).scale.float().max() == 448
    assert largest <= {256.0, 384.0}
    assert 256.0 in largest


def block_errors(x: Tensor, y: Tensor, tile: str) -> np.ndarray:
    """Squared error of each block, float64."""
    squares = (x.double() - y.double()).square()
    if tile == "square":
        return squares.unflatten(-1, (-1, 16)).unflatten(0, (-1, 16)).sum((1, 3)).numpy()
    return squares.unflatten(-1, (-1, 16)).sum(-1).numpy()


@BOTH_TILES
@pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)
def test_no_block_is_worse_than_always_six(tile, scale_rounding) -> None:
    """With the same tensor scale; the choice costs nothing but the rounding of fp32.

    Some block is better, but for the few square tiles: their 256 elements seldom agree on 4.
    """
    fp32_noise = 1e-5
    options = {"tile": tile, "scale_rounding": scale_rounding}
    for x in (torch.randn(32, 48, generator=seeded(3)), normal(32, 48, seed=4)):
        chosen = block_errors(x, fake_quantize(x, **FOUR_OVER_SIX, **options), tile)
        six = block_errors(x, expected(x, fmt="nvfp4", scale_rule="six", **options), tile)
        assert (chosen <= six * (1 + fp32_noise)).all()
        if tile == "row":
            assert (chosen < six * (1 - fp32_noise)).any()


def test_how_many_blocks_of_a_normal_tensor_take_four() -> None:
    q = quantize(torch.randn(512, 512, generator=seeded(5)), **FOUR_OVER_SIX)
    codes = q.fmt.element.decode(unpack(q.codes, 4)).unflatten(-1, (-1, 16))
    share = (codes.abs().amax(-1) == 4).double().mean().item()
    assert share == pytest.approx(SHARE_OF_FOUR, abs=SHARE_TOLERANCE)


# --- search ----------------------------------------------------------------------------------

SEARCH = {"fmt": "nvfp4", "scale_rule": "search"}


@BOTH_TILES
def test_no_block_is_worse_than_with_four_over_six(tile) -> None:
    x = torch.randn(64, 96, generator=seeded(3))
    searched = block_errors(x, fake_quantize(x, **SEARCH, tile=tile), tile)
    chosen = block_errors(x, fake_quantize(x, **FOUR_OVER_SIX, tile=tile), tile)
    assert (searched <= chosen * (1 + 1e-5)).all()
    assert (searched < chosen * (1 - 1e-5)).sum() > 0.3 * chosen.size


def test_search_may_clip_what_is_largest() -> None:
    """Elements at 5.7 sixths of the largest: under .95 they are exact, and it loses a twentieth."""
    x = torch.tensor([1.0, *[0.95] * 15])[None]
    codes = quantize(x, two_level=False, **SEARCH)
    assert codes.dequantize().amax() < 1.0
    assert quantize(x, two_level=False, **FOUR_OVER_SIX).dequantize().amax() == pytest.approx(
        1.0, rel=0.07
    )


def test_four_over_six_chooses_by_nearest_rounding_also_when_stochastic() -> None:
    """Noise rounds the elements; the scales are those of nearest rounding."""
    x = torch.randn(32, 64, generator=seeded(6))
    nearest = quantize(x, **FOUR_OVER_SIX)
    drawn = quantize(x, rounding="stochastic", generator=seeded(7), **FOUR_OVER_SIX)
    assert torch.equal(drawn.scale.view(torch.uint8), nearest.scale.view(torch.uint8))
    assert not torch.equal(drawn.codes, nearest.codes)
