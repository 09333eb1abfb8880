"""The noise keys of one call of a layer."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from metis_hf.noise import Key, fingerprint, fingerprints
from metis_hf.numerics.kernels.scratch import Scratch
from metis_hf.schemes.roles import Role

_COORDINATES = 32  # and the role: folded into a correction's key, as 16 and the role for operands


def process_rank() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class CallKeys:
    """Noise keys of one forward call and its backward: role -> key.

    Weights: (layer key, role, weight). Gradients: also the input. Activations: (input key, role,
    input), so that layers that read one tensor quantize it alike, as one wide GEMM would; what is
    quantized of it along directions of the weight: as gradients. Equal tensors give equal noise,
    so a recomputed forward pass repeats the original exactly.

    A weight that is not trained is the same in each step: what is quantized of it for backward
    alone then depends on the input, too, or the same error would be in all gradients.

    Args:
        layer_key: of config seed, layer name and process rank.
        x: the input of the call.
        weight: the stored weight (the residual of a split one).
        input_key: of config seed and process rank; None: activations have noise of this layer.
        rank: of the process, by which the data differs as well; see `RandomHadamard`.
        trains: whether the weight changes from step to step.

    Attributes:
        mark: of this state of the weight, the same on all processes.
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
        """Return the scratch memory of the call, where kernels have some."""
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

        It depends on this layer's weight: other layers that read the same input have coordinates
        of their own.
        """
        return self.call_key.fold(_COORDINATES + role)


def _of_rank(data: Tensor, rank: int) -> Tensor:
    """Return a fingerprint, 0-dim int32, that differs between processes; of rank 0 as it is."""
    return data + _added(rank) if rank else data


def _added(rank: int) -> int:
    return rank * 0x9E3779B1 & 0x7FFFFFFF
