"""What a scheme is: an operand for each place in the three GEMMs, and how the weight is stored.

Schemes register by name; tests, command-line choices and tables read the registry.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from metis_hf.config import MetisConfig
from metis_hf.operands import HIGH_PRECISION, Operand
from metis_hf.operands.conditioners.spectral import Spectral


class Role(enum.IntEnum):
    """The six places a tensor takes in the GEMMs of a linear layer."""

    FPROP_INPUT = 0
    FPROP_WEIGHT = 1
    DGRAD_GRAD_OUTPUT = 2
    DGRAD_WEIGHT = 3
    WGRAD_GRAD_OUTPUT = 4
    WGRAD_INPUT = 5


_REUSED = {
    Role.DGRAD_WEIGHT: Role.FPROP_WEIGHT,
    Role.WGRAD_GRAD_OUTPUT: Role.DGRAD_GRAD_OUTPUT,
    Role.WGRAD_INPUT: Role.FPROP_INPUT,
}


class LayerState(Protocol):
    """What a scheme keeps of a layer beside its weight, in buffers that are saved with the model.

    Every call of the layer takes `freeze`'s result into its plan, and the plan gives it to each
    conditioner that has `bind`: forward and backward see the same. A recomputed forward pass, and
    further micro-batches of a step, must get what the first one got. So `update` may only add up
    (idempotently) what later steps will use; it knows a new step by `mark`, which is equal as long
    as the weight is.
    """

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        """The buffers by name, as they are before the first call."""

    def update(self, buffers: Mapping[str, Tensor], x: Tensor, mark: Tensor) -> None:
        """Takes note of the input x [t i] of a call in training, in place, without host sync."""

    def freeze(self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor) -> Any:
        """What a call with input x [t i] takes for weight [o i]; None: no operand needs any."""


@dataclass(frozen=True)
class Scheme:
    """Six operands; None in the last three reuses the quantized copy of the first three.

    Args:
        fprop_input: x, blocks along in_features.
        fprop_weight: w, blocks along in_features.
        dgrad_grad_output: dy, blocks along out_features.
        dgrad_weight: w, blocks along out_features; None: the very values of fprop.
        wgrad_grad_output: dy, blocks along tokens; None: the very values of dgrad.
        wgrad_input: x, blocks along tokens; None: the very values of fprop.
        split_weight: store the weight as u, s, vh and residual.
        compensated: the weight's residual makes up for the rounding of its factors.
        unit_rms: store u and vh with entries of unit RMS rather than as unit vectors; see
            `weights.SplitWeight`.
        exact_factors: the factors of a split weight stay in high precision.
        corrected: the operands of which the GEMM adds what rounding took off them in the dominant
            directions of the other operand, in FP4; see `corrections`. The other one must be split.
            Not WGRAD_INPUT: backward does not have x.
        clipped_weight: the weight is clipped before it is quantized, by trained strengths; see
            `weights.ClippedWeight`.
        state: what it keeps of a layer from step to step, if anything.

    Attributes:
        is_high_precision: no operand is quantized: a plain linear layer.
        samples_rows: an operand depends on which rows are padding: the sampled rows of a subspace,
            or a mean, must not be.
    """

    fprop_input: Operand = HIGH_PRECISION
    fprop_weight: Operand = HIGH_PRECISION
    dgrad_grad_output: Operand = HIGH_PRECISION
    dgrad_weight: Operand | None = None
    wgrad_grad_output: Operand | None = None
    wgrad_input: Operand | None = None
    split_weight: bool = False
    compensated: bool = True
    unit_rms: bool = False
    exact_factors: bool = False
    corrected: frozenset[Role] = frozenset()
    clipped_weight: bool = False
    state: LayerState | None = None
    is_high_precision: bool = field(init=False, repr=False, compare=False)
    samples_rows: bool = field(init=False, repr=False, compare=False)

    @property
    def splits_weight(self) -> bool:
        """Whether the weight is split: as it is stored, or anew whenever fprop quantizes it."""
        return self.split_weight or isinstance(self.fprop_weight.conditioner, Spectral)

    def _is_split(self, role: Role) -> bool:
        if self.split_weight and role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT):
            return True
        return isinstance(self.resolve(role)[1].conditioner, Spectral)

    def operand(self, role: Role) -> Operand | None:
        """The operand at `role`, None if another's copy is reused there."""
        return getattr(self, role.name.lower())

    def reuses(self, role: Role) -> bool:
        """Whether `role` takes the quantized copy made for an earlier GEMM."""
        return self.operand(role) is None

    def resolve(self, role: Role) -> tuple[Role, Operand]:
        """The role whose copy is used at `role`, and its operand."""
        operand = self.operand(role)
        if operand is None:
            role = _REUSED[role]
            operand = self.operand(role)
        assert operand is not None
        return role, operand

    def __post_init__(self) -> None:
        # Read at every forward call. A cached property would break torch.compile's graph there:
        # it takes a lock in Python 3.11.
        operands = [self.resolve(role)[1] for role in Role]
        high = all(operand.quantizer is None for operand in operands)
        samples = any(getattr(op.conditioner, "uses_row_mask", False) for op in operands)
        for role in self.corrected:
            if role is Role.WGRAD_INPUT or not self._is_split(Role(role ^ 1)):
                raise ValueError(
                    f"{role.name} cannot be corrected: the GEMM's other operand must be split, and "
                    "backward knows no input beside the quantized one"
                )
        object.__setattr__(self, "samples_rows", samples)
        object.__setattr__(self, "is_high_precision", high)

    def deterministic(self) -> Scheme:
        """The same with nearest rounding everywhere: what a layer in eval mode uses."""
        changes: dict[str, Any] = {}
        for role in Role:
            operand = self.operand(role)
            if operand is not None and operand.quantizer is not None:
                quantizer = operand.quantizer.deterministic()
                changes[role.name.lower()] = replace(operand, quantizer=quantizer)
        return replace(self, **changes)

    def storing(self, *, split: bool) -> Scheme:
        """The same with weights stored as u, s, vh and residual, or as one matrix.

        Factors and residual are then quantized as the matrix was. What conditions or clips the
        matrix does not apply to them, and the other way round.
        """
        if not split:
            return replace(self, split_weight=False, unit_rms=False, exact_factors=False)
        dgrad = self.dgrad_weight
        return replace(
            self,
            fprop_weight=Operand(self.fprop_weight.quantizer),
            dgrad_weight=None if dgrad is None else Operand(dgrad.quantizer),
            split_weight=True,
            unit_rms=self.compensated,
            clipped_weight=False,
        )

    def in_high_precision(self, passes: Sequence[str]) -> Scheme:
        """The same with the GEMMs of some passes unquantized: any of "forward", "backward".

        What one pass gives up the other keeps: a quantized operand that was shared with it is then
        quantized for the other pass alone. So does a weight that is quantized in the forward pass
        keep its way from dL/dw_hat to dL/dw: trained clipping, or a gradient estimator.
        """
        scheme = self
        if "backward" in passes:
            roles = [role for role in Role if role >= Role.DGRAD_GRAD_OUTPUT]
            changes: dict[str, Any] = {role.name.lower(): HIGH_PRECISION for role in roles}
            scheme = replace(scheme, **changes, corrected=scheme.corrected.difference(roles))
        if "forward" in passes:
            scheme = replace(
                scheme,
                fprop_input=HIGH_PRECISION,
                fprop_weight=HIGH_PRECISION,
                dgrad_weight=scheme.resolve(Role.DGRAD_WEIGHT)[1],
                wgrad_input=scheme.resolve(Role.WGRAD_INPUT)[1],
                corrected=scheme.corrected - {Role.FPROP_INPUT, Role.FPROP_WEIGHT},
            )
        return scheme


