"""Schemes: an operand for each place in the three GEMMs, and the form of the stored weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from metis_hf.numerics.scaling import OuterScale
from metis_hf.operands import (
    HIGH_PRECISION,
    HotChannels,
    Operand,
    Spectral,
    SplitWeight,
    StaticScale,
    WeightForm,
)
from metis_hf.operands.conditioners.kept_subspace import Reuse
from metis_hf.operands.weight_forms import DENSE, HIGH_PRECISION_BITS
from metis_hf.schemes.roles import Role, tensor_of
from metis_hf.schemes.states import LayerState
from metis_hf.schemes.subspaces import KeptSubspaces

_REUSED = {
    Role.DGRAD_WEIGHT: Role.FPROP_WEIGHT,
    Role.WGRAD_GRAD_OUTPUT: Role.DGRAD_GRAD_OUTPUT,
    Role.WGRAD_INPUT: Role.FPROP_INPUT,
}


@dataclass(frozen=True)
class Scheme:
    """Six operands; None in one of the last three reuses the copy of an earlier GEMM.

    Args:
        fprop_input: x, blocks along in_features.
        fprop_weight: w, blocks along in_features.
        dgrad_grad_output: dy, blocks along out_features.
        dgrad_weight: w, blocks along out_features; None: the same values as in fprop.
        wgrad_grad_output: dy, blocks along tokens; None: the same values as in dgrad.
        wgrad_input: x, blocks along tokens; None: the same values as in fprop.
        weight: how the weight is stored: as one matrix, clipped, or split.
        corrected: operands whose rounding errors the GEMM adds back, in FP4, along the dominant
            directions of the other operand; see `corrections`. The other operand must be split. Not
            WGRAD_INPUT, since backward does not have x.
        state: per-layer state that the scheme keeps over steps, if any.
        rank: of the layer's splits; splits of output gradients may have less (`directions`).
            `build_scheme` sets it, whether or not the scheme splits.

    Attributes:
        is_high_precision: no operand is quantized: a plain linear layer.
        samples_rows: an operand depends on which rows are padding, such as a sampled subspace or a
            mean.
    """

    fprop_input: Operand = HIGH_PRECISION
    fprop_weight: Operand = HIGH_PRECISION
    dgrad_grad_output: Operand = HIGH_PRECISION
    dgrad_weight: Operand | None = None
    wgrad_grad_output: Operand | None = None
    wgrad_input: Operand | None = None
    weight: WeightForm = DENSE
    corrected: frozenset[Role] = frozenset()
    state: LayerState | None = None
    rank: int = 0
    # Set on each instance, but not fields: torch 2.8 rebuilds a traced scheme from all its fields.
    is_high_precision: ClassVar[bool]
    samples_rows: ClassVar[bool]

    @property
    def splits_weight(self) -> bool:
        """Return whether the weight is split: in storage, or when fprop quantizes it."""
        return self.weight.is_split or isinstance(self.fprop_weight.conditioner, Spectral)

    @property
    def multiplies_factors(self) -> bool:
        """Return whether stored factors are part of the layer's GEMMs, not of a side branch."""
        return isinstance(self.weight, SplitWeight) and not self.weight.side_branch

    @property
    def splits(self) -> bool:
        """Return whether any operand is split, so that `rank` matters."""
        return any(self.directions(role) for role in Role)

    def weight_bits(self, out_features: int, in_features: int) -> float:
        """Return the bits per element of w_hat in fprop, as FP4 units read it.

        Low-rank factors and the second copy of patched channels are included. FP4 units need a
        block scale for each row, so the scale of a square tile counts once per row; this package
        stores it once, which is the figure of `metis-hf schemes`.
        """
        quantizer, shape = self.fprop_weight.quantizer, (out_features, in_features)
        bits = HIGH_PRECISION_BITS if quantizer is None else quantizer.fmt.bits_per_element
        conditioner = self.fprop_weight.conditioner
        if quantizer is not None and isinstance(conditioner, HotChannels):
            bits *= 1 + conditioner.channels(in_features) / in_features
        split = SplitWeight(self.rank) if not self.weight.is_split else self.weight
        return bits + (split.factor_bits(shape, bits) if self.splits_weight else 0.0)

    def directions(self, role: Role) -> int:
        """Return the rank of the split at `role`; 0: no split."""
        if self.multiplies_factors and role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT):
            return self.weight.rank or 0
        conditioner = self.resolve(role)[1].conditioner
        return conditioner.rank if isinstance(conditioner, Spectral) else 0

    def operand(self, role: Role) -> Operand | None:
        """Return the operand at `role`; None if `role` reuses another copy."""
        return getattr(self, role.name.lower())

    def reuses(self, role: Role) -> bool:
        """Return whether `role` takes the quantized copy made for an earlier GEMM."""
        return self.operand(role) is None

    def resolve(self, role: Role) -> tuple[Role, Operand]:
        """Return the role whose copy is used at `role`, and its operand."""
        operand = self.operand(role)
        if operand is None:
            role = _REUSED[role]
            operand = self.operand(role)
        assert operand is not None
        return role, operand

    def __post_init__(self) -> None:
        for role in Role:
            operand = self.operand(role)
            if operand is not None and not isinstance(operand, Operand):
                raise TypeError(
                    f"{role.name.lower()} of a scheme is {operand!r}; give an Operand, such as "
                    "Operand(quantizer)"
                )
        # Set here because every forward call reads them: a cached property would break
        # torch.compile's graph, since it takes a lock in Python 3.11.
        operands = [self.resolve(role)[1] for role in Role]
        high = all(operand.quantizer is None for operand in operands)
        samples = any(op.conditioner.uses_row_mask for op in operands)
        for role in self.corrected:
            if role is Role.WGRAD_INPUT or not self.directions(Role(role ^ 1)):
                raise ValueError(
                    f"{role.name} cannot be corrected: the GEMM's other operand must be split, and "
                    "the backward pass has only the quantized input"
                )
        object.__setattr__(self, "samples_rows", samples)
        object.__setattr__(self, "is_high_precision", high)

    @property
    def forward_is_random(self) -> bool:
        """Return whether training rounds the forward pass with noise, which evaluation does not."""
        operands = [self.resolve(role)[1] for role in (Role.FPROP_INPUT, Role.FPROP_WEIGHT)]
        return any(op.quantizer is not None and op.quantizer.needs_noise for op in operands)

    def deterministic(self) -> Scheme:
        """Return the scheme of eval mode: the same with nearest rounding everywhere."""
        changes: dict[str, Any] = {}
        for role in Role:
            operand = self.operand(role)
            if operand is not None and operand.quantizer is not None:
                operand = replace(operand, quantizer=operand.quantizer.deterministic())
                if isinstance(operand.conditioner, Spectral):  # no kept subspace
                    operand = replace(operand, conditioner=replace(operand.conditioner, reuse=None))
                changes[role.name.lower()] = operand
        return replace(self, **changes)

    def storing(self, *, split: bool | str) -> Scheme:
        """Return the scheme with weights stored as u, s, vh and residual, or as one matrix.

        With `split=True`, factors and residual have the matrix's quantizer, but not its conditioner
        or clipping. With "side-branch", the residual alone is quantized, with the matrix's
        quantizer and conditioner, and the factors read the unquantized input in parallel with the
        residual's GEMM.
        """
        if split == "side-branch":
            corrected = self.corrected
            if self.multiplies_factors:
                corrected = corrected - {Role.FPROP_INPUT, Role.DGRAD_GRAD_OUTPUT}
            return replace(self, corrected=corrected, weight=SplitWeight.beside_gemm(self.rank))
        if split == (self.multiplies_factors if split else self.weight.is_split):
            return self
        if not split:
            return replace(self, weight=DENSE)
        dgrad = self.dgrad_weight
        return replace(
            self,
            fprop_weight=Operand(self.fprop_weight.quantizer),
            dgrad_weight=None if dgrad is None else Operand(dgrad.quantizer),
            weight=SplitWeight(self.rank, unit_rms=True),
        )

    def with_token_scales(self) -> Scheme:
        """Return the scheme with one outer scale for each token of inputs and output gradients.

        Weights, and copies with blocks along tokens, keep one per tensor: a GEMM that contracts
        tokens cannot apply a token's scale to its output.

        Raises:
            ValueError: the weight is quantized but neither inputs nor gradients are, the input has
                a static scale, or the format has no scale above its block scales.
        """
        if self.is_high_precision:
            return self
        changes: dict[str, Any] = {}
        for role in (role for role in Role if role not in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)):
            operand = self.operand(role)
            if operand is None or operand.quantizer is None:
                continue
            if isinstance(operand.conditioner, StaticScale):
                raise ValueError("its inputs have a static scale, which is set by calibration")
            quantizer = replace(operand.quantizer, outer_scale=OuterScale.TOKEN)
            changes[role.name.lower()] = replace(operand, quantizer=quantizer)
        if not changes:
            raise ValueError("it quantizes neither inputs nor output gradients")
        return replace(self, **changes)

    def with_kept_subspaces(self, interval: int, refinements: int) -> Scheme:
        """Return the scheme with subspaces of inputs and output gradients kept over some steps.

        A scheme that splits neither is returned unchanged.

        Args:
            interval: optimizer steps from one search for a subspace to the next.
            refinements: multiplications of a kept subspace by each batch's Gram matrix.

        Raises:
            ValueError: the scheme keeps another state.
        """
        changes: dict[str, Any] = {}
        ranks = {"input": 0, "grad_output": 0}
        for role in (role for role in Role if role not in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)):
            operand = self.operand(role)
            if operand is not None and isinstance(split := operand.conditioner, Spectral):
                tensor = tensor_of(role)
                split = replace(split, reuse=Reuse(tensor, interval, refinements))
                changes[role.name.lower()] = replace(operand, conditioner=split)
                ranks[tensor] = split.rank
        if not changes:
            return self
        if self.state is not None:
            raise ValueError(f"it already keeps other state ({type(self.state).__name__})")
        return replace(self, **changes, state=KeptSubspaces(interval, refinements, **ranks))

    def _own_copy(self, role: Role) -> Operand:
        """Return the operand at a role, as a separate copy if the role reuses another's.

        If the GEMM's other operand is not quantized, the separate copy is not quantized either.
        """
        used, operand = self.resolve(role)
        if used is role:
            return operand
        if self.resolve(Role(role ^ 1))[1].quantizer is None:
            return HIGH_PRECISION
        return replace(operand, conditioner=operand.conditioner.turned())

    def in_high_precision(self, passes: Sequence[str]) -> Scheme:
        """Return the scheme with some passes unquantized: any of "forward", "backward".

        A copy that both passes share is then quantized for the other pass alone, if its GEMM's
        other operand is quantized too, in blocks along the dimension that this GEMM contracts.
        Rotations of a whole dimension rotate the same dimension as before; `Hadamard` and
        `RandomHadamard`, which rotate in blocks, follow the contraction. If the forward pass
        quantizes the weight, trained clipping or a gradient estimator still maps dL/dw_hat to
        dL/dw.
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
                dgrad_weight=scheme._own_copy(Role.DGRAD_WEIGHT),
                wgrad_input=scheme._own_copy(Role.WGRAD_INPUT),
                corrected=scheme.corrected - {Role.FPROP_INPUT, Role.FPROP_WEIGHT},
            )
        return scheme
