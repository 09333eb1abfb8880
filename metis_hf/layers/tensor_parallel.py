"""Quantized layers under transformers' tensor parallelism, which shards weights over processes.

No block spans two processes, and processes share the amax of a sharded tensor. Codes and scales
then equal the whole tensor's; only the order of sums differs from a single process. `obstacle` says
which schemes and shapes allow that. Rounding noise and saved inputs are local to each shard.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from metis_hf.layers.gemm import GemmPlan
from metis_hf.noise import Key
from metis_hf.numerics import Quantizer, Tile
from metis_hf.numerics.kernels import pack
from metis_hf.numerics.scaling import OuterScale
from metis_hf.operands import Encoded, Hadamard, Operand, Quantized
from metis_hf.operands.conditioner import as_fp32
from metis_hf.operands.conditioners.identity import Identity
from metis_hf.operands.conditioners.static_scale import GivenScale
from metis_hf.operands.weight_forms import DenseWeight
from metis_hf.schemes.base import Scheme
from metis_hf.schemes.roles import Role, contracted_dim, tensor_of
from metis_hf.transforms.hadamard import SIZE

COLWISE, ROWWISE, WHOLE = "colwise", "rowwise", "whole"
# transformers' styles that shard the weight of a linear layer, one piece per process.
STYLES = {
    "colwise": COLWISE,
    "colwise_rep": COLWISE,
    "colwise_gather_output": COLWISE,
    "rowwise": ROWWISE,
    "rowwise_rep": ROWWISE,
    "rowwise_split_input": ROWWISE,
}
_INPUTS = (Role.FPROP_INPUT, Role.WGRAD_INPUT)
_WEIGHTS = (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT)
_GRADIENTS = (Role.DGRAD_GRAD_OUTPUT, Role.WGRAD_GRAD_OUTPUT)
# Style -> sharded matrices -> the dimension that is sharded.
_CUT = {
    COLWISE: dict.fromkeys(_WEIGHTS, 0) | dict.fromkeys(_GRADIENTS, 1),
    ROWWISE: dict.fromkeys(_WEIGHTS, 1) | dict.fromkeys(_INPUTS, 1),
    WHOLE: {},
}


@dataclass(frozen=True, eq=False)
class Shards:
    """The processes that compute one layer together.

    Args:
        style: "colwise", each process has some of the outputs; "rowwise", each has some of the
            inputs; "whole", the layer is not sharded, but other layers of the model are.
        size: number of processes.
        group: torch.distributed's process group; None until the model is loaded.
    """

    style: str
    size: int
    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        return self  # a process group cannot be copied

    def __reduce__(self) -> tuple[type[Shards], tuple[str, int]]:
        return Shards, (self.style, self.size)  # nor pickled

    @property
    def cut(self) -> bool:
        """Return whether a process has only a part of the weight."""
        return self.style != WHOLE

    def cuts(self, role: Role) -> bool:
        """Return whether a process has only a part of the matrix at `role`."""
        return role in _CUT[self.style]

    def largest(self, *tensors: Tensor) -> Tensor:
        """Return the amax of each whole tensor, fp32 [n]; all processes must call it."""
        own = [t.detach().abs().amax() if t.numel() else t.new_zeros(()) for t in tensors]
        amax = torch.stack([each.float() for each in own])
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        return amax


@dataclass(frozen=True)
class SharedHadamard(Hadamard):
    """NVIDIA's rotation of a sharded matrix, under the tensor scale of the whole matrix."""

    shards: Shards = field(default_factory=lambda: Shards(WHOLE, 1))

    def __call__(
        self,
        x: Tensor,
        quantizer: Quantizer,
        *,
        dim: int,
        key: Key,
        row_mask: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        rotated = self.forward(as_fp32(x), dim=dim)
        (amax,) = self.shards.largest(rotated)
        quantized = quantizer(rotated, dim=dim, key=key, amax=amax)
        return self.inverse(quantized, dim=dim).to(dtype)

    def encode(
        self, x: Tensor, quantizer: Quantizer, *, dim: int, key: Key, row_mask: Tensor | None = None
    ) -> Encoded:
        rotated = self.forward(as_fp32(x), dim=dim)
        (amax,) = self.shards.largest(rotated)
        return Encoded(pack(rotated, quantizer, dim=dim, key=key, amax=amax))


@dataclass(frozen=True)
class ShardedPlan(GemmPlan):
    """The plan of a sharded layer's call: tensor scales come from the amax of whole tensors.

    Args:
        shards: the layer's.
        amax: of sharded tensors, 0-dim: "input" and "weight" of this call, and "grad_output",
            which the backward pass sets before each use.
    """

    shards: Shards = field(default_factory=lambda: Shards(WHOLE, 1))
    amax: dict[str, Tensor] = field(default_factory=dict)

    def resolve(self, role: Role) -> tuple[Role, Operand]:
        role, operand = super().resolve(role)
        quantizer = operand.quantizer
        if quantizer is None or not quantizer.two_level or not self.shards.cuts(role):
            return role, operand
        if isinstance(operand.conditioner, Hadamard):
            shared = SharedHadamard(operand.conditioner.seed, self.shards)
            return role, replace(operand, conditioner=shared)
        return role, replace(operand, conditioner=GivenScale(self.amax[tensor_of(role)]))

    def expect(self, *operands: tuple[Role, Tensor]) -> None:
        pass  # the amax comes from all processes, not from kernels

    def matrix_operand(self, role: Role, x: Tensor) -> Quantized:
        if role in _GRADIENTS and needs_amax(self.scheme, self.shards, role):
            (self.amax["grad_output"],) = self.shards.largest(x)
        return super().matrix_operand(role, x)


def needs_amax(scheme: Scheme, shards: Shards, *roles: Role) -> bool:
    """Return whether any of these operands needs the shared amax of a sharded matrix.

    `SharedHadamard` reduces the amax of its rotated matrix itself.
    """
    for source, operand in map(scheme.resolve, roles):
        scaled = operand.quantizer is not None and operand.quantizer.two_level
        if scaled and shards.cuts(source) and not isinstance(operand.conditioner, Hadamard):
            return True
    return False


def shared_amax(scheme: Scheme, shards: Shards, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return the amax of the whole input and weight, if a call needs them, by one all-reduce.

    x [t i] and weight [o i] are this process's shards.
    """
    tensors = {}
    if needs_amax(scheme, shards, *_INPUTS):
        tensors["input"] = x
    if needs_amax(scheme, shards, *_WEIGHTS):
        tensors["weight"] = weight
    if not tensors:
        return {}
    return dict(zip(tensors, shards.largest(*tensors.values())))


def obstacle(scheme: Scheme, shards: Shards, shape: tuple[int, int]) -> str | None:
    """Return why a sharded layer would differ from the whole one; None if it would not.

    `shape` is the whole weight's, [o i].
    """
    if shards.style == WHOLE:
        return None
    if not isinstance(scheme.weight, DenseWeight):
        return (
            "its weight is stored in several parameters, and tensor-parallel plans handle only one"
        )
    if scheme.state is not None:
        return "its scheme keeps state of the layer, which would describe only a part of it"
    if scheme.splits or scheme.corrected:
        return (
            "its operands are split, and the subspace of a part differs from the subspace of the "
            "whole"
        )
    cut = shape[0] if shards.style == COLWISE else shape[1]
    side = "out_features" if shards.style == COLWISE else "in_features"
    if cut % shards.size:
        return f"{side}={cut} cannot be split equally over {shards.size} processes"
    for role in Role:
        source, operand = scheme.resolve(role)
        conditioner, quantizer = operand.conditioner, operand.quantizer
        if type(conditioner) not in (Identity, Hadamard):
            return f"{type(conditioner).__name__} needs the whole {tensor_of(role)} of a layer"
        if quantizer is None or not shards.cuts(source):
            continue
        if quantizer.outer_scale is OuterScale.TOKEN and contracted_dim(source) == -1:
            return (
                f"each token of its {tensor_of(role)} has an outer scale, and every process would "
                'compute one for its own part of the token; use outer_scale="tensor"'
            )
        block = _block_along(quantizer, source, _CUT[shards.style][source])
        if block is None:
            return f"one block of its {tensor_of(role)} spans all of {side}"
        along_cut = contracted_dim(source) % 2 == _CUT[shards.style][source]
        if isinstance(conditioner, Hadamard) and along_cut:
            block = max(block, SIZE)
        if cut // shards.size % block:
            return (
                f"blocks of {block} along {side}={cut} would be split between the {shards.size} "
                "processes"
            )
    return None


def _block_along(quantizer: Quantizer, role: Role, dim: int) -> int | None:
    """Return the length of a block along a dimension of its matrix; None: the whole dimension."""
    if quantizer.tile is Tile.TENSOR:
        return None
    if quantizer.tile is Tile.SQUARE or contracted_dim(role) % 2 == dim:
        return quantizer.fmt.block_size
    return 1