@dataclass(frozen=True)
class SchemeInfo:
    """A registered scheme: its builder and what a table says of it."""

    name: str
    summary: str
    source: str
    rank_multiple: int | None
    build: Callable[[MetisConfig, int], Scheme]


CONTROL = "bf16"  # the scheme that quantizes nothing
RANK_MULTIPLE = 32  # of ranks: two blocks; docs/method.md
_REGISTRY: dict[str, SchemeInfo] = {}


def register_scheme(
    name: str, *, summary: str, source: str, rank_multiple: int | None = None
) -> Callable[[Callable[[MetisConfig, int], Scheme]], Callable[[MetisConfig, int], Scheme]]:
    """Registers a function (config, rank) -> Scheme under `name`.

    Args:
        name: what `MetisConfig.scheme` says.
        summary: one line for tables.
        source: arXiv id, specification or code base.
        rank_multiple: what the rank is rounded up to unless the config says; None for schemes
            that split nothing of their own.

    Raises:
        ValueError: the name is taken.
    """

    def register(build):
        if name in _REGISTRY:
            raise ValueError(f"a scheme named {name!r} is already registered")
        _REGISTRY[name] = SchemeInfo(name, summary, source, rank_multiple, build)
        return build

    return register


def scheme_names() -> list[str]:
    """Registered names, in order of registration."""
    return list(_REGISTRY)


def scheme_info(name: str) -> SchemeInfo:
    """Looks a scheme up.

    Raises:
        ValueError: not registered; the message lists the names and the nearest one.
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        near = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"scheme {name!r} is not registered{hint} Registered: {', '.join(_REGISTRY)}. "
            "A scheme of your own must be registered before the model is converted or loaded."
        ) from None


def kept_directions(config: MetisConfig, in_features: int, out_features: int) -> int:
    """rank, or rank_frac of a layer's smaller side, rounded up; before rank_multiple."""
    if config.rank is not None:
        return config.rank
    scaled = round(config.rank_frac * min(in_features, out_features) * 1e6)
    return -(-scaled // 10**6)  # ceil, immune to 0.1 * 30 > 3


def layer_rank(config: MetisConfig, in_features: int, out_features: int) -> int:
    """k of a layer: an absolute rank as it is, a share rounded up; at most the smaller side."""
    smaller = min(in_features, out_features)
    kept = kept_directions(config, in_features, out_features)
    if config.rank is not None:
        return min(smaller, kept)
    own = scheme_info(config.scheme).rank_multiple
    multiple = config.rank_multiple or own or (RANK_MULTIPLE if config.split_weight else 1)
    return min(smaller, -(-kept // multiple) * multiple)


def build_scheme(config: MetisConfig, in_features: int, out_features: int) -> Scheme:
    """The scheme of one layer."""
    info = scheme_info(config.scheme)
    scheme = info.build(config, layer_rank(config, in_features, out_features))
    if config.split_weight is not None and config.split_weight != scheme.split_weight:
        scheme = scheme.storing(split=config.split_weight)
    return scheme.in_high_precision(config.high_precision) if config.high_precision else scheme
