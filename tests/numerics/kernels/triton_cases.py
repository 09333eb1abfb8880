"""What kernels written by hand must give, on any device: the reference's bits.

test_kernels_on_gpu.py runs `Cases` on GPUs, and this file in a process of its own, in Triton's
interpreter: that one is chosen when triton is imported first (TRITON_INTERPRET=1), for the whole
process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics import Quantizer, ScaleRule, Tile, fake_quantize
from metis_hf.numerics.kernels import choice, use_kernels
from metis_hf.numerics.kernels.layout import has_form
from metis_hf.numerics.scaling import OuterScale
from numerics.cases import assert_same_bits
from numerics.helpers import seeded
from numerics.kernels.kernel_tools import ALL, TENSORS, low_rank, tensors, variants
from numerics.kernels.kernel_tools import check as check_packed

# With it every tensor meets every choice in every dtype and with every split, for minutes; without,
# each choice in one of them, another one for the next tensor, and every other one to be stored.
EVERY = "METIS_TEST_EVERY_CASE"
ROW, SQUARE = Tile.ROW, Tile.SQUARE
STOCHASTIC = Quantizer(rounding="stochastic")
# Rows with a scale each, over block scales of every rule.
BY_ROW = [Quantizer(outer_scale="token", scale_rule=rule.value) for rule in ScaleRule]
BY_ROW += [replace(STOCHASTIC, outer_scale=OuterScale.TOKEN)]
BY_HAND = [*ALL, *BY_ROW]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPLITS = ["none", "same", "minus and plus", "plus"]
SHAPES = [(1, 1), (1, 16), (3, 5), (16, 17), (17, 16), (40, 33), (7,), (64,), (3, 16, 20)]
KEY = noise.Key(5, torch.tensor(-77, dtype=torch.int32))


class Choice(NamedTuple):
    """How one tensor is quantized."""

    quantizer: Quantizer
    dim: int
    dtype: torch.dtype  # of the tensor
    out: torch.dtype
    split: str


def splits(x: Tensor, split: str) -> dict[str, Tensor | None]:
    """`minus` and `plus`, on the device of x."""
    low = low_rank((x.shape[0], x.shape[-1])).expand(x.shape).contiguous().to(x.device)
    exact = low * 1.03
    found = {
        "none": (None, None),
        "same": (low, low),
        "minus and plus": (exact, low),
        "plus": (None, low),
    }
    return dict(zip(("minus", "plus"), found[split]))


def on(device: torch.device | str, key: noise.Key) -> noise.Key:
    return key._replace(data=None if key.data is None else key.data.to(device))


def reference(x: Tensor, quantizer: Quantizer, *, key: noise.Key = KEY, **options) -> Tensor:
    """What is right: the reference on CPU."""
    options = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
    with use_kernels("reference"):
        return quantizer(x.cpu(), key=key, **options)


def check(name: str, x: Tensor, quantizer: Quantizer, *, key: noise.Key = KEY, **options) -> None:
    """Values with the named kernels; the input is left alone."""
    before = x.clone()
    with use_kernels(name):
        actual = quantizer(x, key=on(x.device, key), **options)
    assert actual.device == x.device
    assert_same_bits(actual.cpu(), reference(x, quantizer, key=key, **options))
    assert_same_bits(x, before)


class Cases:
    """For kernels that are known by name, on some device."""

    kernels: str
    device: str
    quantizers: Sequence[Quantizer] = BY_HAND

    def choices(self, name: str) -> Iterator[Choice]:
        """Of one of the tensors."""
        first = list(TENSORS).index(name)
        for index, (quantizer, dim) in enumerate(variants(self.quantizers), first):
            number = len(DTYPES) * len(SPLITS)
            # Five and twelve have no divisor in common: the order covers all of them.
            for at in range(number) if EVERY in os.environ else [5 * index % number]:
                dtype, split = DTYPES[at % len(DTYPES)], SPLITS[at // len(DTYPES)]
                out = DTYPES[(index + at // len(DTYPES)) % len(DTYPES)]
                yield Choice(quantizer, dim, dtype, out, split)

    @pytest.mark.parametrize("name", TENSORS)
    def test_values_are_the_reference_to_the_bit(self, name) -> None:
        """Rows, columns and squares; alone and with a split."""
        for quantizer, dim, dtype, out, split in self.choices(name):
            x = TENSORS[name].to(self.device, dtype)
            check(self.kernels, x, quantizer, dim=dim, dtype=out, **splits(x, split))

    @pytest.mark.parametrize("name", TENSORS)
    def test_packed_is_the_reference(self, name) -> None:
        """Codes, scales, and values from them, with and without a split."""
        step = 1 if EVERY in os.environ else 4
        found = list(enumerate(variants(self.quantizers)))
        for index, (quantizer, dim) in found[list(TENSORS).index(name) % step :: step]:
            dtype = DTYPES[index % len(DTYPES)]
            x = TENSORS[name].to(self.device, dtype)
            low = low_rank(x.shape).to(self.device)
            check_packed(x, quantizer, dim, DTYPES[index % 2], low, self.kernels)

    @pytest.mark.parametrize("shape", [(1, 16), (16, 16), (3, 48), (17, 30), (70, 256)], ids=str)
    def test_packed_shapes_and_strides(self, shape) -> None:
        """Odd numbers of blocks, and of columns, among them."""
        x = torch.randn(shape, generator=seeded(1)).to(self.device)
        low = low_rank(shape).to(self.device)
        quantizers = [(replace(STOCHASTIC, tile=tile), -1) for tile in (ROW, SQUARE)]
        quantizers += [(STOCHASTIC, 0), (BY_ROW[0], -1), (Quantizer(scale_rule="eden"), 0)]
        for quantizer, dim in quantizers:
            for form in (x, x.t().contiguous().t()):
                check_packed(form, quantizer, dim, torch.bfloat16, low, self.kernels)

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_shapes_and_strides(self, shape) -> None:
        """Ragged, batched, transposed, strided."""
        x = torch.randn(shape, generator=seeded(1)).to(self.device)
        forms = [x, torch.cat([x, x], -1)[..., 1::2]]
        if x.dim() > 1:
            forms.append(x.transpose(-1, -2).contiguous().transpose(-1, -2))
        eden = Quantizer(scale_rule="eden")
        for quantizer in (Quantizer(), replace(STOCHASTIC, two_level=False), eden, BY_ROW[0]):
            for tile, dim in ((ROW, -1), (ROW, -2), (SQUARE, -1)):
                if (x.dim() == 1 or quantizer in BY_ROW) and (tile, dim) != (ROW, -1):
                    continue
                tiled = replace(quantizer, tile=tile)
                for form in forms:
                    check(self.kernels, form, tiled, dim=dim)
                if x.dim() > 1:  # a split as it comes and contiguous
                    low = torch.randn_like(forms[-1])
                    assert low.stride() == forms[-1].stride()
                    check(self.kernels, x, tiled, dim=dim, minus=low, plus=low)
                    check(self.kernels, forms[-1], tiled, dim=dim, minus=x, plus=low)

    @pytest.mark.parametrize("blocks", [(9, 1), (1, 9), (3, 17)], ids=str)
    def test_many_programs(self, blocks) -> None:
        """More than one tile in each direction, the last ones not full."""
        x = torch.randn(16 * blocks[0] - 3, 16 * blocks[1] - 5, generator=seeded(2))
        x[-1, -1] = 1000.0  # amax in the last tile
        x = x.to(self.device)
        quantizers = [(STOCHASTIC, -1), (STOCHASTIC, 0), (Quantizer(tile="square"), -1)]
        for quantizer, dim in [*quantizers, (BY_ROW[0], -1), (Quantizer(scale_rule="eden"), -1)]:
            check(self.kernels, x, quantizer, dim=dim)
            check(self.kernels, x, quantizer, dim=dim, **splits(x, "minus and plus"))
            check_packed(x, quantizer, dim, torch.float32, None, self.kernels)
        if blocks == (9, 1):
            check(self.kernels, x.reshape(-1)[: 16 * 130], STOCHASTIC)  # cut into rows of one block

    @pytest.mark.parametrize("out", DTYPES, ids=str)
    @pytest.mark.parametrize("name", ["normal", "zero", "nan"])
    def test_without_the_tensor_scale(self, name, out) -> None:
        x = TENSORS[name].to(self.device)
        for quantizer in (Quantizer(), Quantizer(two_level=False), BY_ROW[0]):
            with use_kernels("reference"):
                wanted, wanted_scale = quantizer.unscaled(x.cpu(), dtype=out)
            with use_kernels(self.kernels):
                values, scale = quantizer.unscaled(x, dtype=out)
            assert_same_bits(values.cpu(), wanted)
            assert (scale is None) == (wanted_scale is None)
            if wanted_scale is not None:
                assert_same_bits(scale.cpu(), wanted_scale)

    def test_an_amax_that_is_given(self) -> None:
        x = TENSORS["normal"].to(self.device)
        for factor in (0.1, 1.0, 9.0):
            amax = x.abs().amax() * factor
            for quantizer, dim in (
                (Quantizer(), -1),
                (STOCHASTIC, 0),
                (Quantizer(tile=SQUARE), -1),
            ):
                check(self.kernels, x, quantizer, dim=dim, amax=amax)
                with use_kernels(self.kernels):  # as `torch.tensor(1.0)`, on the CPU
                    found = quantizer(x, dim=dim, key=KEY, amax=amax.cpu())
                    assert_same_bits(found, quantizer(x, dim=dim, key=KEY, amax=amax))

    def test_keys_of_every_kind(self) -> None:
        x = TENSORS["normal"].to(self.device)
        data = noise.fingerprint(TENSORS["normal"])
        keys = (noise.Key(4), noise.key_of("a", 1), noise.Key(3, data), noise.Key(3, data + 1))
        for key in keys:
            check(self.kernels, x, STOCHASTIC, dim=0, key=key)
        assert len({reference(x, STOCHASTIC, dim=0, key=key).sum().item() for key in keys}) == 4
        with use_kernels(self.kernels):
            assert_same_bits(STOCHASTIC(x, key=3), STOCHASTIC(x, key=noise.Key(3)))
            with pytest.raises(ValueError, match="needs a noise key"):
                STOCHASTIC(x)

    def test_noise_equal_to_the_fraction_rounds_down(self) -> None:
        """As it must for a value on the grid to stay where noise is 0."""
        x = noise.uniform((16, 64), KEY) / 2  # in steps of the grid, below 1, the noise itself
        x[:, ::16] = 6  # scale 1
        quantizer = replace(STOCHASTIC, two_level=False)
        assert reference(x, quantizer).unique().tolist() == [0, 6]
        check(self.kernels, x.to(self.device), quantizer)

    def test_the_end_of_the_range(self) -> None:
        """Differences and sums overflow where the reference's do."""
        x = torch.full((32, 48), torch.finfo(torch.float32).max)
        x[1::2] *= -1
        x = x.to(self.device)
        for size in (0.0, -1e38, 1e38):
            plus = torch.full_like(x, size)
            for quantizer in (Quantizer(), Quantizer(scale_rounding="up", tile="square")):
                check(self.kernels, x, quantizer, plus=plus)
                check(self.kernels, x, quantizer, minus=plus, plus=plus)

    def test_double_precision(self) -> None:
        """A difference of fp64 numbers is rounded once."""
        x = (TENSORS["normal"].double() * 1.1).to(self.device)
        check(self.kernels, x, Quantizer())
        for split in SPLITS[1:]:
            check(self.kernels, x, Quantizer(), **splits(x, split))

    def test_gradients(self) -> None:
        x = TENSORS["normal"].to(self.device).requires_grad_()
        with use_kernels(self.kernels):
            out = fake_quantize(x)
            out.square().sum().backward()
        assert_same_bits(out.detach().cpu(), reference(x.detach(), Quantizer()))
        assert torch.equal(x.grad, 2 * out.detach())


