"""A subspace that a layer keeps from step to step, as one call of the layer sees it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Reuse(NamedTuple):
    """Whose subspace a split takes from earlier steps, and how.

    Attributes:
        tensor: "input" or "grad_output".
        interval: optimizer steps from one search to the next.
        refinements: products with the batch's Gram matrix before a kept basis is used.
    """

    tensor: str
    interval: int
    refinements: int


class Slot:
    """The host's side of one kept subspace.

    Attributes:
        contents: equal for two slots whose bases are equal: layers that read one tensor have equal
            ones.
        found: the same of the basis that calls of this step have found.
        is_filled: whether a call has found one yet.
    """

    def __init__(self) -> None:
        self.contents: object = object()
        self.found: object = self.contents
        self.is_filled = False


class KeptSubspace:
    """The subspace of x or dy in one call. Equal ones give an equal split of one matrix.

    Args:
        basis: [c k], kept from an earlier step; None: the call has to find one.
        target: [c k], where it is kept for later steps; None: nowhere.
        slot: of this tensor of the layer.
        refinements: products with the Gram matrix of the batch that turn `basis` towards it.
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

        With fewer columns, of a matrix of few rows, the rest becomes zero.
        """
        found = v, object()
        self.take_over(found)
        return found

    def take_over(self, found: tuple[Tensor, object]) -> None:
        """Keep what a call of this layer has found, or one of a layer with the same input."""
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
