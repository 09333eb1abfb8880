"""Static tensor scales, as in deployed models.

A deployed NVFP4 layer computes the block scales of its input dynamically, under a tensor scale that
calibration fixed. The layer's state (`schemes.states.StaticScales`) provides the amax for that
scale: a scheme holds a `StaticScale`, and the plan of a call binds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from metis_hf.operands.conditioners.identity import Identity
from metis_hf.operands.kept import Mark, mark_of


class TensorAmax(NamedTuple):
    """The amax values for the tensor scales of one call; 0-dim fp32, frozen for backward.

    Attributes:
        input: of the input.
        weight: of the weight.
        fixed: both are buffers of a layer with frozen scales, the same in every call.
    """

    input: Tensor
    weight: Tensor
    fixed: bool = False


@dataclass(frozen=True)
class StaticScale(Identity):
    """Placeholder for a `GivenScale` in a scheme; unbound, it uses the tensor's own amax.

    Args:
        weight: whether the matrix is the weight, rather than the input.
    """

    weight: bool = False

    needs_state: ClassVar[bool] = True

    def bind(self, state: TensorAmax) -> GivenScale:
        amax = state.weight if self.weight else state.input
        return GivenScale(amax, mark_of(amax) if state.fixed else None)


@dataclass(frozen=True, eq=False)
class GivenScale(Identity):
    """Quantizes with a tensor scale from `amax`; equal to others with the same mark.

    Args:
        amax: 0-dim fp32.
        mark: of an amax that is the same in every call; None: compared by identity.
    """

    amax: Tensor
    mark: Mark | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GivenScale) or self.mark is None:
            return self is other
        return self.mark == other.mark

    def __hash__(self) -> int:
        return id(self) if self.mark is None else hash(self.mark)

    @property
    def comes_again(self) -> bool:
        return self.mark is not None

    def tensor_amax(self) -> Tensor:
        return self.amax
