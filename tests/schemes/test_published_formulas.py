"""Schemes of 2026 against the formulas of their papers, written out in plain numpy and integers.

Nothing here goes through the reference of the other tests: each formula stands once, in float64 or
in integers, as its source has it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layers.layer_tools import layer_of, record

from metis_hf import MetisConfig
from metis_hf.noise import Key
from metis_hf.numerics import IF4, MIXFP4, MXFP4, NVFP4, UFP4, Quantizer, fake_quantize, quantize
from metis_hf.operands import Hadamard, MeanRemoved
from metis_hf.schemes import Role, build_scheme
from metis_hf.transforms.hadamard import hadamard_matrix

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TOKENS, IN, OUT = 48, 64, 32  # whole blocks of 16 and of 32 but for tokens: 32 + 16
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # sums in fp32, of numbers near 1; a code apart is .1 or more


def data(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g) + 2 * torch.randn(1, shape[1], generator=g)
    return x * torch.logspace(0, -1, shape[1])


def sylvester():
    h = np.ones((1, 1))
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    return h / 4


def rotated(x, h):
    """Blocks of 16 along the last dimension, multiplied by H; x [r 16 b]."""
    return (x.reshape(-1, 16) @ h.T).reshape(x.shape)


def nearest(y, grid):
    """Of magnitudes on the grid, ties to the even place."""
    y, places = np.minimum(np.abs(y), grid[-1]), np.arange(len(grid))
    distance = np.abs(y[..., None] - grid)
    return grid[np.argmin(distance + 1e-9 * (places % 2), -1)]


# --- UFP4 ----------------------------------------------------------------------------------------


def ufp4(x):
    """s = amax / 7, code = rne(x / s), in blocks of 16 along the last dimension."""
    blocks = x.reshape(-1, 16)
    s = np.abs(blocks).max(1, keepdims=True) / 7
    return (np.round(blocks / s) * s).reshape(x.shape)


def test_ufp4_rounds_to_sevenths_of_each_block():
    x = data(64, 96)
    np.testing.assert_allclose(fake_quantize(x, UFP4), ufp4(x.double().numpy()), rtol=1e-6)


def test_ufp4_is_e1m2_with_a_scale_of_its_own():
    """0 to 3.5 by halves, under amax / 3.5: the same numbers, since a scale takes the 2."""
    x = data(64, 96, seed=1).double().numpy()
    grid = np.arange(8) / 2
    blocks = x.reshape(-1, 16)
    s = np.abs(blocks).max(1, keepdims=True) / 3.5
    wanted = np.sign(blocks) * nearest(blocks / s, grid) * s
    found = fake_quantize(torch.from_numpy(x).float(), UFP4).double().numpy()
    np.testing.assert_allclose(found.reshape(-1, 16), wanted, rtol=1e-6)


def products(x, w, dy, q):
    """y, dx and dw of three GEMMs; both operands of each are q'd along what it contracts."""
    return {
        "y": q(x) @ q(w).T,
        "dx": q(dy) @ q(w.T).T,
        "dw": q(dy.T) @ q(x.T).T,
    }


def results(scheme):
    """x, w, dy and what the layer makes of them, float64, with gradients rounded to nearest."""
    _, layer = layer_of(scheme, i=IN, o=OUT, bias=False, backward_rounding="nearest")
    x, dy = data(TOKENS, IN), data(TOKENS, OUT, seed=3)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    found = {"y": y, "dx": x.grad, "dw": layer.weight.grad}
    tensors = (t.detach().double().numpy() for t in (x, layer.weight, dy))
    return layer, *tensors, {name: t.detach().numpy() for name, t in found.items()}


