"""Metis as published: spectral split of weights, activations and gradients, stochastic rounding."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.config import DECOMPOSABLE
from metis_hf.schemes.parts import (
    IDENTITY,
    MetisConfig,
    Scheme,
    SplitWeight,
    gradient_rank,
    register_scheme,
    spectral,
    stochastic_everywhere,
    three_operands,
)


@register_scheme(
    "metis-paper",
    summary="spectral splits as published: exact residuals, stochastic rounding everywhere",
    source="arXiv 2509.00404",
    rank_multiple=1,
)
def metis_paper(config: MetisConfig, rank: int) -> Scheme:
    """Follow the paper's equations: residual = tensor - exact low-rank part, scales rounded up.

    Tensors that `config.decompose` does not name are quantized directly; without "weight" the
    weight is one dense matrix.

    Raises:
        ValueError: `decompose` names the weight, and `split_weight` is False.
    """
    split = spectral(config, rank, compensated=False)
    of_gradients = replace(split, rank=gradient_rank(config, rank))
    tensors = DECOMPOSABLE if config.decompose is None else config.decompose
    stored_split = "weight" in tensors
    if config.split_weight is False and stored_split and config.decompose is not None:
        raise ValueError(
            'decompose includes "weight", but split_weight=False keeps weights whole; drop one '
            "of the two"
        )
    if config.split_weight is not None:
        stored_split = bool(config.split_weight)
    scheme = three_operands(
        config,
        stochastic_everywhere(config),
        input=split if "activation" in tensors else IDENTITY,
        grad_output=of_gradients if "gradient" in tensors else IDENTITY,
    )
    return replace(scheme, weight=SplitWeight(rank, compensated=False)) if stored_split else scheme
