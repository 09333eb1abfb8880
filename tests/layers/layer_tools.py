"""Single layers for tests, and quantizers that stand in for the real ones."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from design import named, thinned
from torch import Tensor, nn

from metis_hf import MetisConfig, scheme_names
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.make import convert_linear
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer
from metis_hf.operands import Conditioner
from metis_hf.schemes import Role, Scheme

# The forward pass of a deployed model, trained with a backward pass in high precision.
DEPLOYED = {"w4a4", "w4a16"}
FP4_SCHEMES = [
    name for name in scheme_names() if not name.startswith("bf16") and name not in DEPLOYED
]
# Schemes that are defined by their copies per GEMM: operand_mode="shared" would be another scheme.
CONTRACTION_ONLY = {"nvidia", "four-over-six", "tetrajet2", "hot-channel", "quartet2"}
CONTRACTION_ONLY |= {"averis", "averis-hadamard", "ufp4", "mxfp4-hadamard", "if4", "mixfp4"}
CONTRACTION_ONLY |= {"nvidia-unbiased", "four-over-six-unbiased"}
# Every scheme in every mode that it has.
SCHEME_MODES = [
    (scheme, mode)
    for scheme in scheme_names()
    for mode in ("shared", "contraction")
    if not (scheme in CONTRACTION_ONLY and mode == "shared")
]
FP4_SCHEME_MODES = [pair for pair in SCHEME_MODES if pair[0] in FP4_SCHEMES]


def in_one_mode(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return every scheme in one of its modes, by turns: for what all modes have in common.

    In a full run it is every scheme in all of its modes.
    """
    modes: dict[str, list[str]] = {}
    for scheme, mode in pairs:
        modes.setdefault(scheme, []).append(mode)
    both = [scheme for scheme in modes if len(modes[scheme]) > 1]
    chosen = {scheme: modes[scheme][place % 2] for place, scheme in enumerate(both)}
    return thinned(pairs, lambda pair: chosen.get(pair[0], pair[1]) == pair[1])


PREFERRED = (MetisConfig().scheme, "nvfp4")  # the default, and the plainest
NEAREST = {"forward_rounding": "nearest", "backward_rounding": "nearest"}
STOCHASTIC = {"forward_rounding": "stochastic", "backward_rounding": "stochastic"}


def layer_of(
    scheme: str,
    mode: str | None = None,
    *,
    i=48,
    o=32,
    bias=True,
    dtype=torch.float32,
    name="layer",
    **changes,
) -> tuple[nn.Linear, MetisLayer]:
    """A linear layer, and the same one converted, in training mode."""
    linear = nn.Linear(i, o, bias=bias, dtype=dtype)
    config = MetisConfig(scheme=scheme, operand_mode=mode, **changes)
    return linear, convert_linear(copy.deepcopy(linear), config, name=name).train()


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """With a dominant direction and columns of different size, as in a network."""
    x = torch.randn(rows, columns) + 2 * torch.randn(rows, 1) * torch.randn(1, columns)
    return (x * torch.logspace(0, -1, columns)).to(dtype)


@functools.cache
def kind(scheme: str) -> tuple[object, ...]:
    """What whole models meet of a scheme, and whether it quantizes."""
    layer = layer_of(scheme)[1]
    state, masked = type(layer.scheme.state), layer.scheme.samples_rows
    return (repr(layer.weight_form), state, masked, scheme.startswith("bf16"))


def of_each_kind(schemes: Iterable[str]) -> list[str]:
    """Return one scheme of each kind: for what whole models and trainers meet of a scheme.

    That is how a layer stores its weight, what state it has beside, and whether it looks at the
    mask of tokens. What is quantized and how, tests of single layers see, with every scheme. One
    of `PREFERRED` stands for its kind, else the first. In a full run it is all schemes.
    """
    schemes = list(schemes)
    chosen: dict[tuple[object, ...], str] = {}
    for scheme in sorted(schemes, key=lambda scheme: scheme not in PREFERRED):
        chosen.setdefault(kind(scheme), scheme)
    return named(schemes, chosen.values())


