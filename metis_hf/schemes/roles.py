"""The places of tensors in the GEMMs of a layer."""

from __future__ import annotations

import enum


class Role(enum.IntEnum):
    """The six places a tensor takes in the GEMMs of a linear layer."""

    FPROP_INPUT = 0
    FPROP_WEIGHT = 1
    DGRAD_GRAD_OUTPUT = 2
    DGRAD_WEIGHT = 3
    WGRAD_GRAD_OUTPUT = 4
    WGRAD_INPUT = 5


def contracted_dim(role: Role) -> int:
    """Return the dimension of the operand at a role that the GEMM contracts: rows 0, columns -1."""
    return -1 if role in (Role.FPROP_INPUT, Role.FPROP_WEIGHT, Role.DGRAD_GRAD_OUTPUT) else 0


def tensor_of(role: Role) -> str:
    """Return "input", "weight" or "grad_output"."""
    return role.name.lower().partition("_")[2]
