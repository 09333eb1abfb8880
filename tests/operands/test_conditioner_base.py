"""What a conditioner has by its base class alone, and what a small one of one's own can do."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from layers.layer_tools import Halved, layer_of

from metis_hf.layers.make import convert_linear
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import Packed
from metis_hf.operands import (
    IDENTITY,
    AroundQuantizer,
    ChannelAffine,
    Channels,
    Clamped,
    Conditioner,
    FullHadamard,
    Hadamard,
    HotChannels,
    Identity,
    MeanRemoved,
    Operand,
    PerChannel,
    RandomHadamard,
    Requantized,
    Spectral,
)
from metis_hf.operands.conditioners.mean import row_mean
from metis_hf.operands.conditioners.static_scale import GivenScale
from metis_hf.schemes import Scheme
from metis_hf.schemes.parts import in_mode

KEY = Key(3, torch.tensor(7, dtype=torch.int32))
STOCHASTIC = Quantizer(rounding="stochastic", scale_rounding="up")


@dataclass(frozen=True)
class Cubed(AroundQuantizer):
    """A transform of one's own that pads, as rotations do."""

    def forward(self, x, *, dim):
        return torch.cat([x**3, torch.ones_like(x[:1])]) if dim == 0 else x**3

    def inverse(self, x, *, dim):
        return x.sign() * x.abs() ** (1 / 3)

    def transformed_shape(self, shape, *, dim):
        return (shape[0] + 1, shape[1]) if dim == 0 else shape


def matrix(rows=37, columns=70):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def test_a_call_is_needed():
    with pytest.raises(TypeError, match="__call__"):
        Conditioner()


def test_a_conditioner_without_a_hash_is_refused():
    @dataclass
    class Thawed(AroundQuantizer):
        """As `@dataclass` alone makes it."""

    with pytest.raises(TypeError, match=r"Thawed is not hashable.*@dataclass\(frozen=True\)"):
        Operand(STOCHASTIC, Thawed())


class TestDefaults:
    def test_nothing_but_a_call(self):
        conditioner, x = Halved(), matrix()
        options = {"dim": -1, "key": KEY}
        x_hat = conditioner(x, STOCHASTIC, **options)
        found, low = conditioner.with_factors(x, STOCHASTIC, **options)
        assert low is None
        assert torch.equal(found, x_hat)
        (part,) = conditioner.parts(x, STOCHASTIC, **options)
        assert part.before is x
        assert torch.equal(part.after, x_hat)
        assert conditioner.bind(object()) is conditioner
        assert conditioner.weight_gradient(x, matrix(), STOCHASTIC) is x
        said = conditioner.is_direct, conditioner.uses_row_mask, conditioner.needs_state
        assert (*said, conditioner.draws) == (False, False, False, False)

    def test_no_codes(self):
        conditioner, x = Halved(), matrix()
        assert not conditioner.has_codes
        assert not Operand(STOCHASTIC, conditioner).has_codes(x)
        with pytest.raises(NotImplementedError, match="Halved has no codes"):
            conditioner.encode(x, STOCHASTIC, dim=-1, key=KEY)
        with pytest.raises(NotImplementedError, match="Halved has no codes"):
            conditioner.decode(None, STOCHASTIC, dim=-1, shape=(37, 70))

    @pytest.mark.parametrize("conditioner", [Halved(), Cubed()], ids=repr)
    def test_it_trains_and_can_be_planned(self, conditioner):
        """A layer takes it for every operand; its gradient is that of the operands it makes."""
        _, layer = layer_of("nvfp4-rne", i=64, o=48, bias=False)
        operand = Operand(Quantizer(), conditioner)
        layer.scheme = Scheme(operand, operand, operand)
        x, dy = matrix(40, 64).requires_grad_(), matrix(40, 48)
        layer(x).backward(dy)
        x_hat, w_hat, dy_hat = (
            operand(m.detach(), dim=-1, key=KEY, dtype=torch.float32).values
            for m in (x, layer.weight, dy)
        )
        torch.testing.assert_close(x.grad, dy_hat @ w_hat, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.weight.grad, dy_hat.T @ x_hat, rtol=1e-5, atol=1e-5)