@functools.cache
def structure(scheme: str, mode: str) -> tuple[object, ...]:
    """What a layer's code sees of a scheme: copies, conditioners, the weight's form, the state."""
    built = layer_of(scheme, mode)[1].scheme
    operands = []
    for role in Role:
        used, operand = built.resolve(role)
        conditioner = operand.conditioner
        inner = getattr(conditioner, "second", getattr(conditioner, "inner", None))
        quantized = operand.quantizer is not None
        operands.append((used, quantized, type(conditioner), type(inner)))
    form = built.weight
    exact = form.is_split and (form.compensated, form.exact_factors)
    return (*operands, type(form), exact, type(built.state), built.corrected)


def of_each_structure(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a scheme and mode of each structure: for what no format and no rounding decides.

    In a full run it is all of them.
    """
    pairs = list(pairs)
    chosen: dict[tuple[object, ...], tuple[str, str]] = {}
    for pair in pairs:
        chosen.setdefault(structure(*pair), pair)
    return named(pairs, chosen.values())


STRUCTURES = of_each_structure(in_one_mode(SCHEME_MODES))
FP4_STRUCTURES = of_each_structure(in_one_mode(FP4_SCHEME_MODES))


def with_quantizers(scheme: Scheme, stand_in: Callable) -> Scheme:
    """The scheme with every quantizer q replaced by stand_in(q)."""
    changes = {}
    for role in Role:
        operand = scheme.operand(role)
        if operand is not None and operand.quantizer is not None:
            changes[role.name.lower()] = replace(operand, quantizer=stand_in(operand.quantizer))
    return replace(scheme, **changes)


@dataclass(frozen=True)
class Exact:
    """A quantizer that changes nothing."""

    two_level: bool = False

    def __call__(self, x, *, minus=None, plus=None, **_):
        after = x if minus is None else x - minus
        return after if plus is None else after + plus

    def deterministic(self):
        return self


def with_exact_quantizers(scheme: Scheme) -> Scheme:
    return with_quantizers(scheme, lambda _: Exact())


@dataclass(frozen=True)
class Halved(Conditioner):
    """The least that a conditioner can have: nothing of codes."""

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32):
        return 2 * quantizer(x / 2, dim=dim, key=key, dtype=dtype)


@dataclass(frozen=True)
class Call:
    """One tensor that a layer quantized."""

    quantizer: Quantizer
    before: Tensor
    dim: int
    key: Key
    after: Tensor

    def repeats(self, other: Call) -> bool:
        """The same quantization over again, to the bit, rather than another copy."""
        return (
            (self.quantizer, self.dim, key_values(self.key))
            == (other.quantizer, other.dim, key_values(other.key))
            and torch.equal(self.before, other.before)
            and torch.equal(self.after, other.after)
        )


@dataclass(frozen=True)
class Recorder:
    """The real quantizer, which keeps a list of what it did."""

    quantizer: Quantizer
    calls: list[Call]

    def __call__(
        self, x, *, dim=-1, key=None, dtype=torch.float32, minus=None, plus=None, amax=None, **_
    ):
        before = x.detach().clone() if minus is None else x.detach() - minus
        after = self.quantizer(before, dim=dim, key=key, amax=amax)
        # The callers go on to work in place.
        self.calls.append(Call(self.quantizer, before, dim, key, after.clone()))
        return (after if plus is None else after + plus).to(dtype)

    def deterministic(self):
        """The real one: what is quantized again is no operand."""
        return self.quantizer.deterministic()


def record(layer: MetisLayer) -> list[Call]:
    """The list that the layer's quantizations (training mode, fp32) will be appended to."""
    calls: list[Call] = []
    layer.scheme = with_quantizers(layer.scheme, lambda q: Recorder(q, calls))
    return calls


def distinct(calls: list[Call]) -> list[Call]:
    """First occurrences only: a copy made again in the backward pass is the same copy."""
    kept: list[Call] = []
    for call in calls:
        if not any(call.repeats(other) for other in kept):
            kept.append(call)
    return kept


def key_values(key: Key) -> tuple[int, int | None]:
    """A noise key as plain numbers."""
    return key.static, None if key.data is None else int(key.data)
