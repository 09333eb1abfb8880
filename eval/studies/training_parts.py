"""Schemes that quantize only some operands, to measure the cost of each in training.

    metis-hf compare --import eval/studies/training_parts.py --schemes bf16,rne-x,rne-w,rne-dy

Each scheme is `nvfp4-rne` for the operands in its name and exact for the others. A name stands for
x, w or dy in both GEMMs that read the tensor, or in one of them ("x-fprop").
"""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes import Role, Scheme
from metis_hf.schemes.nvfp4_rne import nvfp4_rne
from metis_hf.schemes.parts import HIGH_PRECISION, MetisConfig, register_scheme

X, W, DY = (
    (Role.FPROP_INPUT, Role.WGRAD_INPUT),
    (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT),
    (Role.DGRAD_GRAD_OUTPUT, Role.WGRAD_GRAD_OUTPUT),
)
ALONE = {
    "x": X,
    "w": W,
    "dy": DY,
    "x-w": X + W,
    "x-fprop": X[:1],
    "x-wgrad": X[1:],
    "w-fprop": W[:1],
    "w-dgrad": W[1:],
}


def register(name: str, quantized: tuple[Role, ...]) -> None:
    """Register a scheme that quantizes the operands at these places."""

    @register_scheme(
        f"rne-{name}",
        summary="nvfp4-rne, of some operands",
        source="eval/results/report/from-scratch.md",
    )
    def build(config: MetisConfig, rank: int) -> Scheme:
        whole = nvfp4_rne(config, rank)
        operands = {role: whole.resolve(role)[1] for role in Role}
        exact = {role: HIGH_PRECISION for role in Role if role not in quantized}
        # None reuses the copy of the first GEMM, as in the whole scheme.
        found = operands | exact
        reused = {
            role: None
            for role, first in ((X[1], X[0]), (W[1], W[0]), (DY[1], DY[0]))
            if found[role] == found[first]
        }
        return replace(whole, **{role.name.lower(): o for role, o in (found | reused).items()})


for name, quantized in ALONE.items():
    register(name, quantized)