class TestAroundQuantizer:
    @pytest.mark.parametrize("dim", [-1, 0])
    def test_definition_and_codes(self, dim):
        conditioner = Cubed()
        inputs = (matrix(), matrix().bfloat16(), matrix().double())
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        for x, dtype in itertools.product(inputs, dtypes):
            wide = x.double() if x.dtype is torch.float64 else x.float()
            transformed = conditioner.forward(wide, dim=dim)
            quantized = STOCHASTIC(transformed, dim=dim, key=KEY)
            expected = conditioner.inverse(quantized, dim=dim).to(dtype)
            found = conditioner(x, STOCHASTIC, dim=dim, key=KEY, dtype=dtype)
            assert found.dtype is dtype
            assert torch.equal(found, expected)
            ((name, before, after),) = conditioner.parts(x, STOCHASTIC, dim=dim, key=KEY)
            assert name == "transformed"
            assert torch.equal(before, transformed)
            assert torch.equal(after, quantized)
            assert conditioner.has_codes
            encoded = conditioner.encode(x, STOCHASTIC, dim=dim, key=KEY)
            assert len(encoded.tensors) == len(Packed._fields)
            decoded = conditioner.decode(
                encoded, STOCHASTIC, dim=dim, shape=tuple(x.shape), dtype=dtype
            )
            assert torch.equal(decoded, expected)

    def test_padding_that_is_not_declared_is_refused(self):
        """`decode` would read the codes of a padded matrix as those of another shape."""

        @dataclass(frozen=True)
        class Undeclared(Cubed):
            transformed_shape = AroundQuantizer.transformed_shape

        message = (
            r"Undeclared.forward turns a matrix of shape \(37, 70\) into \(38, 70\).*override trans"
        )
        with pytest.raises(ValueError, match=message):
            Undeclared().encode(matrix(), STOCHASTIC, dim=0, key=KEY)
        Undeclared().encode(matrix(), STOCHASTIC, dim=-1, key=KEY)


class TestDirect:
    """A GEMM in bf16 applies the tensor scale itself where the quantizer is all there is."""

    def test_scale_apart(self):
        class Named(Identity):
            """Another name."""

        assert Named().has_codes
        directly = ((IDENTITY, True), (Named(), True), (Hadamard(), False), (PerChannel(), False))
        for conditioner, apart in directly:
            operand = Operand(Quantizer(), conditioner)
            found = operand(matrix(), dim=-1, key=KEY, dtype=torch.bfloat16)
            assert (found.scale is not None) == apart


