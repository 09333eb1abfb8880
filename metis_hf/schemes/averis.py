"""Averis, second version: the token mean quantized separately, on NVFP4 without a rotation."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.nvidia import nvidia
from metis_hf.schemes.parts import MeanRemoved, MetisConfig, Scheme, register_scheme

_SOURCE = "arXiv 2603.10444 version 2 (Averis), from its abstract"


@register_scheme(
    "averis",
    summary="`nvidia` without Hadamard; token means of inputs and gradients quantized separately",
    source=_SOURCE,
)
def averis(config: MetisConfig, rank: int) -> Scheme:
    """Split inputs and output gradients as x = 1 mu^T + rest, both quantized, on plain NVFP4.

    Assumed: blocks and roundings are as in `nvidia`. Nothing is rotated. The split is from the
    first version of the paper, as in `mean`. The second version compares with "vanilla NVFP4" and
    with NVIDIA's Hadamard.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`; `mean` has that mode.
    """
    scheme = nvidia(config, rank)
    changes = {
        name: replace(getattr(scheme, name), conditioner=MeanRemoved())
        for name in ("fprop_input", "dgrad_grad_output", "wgrad_grad_output", "wgrad_input")
    }
    return replace(scheme, **changes)


@register_scheme(
    "averis-hadamard",
    summary="`averis` with the mean-free part rotated in wgrad, as in `nvidia`",
    source=_SOURCE,
)
def averis_hadamard(config: MetisConfig, rank: int) -> Scheme:
    """Return `averis` with both operands of wgrad as 1 Q(mu) + H^T Q(H (x - 1 mu)).

    The paper says that both together are better than either alone; their order is assumed. After a
    rotation of tokens there would be no mean over tokens.

    Raises:
        ValueError: `operand_mode="shared"`, as `nvidia`.
    """
    scheme, rotated = averis(config, rank), nvidia(config, rank)
    changes = {}
    for name in ("wgrad_grad_output", "wgrad_input"):
        operand = getattr(rotated, name)
        changes[name] = replace(operand, conditioner=MeanRemoved(operand.conditioner))
    return replace(scheme, **changes)