class NoiseCases:
    """Noise and fingerprints in one launch, on some device."""

    device: str

    @pytest.mark.parametrize(
        "shape", [(1,), (16,), (37,), (3, 64), (50, 33), (2, 3, 20), (1100,), ()]
    )
    def test_noise_is_drawn_as_operations_draw_it(self, shape) -> None:
        from metis_hf.numerics.kernels import triton_noise

        for data in (3, -(2**31)):
            key = noise.Key(4, torch.tensor(data, dtype=torch.int32)).fold(2)
            there = on(self.device, key)
            drawn = triton_noise.uniform(torch.Size(shape), there, torch.device(self.device))
            assert drawn.shape == torch.Size(shape)
            assert torch.equal(drawn.cpu(), noise.uniform(shape, key))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "shape", [(), (1,), (255,), (256,), (257,), (511,), (512,), (70, 41), (300, 300)]
    )
    def test_fingerprints_are_those_of_operations(self, shape, dtype) -> None:
        from metis_hf.numerics.kernels import triton_noise

        x = torch.randn(shape, generator=seeded(0)).to(dtype)
        found = triton_noise.fingerprint(x.to(self.device))
        assert found.dtype is torch.int32
        assert torch.equal(found.cpu(), noise.fingerprint(x))
        if x.dim() > 1:
            turned = triton_noise.fingerprint(x.to(self.device).T)
            assert torch.equal(turned.cpu(), noise.fingerprint(x.T))
        x.view(-1)[0] = -float("inf")
        assert not torch.equal(triton_noise.fingerprint(x.to(self.device)), found)