class TestState:
    def test_operands_bind(self):
        channels = Channels(torch.full((70,), 2.0), torch.ones(70))
        for weight, scale, shift in ((False, 2.0, 1.0), (True, 0.5, None)):
            bound = Operand(Quantizer(), PerChannel(weight=weight)).bind(channels).conditioner
            assert isinstance(bound, ChannelAffine)
            assert bound.scale.unique().tolist() == [scale]
            assert (None if bound.shift is None else bound.shift.unique().tolist()[0]) == shift

    def test_unbound_it_is_the_quantizer(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = matrix().to(dtype)
            options = {"dim": -1, "key": KEY, "dtype": dtype}
            assert torch.equal(PerChannel()(x, STOCHASTIC, **options), STOCHASTIC(x, **options))

    @pytest.mark.parametrize(("around", "held"), [(MeanRemoved, "inner"), (Requantized, "second")])
    def test_what_holds_another_asks_it(self, around, held):
        assert around(Hadamard()).has_codes
        assert not around(Halved()).has_codes
        bound = around(PerChannel()).bind(Channels(torch.full((70,), 2.0)))
        assert isinstance(getattr(bound, held), ChannelAffine)
        assert around(FullHadamard(5)).turned() == around(FullHadamard(5, across=True))

    def test_what_quantizes_twice_passes_the_row_mask_on(self):
        assert not Requantized(Hadamard()).uses_row_mask
        conditioner, mask = Requantized(MeanRemoved()), torch.ones(37, dtype=torch.bool)
        assert conditioner.uses_row_mask
        mask[30:] = False
        x, quantizer = matrix(), Quantizer()
        options = {"dim": -1, "key": KEY, "row_mask": mask}
        first = quantizer(x)
        found = conditioner(x, quantizer, **options)
        assert torch.equal(found, MeanRemoved()(first, quantizer, **options))
        assert not torch.equal(found, conditioner(x, quantizer, dim=-1, key=KEY))
        assert torch.equal(conditioner.parts(x, quantizer, **options)[-1].after,
                           MeanRemoved().parts(first, quantizer, **options)[-1].after)  # fmt: skip

    def test_what_is_left_of_a_mean_knows_the_row_mask(self):
        """So that a split of it samples no padding."""
        conditioner, x, mask = MeanRemoved(Spectral(4)), matrix(), torch.arange(37) < 30
        options = {"dim": -1, "row_mask": mask}
        mean = row_mean(x, mask)
        rest = Spectral(4)(x - mean, STOCHASTIC, key=KEY.fold(3), **options)
        wanted = rest + STOCHASTIC(mean, key=KEY.fold(1))
        assert torch.equal(conditioner(x, STOCHASTIC, key=KEY, **options), wanted)
        encoded = conditioner.encode(x, STOCHASTIC, key=KEY, **options)
        decoded = conditioner.decode(encoded, STOCHASTIC, dim=-1, shape=(37, 70))
        assert torch.equal(decoded, wanted)
        parts = conditioner.parts(x, STOCHASTIC, key=KEY, **options)
        inner = Spectral(4).parts(x - mean, STOCHASTIC, key=KEY.fold(3), **options)
        assert torch.equal(parts[-1].after, inner[-1].after)

    def test_who_needs_one(self):
        """What analyses of single tensors refuse to measure."""
        for alone in (PerChannel(), RandomHadamard()):
            for conditioner in (alone, MeanRemoved(alone), Requantized(alone)):
                assert conditioner.needs_state
        for conditioner in (IDENTITY, Hadamard(), MeanRemoved(), HotChannels()):
            assert not conditioner.needs_state


def test_who_draws():
    """By the key alone: the quantizer rounds to nearest."""
    x, quantizer = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), Quantizer()
    keys = [Key(3, torch.tensor(n, dtype=torch.int32)) for n in (7, 8)]
    drawing = (RandomHadamard(), Spectral(4))
    others = (IDENTITY, Hadamard(), HotChannels(), Clamped(0.9), FullHadamard(5), MeanRemoved())
    held = [around(each) for around in (MeanRemoved, Requantized) for each in drawing]
    for conditioner in (*others, *drawing, *held, Requantized(Hadamard())):
        first, second = (conditioner(x, quantizer, dim=-1, key=key) for key in keys)
        assert torch.equal(first, second) == (not conditioner.draws), conditioner
        assert conditioner.draws == (conditioner in drawing or conditioner in held)
        assert Operand(quantizer, conditioner).draws == conditioner.draws
        assert Operand(STOCHASTIC, conditioner).draws
        assert not Operand(None, conditioner).draws


def test_a_given_scale_is_the_tensor_s_own():
    """In BF16 too, where a GEMM takes the scale apart."""
    x, quantizer = matrix().bfloat16(), Quantizer()
    options = {"dim": -1, "key": KEY, "dtype": torch.bfloat16}
    given = Operand(quantizer, GivenScale(x.abs().amax().float()))(x, **options)
    own = Operand(quantizer, IDENTITY)(x, **options)
    assert torch.equal(given.values, own.values)
    assert torch.equal(given.scale, own.scale)


