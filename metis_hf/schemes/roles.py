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
