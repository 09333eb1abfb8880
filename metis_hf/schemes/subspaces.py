"""Subspaces of inputs and output gradients that layers keep over optimizer steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from metis_hf.operands.conditioners.kept_subspace import KeptSubspace, Slot, Subspaces
from metis_hf.schemes.noise_keys import CallKeys, several_processes
from metis_hf.schemes.states import LayerState, StatefulLayer, cannot_be_read, in_backward

TENSORS = ("input", "grad_output")
FLAGS = "subspaces_known"


@dataclass(frozen=True)
class KeptSubspaces(LayerState):
    """Bases of the dominant subspaces of x and dy, found in one step and reused in the next ones.

    The conference version of arXiv 2509.00404 (ICLR 2026) finds them in every eighth step, because
    leading subspaces of adjacent steps are nearly the same. A call splits its own batch along the
    kept basis, so every split is exact. `after_step` counts steps; without it, each call finds its
    own basis. Counted from 0, the steps whose number is a multiple of `interval` find bases. An
    expert without tokens in such a step keeps its earlier basis; if it has none, each call
    searches.

    Buffers for each tensor that is split: `input_basis` [i k], `grad_output_basis` [o k], and with
    refinements `..._basis_found`, the basis found in the current step: recomputed forward passes
    and further micro-batches start from the same basis as the first one. `subspaces_known` [2], 0
    or 1, says whether the next call takes the bases; the host caches it, and reads it from the
    device only after a checkpoint was loaded. Evaluation neither takes nor changes bases.

    Each process finds its own bases. `after_step` gives all processes the basis of the first
    process that has one.

    Args:
        interval: optimizer steps from one search to the next, at least 2.
        refinements: multiplications of a kept basis by the batch's Gram matrix before use.
        input: rank of the split of inputs; 0: they are not split.
        grad_output: rank of the split of output gradients, likewise.
    """

    interval: int
    refinements: int = 0
    input: int = 0
    grad_output: int = 0

    follows_frozen_weights: ClassVar[bool] = True
    can_be_recorded: ClassVar[bool] = True

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        buffers = {FLAGS: torch.zeros(len(TENSORS), dtype=torch.int32)}
        for tensor, width in zip(TENSORS, (in_features, out_features)):
            if rank := getattr(self, tensor):
                shape = width, min(rank, width)
                for name in self._names(tensor):
                    buffers[name] = torch.zeros(shape, dtype=torch.float32)
        return buffers

    def _names(self, tensor: str) -> tuple[str, ...]:
        """Return the buffers of a tensor: the basis that calls use, and the one that they find."""
        basis = f"{tensor}_basis"
        return (basis, f"{basis}_found") if self.refinements else (basis,)

    def _kept(self, buffers: Mapping[str, Tensor], *, writes: bool) -> Subspaces | None:
        flags = buffers[FLAGS]
        if torch.compiler.is_compiling() or (flags not in _HOSTS and cannot_be_read(flags)):
            return None
        host = _host(flags)
        kept = {}
        for place, tensor in enumerate(TENSORS):
            if getattr(self, tensor):
                names = self._names(tensor)
                basis = buffers[names[0]] if host.known[place] else None
                # Recomputed inputs write nothing: micro-batches may be recomputed in another order.
                again = tensor == "input" and in_backward()
                target = buffers[names[-1]] if writes and not again else None
                kept[tensor] = KeptSubspace(basis, target, host.slots[place], self.refinements)
        return Subspaces(**kept)

    def freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> Subspaces | None:
        return self._kept(buffers, writes=False)

    def update_and_freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> Subspaces | None:
        return self._kept(buffers, writes=True)

    def phase(self, buffers: Mapping[str, Tensor]) -> Hashable:
        return tuple(_host(buffers[FLAGS]).known)

    def after_step(
        self, layers: Mapping[str, StatefulLayer], step: int, max_steps: int
    ) -> dict[str, dict[str, float]]:
        searched = (step - 1) % self.interval == 0
        if searched or self.refinements:
            if several_processes():
                self._agree(layers)
            self._take(layers)
        for layer in layers.values():
            flags = layer.buffers[FLAGS]
            host = _host(flags)
            known = list(host.known)
            if searched:
                known = [slot.is_filled for slot in host.slots]
            if step % self.interval == 0:
                known = [False for _ in TENSORS]
            host.write(flags, known)
        return {}

    def _take(self, layers: Mapping[str, StatefulLayer]) -> None:
        """Let the next calls use the bases that calls of this step found."""
        bases, found = [], []
        for slot, buffers in self._slots(layers):
            slot.contents = slot.found
            if len(buffers) == 2 and slot.is_filled:
                bases.append(buffers[0])
                found.append(buffers[1])
        if bases:
            torch._foreach_copy_(bases, found)

    def _slots(self, layers: Mapping[str, StatefulLayer]) -> Iterator[tuple[Slot, list[Tensor]]]:
        """Yield the slot of each kept subspace, and its buffers."""
        for layer in layers.values():
            host = _host(layer.buffers[FLAGS])
            for place, tensor in enumerate(TENSORS):
                if getattr(self, tensor):
                    names = self._names(tensor)
                    yield host.slots[place], [layer.buffers[name] for name in names]

    def _agree(self, layers: Mapping[str, StatefulLayer]) -> None:
        """Give every process each basis that the first process with one found."""
        slots = [*self._slots(layers)]
        rank, none = dist.get_rank(), dist.get_world_size()
        owners = torch.tensor(
            [rank if slot.is_filled else none for slot, _ in slots],
            dtype=torch.int32,
            device=slots[0][1][0].device,
        )
        dist.all_reduce(owners, dist.ReduceOp.MIN)
        chosen = owners.tolist()
        parts = [
            buffers[-1] if owner == rank else torch.zeros_like(buffers[-1])
            for owner, (_, buffers) in zip(chosen, slots)
        ]
        whole = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(whole)  # one process adds values, the others zeros
        sizes = [part.numel() for part in parts]
        for owner, (slot, buffers), basis in zip(chosen, slots, whole.split(sizes)):
            if owner < none:
                buffers[-1].copy_(basis.view_as(buffers[-1]))
                slot.found, slot.is_filled = (slot.found, owner), True


class _Host:
    """The host's copy of a layer's flags, and the slots of its kept subspaces."""

    def __init__(self, flags: Tensor) -> None:
        self.known = [bool(flag) for flag in flags.tolist()]
        self.version = flags._version
        self.slots = [Slot() for _ in TENSORS]
        for slot, known in zip(self.slots, self.known):
            slot.is_filled = known

    def write(self, flags: Tensor, known: list[bool]) -> None:
        """Change the flags, on the host and on the device."""
        if known != self.known:
            self.known = known
            flags.copy_(torch.tensor(known, dtype=flags.dtype))
            self.version = flags._version


_HOSTS: MutableMapping[Tensor, _Host] = WeakTensorKeyDictionary()


def _host(flags: Tensor) -> _Host:
    """Return the `_Host` of a layer's flags, read from the device if missing or stale."""
    host = _HOSTS.get(flags)
    # Versions tell nothing under DDP, which writes all buffers before each forward pass.
    if host is None or (host.version != flags._version and not several_processes()):
        host = _HOSTS[flags] = _Host(flags)
    return host