class TestInterpreter(Cases):
    kernels = "triton"
    device = "cpu"


@settings(max_examples=30, derandomize=True)
@given(tensors(BY_HAND))
def test_any_tensor(case) -> None:
    x, quantizer, dim = case
    if (quantizer.tile is SQUARE and x.dim() < 2) or not has_form(x, quantizer.tile, dim):
        return
    check("triton", x, quantizer, dim=dim, dtype=x.dtype)


def test_only_where_they_are_asked_for(monkeypatch) -> None:
    """And only for what they cover."""
    ran = []
    backend = choice.triton_backend()
    whole = backend.fake_quantize

    def count(*args, **options):
        ran.append(1)
        return whole(*args, **options)

    monkeypatch.setattr(backend, "fake_quantize", count)
    x, quantizer = torch.zeros(16, 16), Quantizer()
    for kernels_in_force, wanted in ((None, 0), ("triton", 1)):
        with use_kernels(kernels_in_force):
            quantizer(x)
        assert len(ran) == wanted
    with use_kernels("triton"):
        Quantizer("mxfp4")(x)
    assert len(ran) == 1
    backend = choice.triton_backend()
    assert backend.missing(torch.device("cpu")) is None
    assert "CUDA" in str(backend.missing(torch.device("meta")))


class TestNoiseInInterpreter(NoiseCases):
    device = "cpu"