def test_ufp4_rotates_all_three_gemms():
    """H cancels in every contraction, so that the rotated codes have the same products."""
    layer, x, w, dy, found = results("ufp4")
    seeds = {
        operand.conditioner.seed
        for operand in (layer.scheme.fprop_input, layer.scheme.dgrad_weight)
    }
    (seed,) = seeds
    h = hadamard_matrix(seed).double().numpy()
    np.testing.assert_allclose(h @ h.T, np.eye(16), atol=1e-12)
    assert np.array_equal(np.abs(h), np.full((16, 16), 0.25))
    for name, wanted in products(x, w, dy, lambda m: ufp4(rotated(m, h))).items():
        np.testing.assert_allclose(found[name], wanted, **CLOSE, err_msg=name)


# --- MXFP4 with a Hadamard rotation --------------------------------------------------------------


def mxfp4_scale(amax):
    """The vendor's kernel, by integers: 0x200000 is a quarter of the mantissa's range."""
    bits = np.asarray(amax, np.float32).view(np.uint32)
    exponent = ((bits + np.uint32(0x200000)) & np.uint32(0xFF800000)) >> np.uint32(23)
    exponent = np.clip(exponent.astype(int) - 127 - 2, -127, 127)
    return np.where(np.asarray(amax) == 0, 1.0, 2.0**exponent)


def mxfp4(x):
    """Blocks of 32 along the last dimension; the last one may be shorter."""
    out = np.zeros_like(x)
    for start in range(0, x.shape[1], 32):
        part = x[:, start : start + 32]
        s = mxfp4_scale(np.abs(part.astype(np.float32)).max(1, keepdims=True))
        out[:, start : start + 32] = np.sign(part) * nearest(part / s, E2M1) * s
    return out


def test_mxfp4_scale_is_the_kernels():
    """At every power, at the mantissa 1.75 and its neighbours, and at the ends of fp32."""
    tops = np.array([1, 1.5, np.nextafter(np.float32(1.75), 0), 1.75, 1.99], np.float32)
    powers = np.float32(2.0) ** np.arange(-120, 127, dtype=np.float32)
    amax = np.concatenate([np.outer(powers, tops).ravel(), [np.finfo(np.float32).max, 1e-44]])
    amax = amax.astype(np.float32)
    stored = quantize(torch.from_numpy(amax)[:, None], MXFP4, scale_rounding="even")
    assert np.array_equal(stored.scale[:, 0].double().numpy(), mxfp4_scale(amax))
    scaled = amax[:-1] / stored.scale[:-1, 0].double().numpy()
    assert scaled.min() >= 3.5
    assert scaled.max() < 7


def test_mxfp4_is_rotated_without_signs_in_all_three_gemms():
    layer, x, w, dy, found = results("mxfp4-hadamard")
    h = sylvester()
    assert np.array_equal(hadamard_matrix(None).numpy(), h)
    assert np.array_equal(h @ h, np.eye(16))  # its own inverse
    for name, wanted in products(x, w, dy, lambda m: mxfp4(rotated(m, h))).items():
        np.testing.assert_allclose(found[name], wanted, **CLOSE, err_msg=name)
    own = build_scheme(MetisConfig(scheme="mxfp4-hadamard"), IN, OUT)  # gradients too
    assert {own.operand(role).quantizer.rounding.value for role in Role} == {"nearest"}
    assert {layer.scheme.operand(role).conditioner for role in Role} == {Hadamard(None)}


