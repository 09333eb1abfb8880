"""A subspace that a layer keeps over optimizer steps, as one call of the layer sees it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Reuse(NamedTuple):
    """Settings by which a split reuses a subspace of earlier steps.

    Attributes:
        tensor: "input" or "grad_output".
        interval: optimizer steps from one search to the next.
        refinements: multiplications of a kept basis by the batch's Gram matrix before use.
    """

    tensor: str
    interval: int
    refinements: int


class Slot:
    """Host-side record of one kept subspace.

    Attributes:
        contents: identifies the basis; equal in slots with equal bases, as of layers that read the
            same tensor.
        found: identifies the basis that calls of this step found.
        is_filled: whether a call has found a basis yet.
    """

    def __init__(self) -> None:
        self.contents: object = object()
        self.found: object = self.contents
        self.is_filled = False


class KeptSubspace:
    """The subspace of x or dy in one call. Equal objects give equal splits of a matrix.

    Args:
        basis: [c k], kept from an earlier step; None: the call must find one.
        target: [c k], the buffer for a basis that the call finds; None: it is not kept.
        slot: of this tensor of the layer.
        refinements: multiplications by the batch's Gram matrix that adapt `basis` to the batch.
    """

    def __init__(
        self, basis: Tensor | None, target: Tensor | None, slot: Slot, refinements: int
    ) -> None:
        self.basis, self.refinements = basis, refinements
        self._target, self._slot = target, slot
        self._like = (refinements, None if basis is None else slot.contents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptSubspace) and self._like == other._like

    def __hash__(self) -> int:
        return hash(self._like)

    def keep(self, v: Tensor) -> tuple[Tensor, object]:
        """Keep v [c k] for later steps, and return it for other layers (`take_over`).

        If v has fewer columns than the buffer, as for a matrix of few rows, the rest becomes zero.
        """
        found = v, object()
        self.take_over(found)
        return found

    def take_over(self, found: tuple[Tensor, object]) -> None:
        """Keep a basis that this layer, or a layer with the same input, found."""
        if self._target is None:
            return
        v, contents = found
        columns = v.shape[1]
        self._target[:, :columns].copy_(v)
        self._target[:, columns:].zero_()
        self._slot.found, self._slot.is_filled = contents, True


class Subspaces(NamedTuple):
    """The kept subspaces of a call; None for a tensor that is not split."""

    input: KeptSubspace | None = None
    grad_output: KeptSubspace | None = None
