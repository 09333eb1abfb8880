"""The noise keys of one call of a layer."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from metis_hf.noise import Key, fingerprint, fingerprints
from metis_hf.numerics.kernels.scratch import Scratch
from metis_hf.schemes.roles import Role

_COORDINATES = 32  # plus the role, folded into keys of corrections; operands use 16 plus the role


def process_rank() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def several_processes() -> bool:
    """Return whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class CallKeys:
    """Noise keys of one forward call and its backward: role -> key.

    A weight's key depends on (layer key, role, weight), a gradient's key also on the input. An
    activation's key depends on (input key, role, input), so that layers that read the same tensor
    quantize it identically, as one wide GEMM would. Corrections have keys like gradients. Equal
    tensors give equal noise, so a recomputed forward pass repeats the original exactly.

    A frozen weight is the same in every step. The key of its copy for backward therefore also
    depends on the input; otherwise all gradients would contain the same error.

    Args:
        layer_key: of config seed, layer name and process rank.
        x: the input of the call.
        weight: the stored weight (the residual of a split one).
        input_key: of config seed and process rank; None: activations use `layer_key`.
        rank: of the process, on which the data of the keys also depends; see `RandomHadamard`.
        trains: whether the weight changes from step to step.

    Attributes:
        mark: fingerprint of the weight, the same on all processes.
    """

    def __init__(
        self,
        layer_key: Key,
        x: Tensor,
        weight: Tensor,
        input_key: Key | None = None,
        *,
        rank: int = 0,
        trains: bool = True,
    ) -> None:
        input_key = input_key or layer_key
        found = None
        if layer_key.data is None and input_key.data is None:
            found = fingerprints(x, weight, _added(rank))
        if found is None:
            data, self.mark = _of_rank(fingerprint(x), rank), fingerprint(weight)
            self.weight_key = layer_key.with_data(_of_rank(self.mark, rank))
            self.input_key = input_key.with_data(data)
            self.call_key = self.weight_key.with_data(data)
        else:
            data, own, both, self.mark, scratch = found
            self.weight_key = Key(layer_key.static, own, scratch)
            self.input_key = Key(input_key.static, data, scratch)
            self.call_key = Key(layer_key.static, both, scratch)
        self.trains = trains

    @property
    def scratch(self) -> Scratch | None:
        """Return the scratch memory that kernels have for the call, if any."""
        return self.call_key.scratch

    def __getitem__(self, role: Role) -> Key:
        if role is Role.FPROP_WEIGHT or (role is Role.DGRAD_WEIGHT and self.trains):
            key = self.weight_key
        elif role in (Role.FPROP_INPUT, Role.WGRAD_INPUT):
            key = self.input_key
        else:
            key = self.call_key
        return key.fold(16 + role)

    def of_correction(self, role: Role) -> Key:
        """Return the key of the coordinates that correct the operand at `role`.

        It depends on this layer's weight, because layers that read the same input have different
        coordinates.
        """
        return self.call_key.fold(_COORDINATES + role)


def _of_rank(data: Tensor, rank: int) -> Tensor:
    """Make a fingerprint, 0-dim int32, differ between processes; rank 0 keeps it unchanged."""
    return data + _added(rank) if rank else data


def _added(rank: int) -> int:
    return rank * 0x9E3779B1 & 0x7FFFFFFF
