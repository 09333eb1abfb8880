"""How one tensor enters one GEMM, and how a layer stores its weight.

`operand` has the operand itself, `conditioners` what a method does around the quantizer, one file
each, and `weight_forms` the ways to store a weight. Schemes choose which operand a GEMM takes.
"""

from metis_hf.operands.operand import (
    HIGH_PRECISION,
    IDENTITY,
    Conditioner,
    Encoded,
    Hadamard,
    Identity,
    LowRank,
    Operand,
    Part,
    Quantized,
    Work,
)

__all__ = [
    "HIGH_PRECISION",
    "IDENTITY",
    "Conditioner",
    "Encoded",
    "Hadamard",
    "Identity",
    "LowRank",
    "Operand",
    "Part",
    "Quantized",
    "Work",
]
