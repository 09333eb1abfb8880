"""Schemes that quantize one kind of operand alone: which of them costs what in training?

    metis-hf compare --import eval/studies/training_parts.py --schemes bf16,rne-x,rne-w,rne-dy

Each is `nvfp4-rne` for the operands that its name says, and exact for the others. An operand is
quantized in both GEMMs that read it.
"""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes import Scheme
from metis_hf.schemes.nvfp4_rne import nvfp4_rne
from metis_hf.schemes.parts import HIGH_PRECISION, MetisConfig, register_scheme

OPERANDS = {"x": "fprop_input", "w": "fprop_weight", "dy": "dgrad_grad_output"}
ALONE = (("x",), ("w",), ("dy",), ("x", "w"))


def register(kinds: tuple[str, ...]) -> None:
    """Register a scheme that quantizes these kinds of operands."""

    @register_scheme(
        f"rne-{'-'.join(kinds)}", summary="nvfp4-rne, of some operands", source="docs/trained.md"
    )
    def build(config: MetisConfig, rank: int) -> Scheme:
        scheme = nvfp4_rne(config, rank)
        exact = {role: HIGH_PRECISION for kind, role in OPERANDS.items() if kind not in kinds}
        return replace(scheme, **exact)


for kinds in ALONE:
    register(kinds)
