"""HALO: Hadamard rotations in the forward and the backward pass."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import (
    FullHadamard,
    MetisConfig,
    Operand,
    Scheme,
    in_mode,
    key_of,
    nearest_forward,
    register_scheme,
)


@register_scheme(
    "halo",
    summary="HALO-2: Hadamard along features for inputs and weights, along tokens for gradients",
    source="arXiv 2501.02625 (HALO), level 2 of its released code",
)
def halo(config: MetisConfig, rank: int) -> Scheme:
    """Build level 2, which has the most rotations; levels 0 and 1 do not rotate gradients.

    With H along in_features and G along tokens, both full-width:
        fprop   y  = Q(x H) Q(w H)^T
        dgrad   dx = G^T [Q(G dy) Q(w H)] H^T
        wgrad   dw = [Q(dy)^T Q(x H)] H^T
    In dgrad and wgrad, the rotations outside the brackets apply to outputs. Q(x H) and Q(w H) serve
    both passes. In "shared" mode, wgrad takes Q(G dy) too; "contraction" follows the equations,
    with wgrad's copies in blocks along tokens. HALO fine-tunes in FP8, FP6 and INT8, rounded to
    nearest; in NVFP4, gradients are rounded stochastically, with scales rounded up.
    """
    forward, backward = nearest_forward(config)
    seed = key_of("hadamard", config.seed).static
    along, across = FullHadamard(seed), FullHadamard(seed, across=True)
    mode = config.operand_mode or "shared"
    scheme = Scheme(
        fprop_input=Operand(forward, along),
        fprop_weight=Operand(forward, along),
        dgrad_grad_output=Operand(backward, across),
    )
    if mode == "shared":
        return scheme
    # wgrad contracts tokens: its blocks run along tokens, across the rotated features.
    return replace(
        in_mode(scheme, mode),
        wgrad_grad_output=Operand(backward),
        wgrad_input=Operand(forward, across),
    )