def test_layers_of_a_conditioner_with_a_row_mask_ask_for_it():
    """`uses_row_mask` of the class decides; nothing else is looked at."""
    linear, layer = layer_of("nvfp4", i=64, o=48)
    assert not layer.scheme.samples_rows

    @dataclass(frozen=True)
    class Masked(Halved):
        uses_row_mask = True

    quantizer = layer.scheme.fprop_input.quantizer
    scheme = replace(layer.scheme, fprop_input=Operand(quantizer, Masked()))
    assert scheme.samples_rows
    assert convert_linear(linear, layer.config.replace(scheme="mean"), name="x").scheme.samples_rows


@dataclass(frozen=True)
class Peaked(AroundQuantizer):
    """Divided by a number of the matrix, which only `for_matrix` knows."""

    peak: torch.Tensor | float = 1.0

    def for_matrix(self, x, key):
        return replace(self, peak=x.abs().amax() + 1)

    def forward(self, x, *, dim):
        return x / self.peak

    def inverse(self, x, *, dim):
        return x * self.peak


def test_a_transform_of_the_matrix_is_stored_in_codes_only_where_decode_knows_it():
    """Else a call that saves its input would transform it back by other numbers."""
    assert not Peaked().has_codes
    assert RandomHadamard().has_codes
    assert Hadamard().has_codes
    scheme = Scheme(fprop_input=Operand(Quantizer(), Peaked()))
    _, layer = layer_of("nvfp4", i=32, o=16)
    layer.scheme = scheme
    x = torch.randn(8, 32)
    with torch.no_grad():
        expected = layer(x)
    assert torch.equal(layer(x.requires_grad_()), expected)


@pytest.mark.parametrize("mode", ["shared", "contraction"])
def test_a_padded_copy_that_two_gemms_share_has_gradients_of_the_layers_shape(mode):
    """Blocks of 16 pad a width of 24, also where it is an output of dgrad and wgrad."""
    forward = Quantizer()
    scheme = in_mode(
        Scheme(
            fprop_input=Operand(forward, Hadamard()),
            fprop_weight=Operand(forward, Hadamard()),
            dgrad_grad_output=Operand(STOCHASTIC),
        ),
        mode,
    )
    linear, layer = layer_of("nvfp4", i=24, o=32)
    layer.scheme = scheme
    x, dy = torch.randn(64, 24, requires_grad=True), torch.randn(64, 32)
    wanted = torch.autograd.grad(linear(x), [x, linear.weight], dy)
    found = torch.autograd.grad(layer(x), [x, layer.weight], dy)
    for own, exact in zip(found, wanted):
        assert own.shape == exact.shape
        assert float((own - exact).norm() / exact.norm()) < 0.35


@dataclass(frozen=True)
class HalvedIdentity(Identity):
    """Overrides the call, and not what is stored."""

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32):
        return super().__call__(x, quantizer, dim=dim, key=key, dtype=dtype) / 2


@dataclass(frozen=True)
class HalvedRotation(Hadamard):
    """The same around a transform."""

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32):
        return super().__call__(x, quantizer, dim=dim, key=key, dtype=dtype) / 2


@pytest.mark.parametrize(
    ("conditioner", "dtype"),
    [(HalvedIdentity(), torch.bfloat16), (HalvedRotation(), torch.float32)],
)
def test_a_call_that_overrides_what_is_stored_counts(conditioner, dtype):
    """With gradients, where codes are saved, and without; in BF16, too."""
    _, layer = layer_of("nvfp4-rne", i=32, o=16)
    layer.to(dtype)
    layer.bias.data.zero_()
    x = torch.randn(8, 32, dtype=dtype)
    with torch.no_grad():
        whole = layer(x)
        layer.scheme = Scheme(fprop_input=Operand(Quantizer(), conditioner))
        halved = layer(x)
    assert (halved - whole / 2).norm() < 0.2 * whole.norm()
    assert torch.equal(layer(x.requires_grad_()), halved)