# --- Averis --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["averis", "averis-hadamard"])
def test_averis_multiplies_all_four_products(scheme):
    """Equations 11 and 12 of the first version, from what the layer's quantizer was given."""
    _, layer = layer_of(scheme, i=IN, o=OUT, bias=False, backward_rounding="nearest")
    calls = record(layer)
    x, dy = data(TOKENS, IN), data(TOKENS, OUT, seed=3)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    np64 = [(c.before.double().numpy(), c.after.double().numpy()) for c in calls]
    mu, mu_hat = np64[0]
    rest, rest_hat = np64[1]
    x64, dy64 = x.detach().double().numpy(), dy.double().numpy()
    np.testing.assert_allclose(mu[0], x64.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rest, x64 - x64.mean(0), rtol=1e-5, atol=1e-5)
    w_hat = next(after for before, after in np64 if before.shape == (OUT, IN))
    np.testing.assert_allclose(y.detach(), mu_hat @ w_hat.T + rest_hat @ w_hat.T, **CLOSE)
    # wgrad: the last four, mean and rest of dy, then of x; blocks of the rests run along tokens.
    (d_mu, d_mu_hat), (d_rest, d_rest_hat), (_, x_mu_hat), (x_rest, x_rest_hat) = np64[-4:]
    np.testing.assert_allclose(d_mu[0], dy64.mean(0), rtol=1e-5, atol=1e-6)
    if scheme == "averis-hadamard":  # the rests are rotated along tokens: H cancels between them
        h = hadamard_matrix(layer.scheme.wgrad_input.conditioner.inner.seed).double().numpy()
        turn = np.kron(np.eye(TOKENS // 16), h)
        np.testing.assert_allclose(x_rest, turn @ (x64 - x64.mean(0)), **CLOSE)
        np.testing.assert_allclose(d_rest, turn @ (dy64 - dy64.mean(0)), **CLOSE)
        d_rest_hat, x_rest_hat = turn.T @ d_rest_hat, turn.T @ x_rest_hat
    ones = np.ones((TOKENS, 1))
    terms = [
        d_rest_hat.T @ x_rest_hat,
        d_rest_hat.T @ (ones @ x_mu_hat),
        (ones @ d_mu_hat).T @ x_rest_hat,
        (ones @ d_mu_hat).T @ (ones @ x_mu_hat),
    ]
    np.testing.assert_allclose(layer.weight.grad, sum(terms), rtol=2e-5, atol=2e-4)


def test_padding_has_no_mean():
    """Of 37 tokens 11 rows of padding: rounding errors only, however large the mean is."""
    x, quantizer = data(37, 48) + 100, Quantizer()
    conditioner = MeanRemoved(Hadamard(3))
    x_hat = conditioner(x, quantizer, dim=0, key=Key(1))
    assert x_hat.shape == (48, 48)
    rest = Hadamard(3)(x - x.mean(0), quantizer, dim=0, key=Key(1).fold(3))
    assert torch.equal(x_hat[37:], rest[37:])
    mean_hat = quantizer(x.mean(0, keepdim=True), key=Key(1).fold(1))
    assert torch.equal(x_hat[:37], rest[:37] + mean_hat)
    encoded = conditioner.encode(x, quantizer, dim=0, key=Key(1))
    for dtype in (torch.float32, torch.bfloat16):
        decoded = conditioner.decode(encoded, quantizer, dim=0, shape=(37, 48), dtype=dtype)
        assert torch.equal(decoded, x_hat.to(dtype))


# --- IF4 and MixFP4 ------------------------------------------------------------------------------


def e4m3(values):
    return torch.from_numpy(values.astype(np.float32)).to(torch.float8_e4m3fn).double().numpy()


def blocks_of(x, square=False):
    """[blocks elements]: of 16 along the last dimension, or of 16x16."""
    if not square:
        return x.reshape(-1, 16)
    rows, columns = x.shape
    return x.reshape(rows // 16, 16, columns // 16, 16).swapaxes(1, 2).reshape(-1, 256)


def whole(blocks, shape, square=False):
    if not square:
        return blocks.reshape(shape)
    rows, columns = shape
    tiles = blocks.reshape(rows // 16, columns // 16, 16, 16)
    return tiles.swapaxes(1, 2).reshape(shape)


def chosen(x, float_block, int_block):
    """Of two candidates the one with the smaller squared error; E2M1 where they are alike."""
    float_error = ((float_block - x) ** 2).sum(1, keepdims=True)
    int_error = ((int_block - x) ** 2).sum(1, keepdims=True)
    return np.where(int_error < float_error, int_block, float_block), int_error < float_error


def if4(x, square=False, room=1.0):
    """One scale e4m3(amax_b / 6 S) for both, S = 6 * 448 / amax; int4 of y * 7/6, times 6/7.

    `room` is 16/17 where gradients are rounded without bias: amax then comes to that share of 6.
    """
    blocks = blocks_of(x, square)
    s = 6 * room * 448 / np.abs(x).max()
    scale = e4m3(np.abs(blocks).max(1, keepdims=True) / (6 * room) * s) / s
    y = blocks / np.where(scale == 0, np.inf, scale)
    float_block = np.sign(y) * nearest(y, E2M1) * scale
    int_block = np.round(np.clip(y * 7 / 6, -7, 7)) * 6 / 7 * scale
    values, is_int = chosen(blocks, float_block, int_block)
    return whole(values, x.shape, square), is_int


def mixfp4(x, square=False):
    """A scale for each: e4m3(amax_b / 6 S) and e4m3(amax_b / 7 S), S = 2688 / amax."""
    blocks = blocks_of(x, square)
    s = 2688 / np.abs(x).max()
    amax = np.abs(blocks).max(1, keepdims=True)
    candidates = []
    for largest, grid in ((6, E2M1), (7, np.arange(8.0))):
        scale = e4m3(amax / largest * s) / s
        y = blocks / np.where(scale == 0, np.inf, scale)
        candidates.append(np.sign(y) * nearest(y, grid) * scale)
    values, is_int = chosen(blocks, *candidates)
    return whole(values, x.shape, square), is_int


@pytest.mark.parametrize("square", [False, True], ids=["rows", "squares"])
@pytest.mark.parametrize(("fmt", "formula"), [(IF4, if4), (MIXFP4, mixfp4)], ids=["if4", "mixfp4"])
def test_blocks_take_the_nearer_of_two_formats(fmt, formula, square):
    """Values, and the sign bit of the scale, which is set where a block has integers."""
    x = data(64, 96, seed=7)
    tile = "square" if square else "row"
    wanted, is_int = formula(x.double().numpy(), square)
    np.testing.assert_allclose(fake_quantize(x, fmt, tile=tile), wanted, rtol=1e-6)
    stored = quantize(x, fmt, tile=tile)
    assert np.array_equal(stored.scale.float().signbit().numpy().reshape(-1, 1), is_int)
    assert 0.05 < is_int.mean() < 0.95
    assert fmt.bits_per_element == 4.5
    assert stored.nbytes == x.numel() * 4.5 / 8 + 4 - (square * x.numel() / 16) * (1 - 1 / 16)
    assert torch.equal(stored.dequantize(), fake_quantize(x, fmt, tile=tile))


def test_if4_leaves_no_block_with_a_larger_error_than_nvfp4():
    """They share scales, so that a block in E2M1 is NVFP4's to the bit."""
    x = data(64, 96, seed=8)
    mixed, plain = quantize(x, IF4), quantize(x, NVFP4)
    assert torch.equal(mixed.scale.float().abs(), plain.scale.float())
    is_float = ~mixed.scale.float().signbit()
    blocks = [q.dequantize().unflatten(-1, (-1, 16)) for q in (mixed, plain)]
    assert torch.equal(blocks[0][is_float], blocks[1][is_float])
    errors = [(b.double() - x.unflatten(-1, (-1, 16))).square().sum(-1) for b in blocks]
    assert (errors[0] <= errors[1] * (1 + 2.0**-12)).all()
    assert errors[0].sum() < 0.8 * errors[1].sum()


@pytest.mark.parametrize("scheme", ["if4", "mixfp4"])
def test_recipes_of_mixed_formats(scheme):
    """NVIDIA's: 16x16 tiles of the weight, wgrad rotated along tokens; by the formulas above."""
    layer, x, w, dy, found = results(scheme)
    h = hadamard_matrix(layer.scheme.wgrad_input.conditioner.seed).double().numpy()
    formula = {"if4": if4, "mixfp4": mixfp4}[scheme]
    gradients = {"room": 16 / 17} if scheme == "if4" else {}
    w_hat = formula(w, square=True)[0]
    wanted = {
        "y": formula(x)[0] @ w_hat.T,
        "dx": formula(dy, **gradients)[0] @ w_hat,
        "dw": formula(rotated(dy.T, h), **gradients)[0] @ formula(rotated(x.T, h))[0].T,
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, **CLOSE, err_msg=name)


@pytest.mark.parametrize("fmt", [IF4, MIXFP4], ids=["if4", "mixfp4"])
def test_stochastic_rounding_of_mixed_blocks_is_unbiased(fmt):
    """The format of a block does not depend on the draw, so that the mean of draws is x."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(6))
    quantizer = Quantizer(fmt, rounding="stochastic", scale_rule="unbiased")
    draws = torch.stack([quantizer(x, key=Key(seed)) for seed in range(400)]).double()
    along = ((draws - x) * x.sign()).flatten(1).mean(1)
    assert abs(along.mean() / (along.std() / 20)) < 5
    assert max(len(column.unique()) for column in draws.flatten(1).T) == 2
    deviation = (draws.mean(0) - x).abs() / (draws.std(0) / 20).clamp(min=1e-9)
    moving = draws.std(0) > 0
    assert deviation[moving].max() < 6


# --- 16/17 ---------------------------------------------------------------------------------------

UNBIASED = Quantizer(rounding="stochastic", scale_rule="unbiased")


def test_nothing_is_beyond_six():
    """For block maxima over all E4M3 scales from 2^-6 on, ties and their neighbours included."""
    scale = np.arange(8, 127, dtype=np.uint8)  # codes of E4M3's normal numbers
    scale = torch.from_numpy(scale).view(torch.float8_e4m3fn).double().numpy()
    ties = (scale[1:] + scale[:-1]) / 2
    points = np.concatenate([scale, ties]).astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, np.inf)])
    near = np.minimum(near[near >= 2.0**-6], 448)
    x = torch.from_numpy(near * np.float32(6 * 16 / 17))[:, None].repeat(1, 16)
    for row in torch.cat([x, x.amax() * torch.rand(2000, 16)]).split(64):
        rows = torch.cat([row, x.amax().expand(1, 16)])  # the tensor's scale stays the same
        assert UNBIASED.saturated(rows) == 0
    assert Quantizer().saturated(x) > 0.1  # of these points, those that round down


def test_scales_are_the_published_ones():
    """Tensor: amax / 448 / val_max; block: e4m3(amax_b / val_max / that), val_max = 6 * 16/17."""
    x = data(64, 96, seed=5)
    q = quantize(x, NVFP4, scale_rule="unbiased")
    val_max = 6 / (17 / 16)
    tensor = x.abs().max().double() / 448 / val_max
    assert q.global_scale.item() == pytest.approx(tensor.item(), rel=1e-6)
    wanted = x.unflatten(-1, (-1, 16)).abs().amax(-1).double() / val_max / tensor
    # fp32's rounding before the cast may decide a tie.
    assert (q.scale == wanted.float().to(torch.float8_e4m3fn)).double().mean() > 0.995
    assert q.scale.float().max() == 448


def test_stochastic_rounding_is_unbiased_with_scales_to_nearest():
    """The mean of n draws is x within 5 sigma; with amax on 6 the clipped part is a bias."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(6))
    sums = {}
    for rule in ("unbiased", "absmax"):
        quantizer = Quantizer(rounding="stochastic", scale_rule=rule)
        draws = torch.stack([quantizer(x, key=Key(seed)) - x for seed in range(400)])
        along = (draws.double() * x.sign()).flatten(1).mean(1)  # shrinkage
        sums[rule] = (along.mean() / (along.std() / 20)).item()
    assert abs(sums["unbiased"]) < 5
    assert sums["absmax"] < -8
