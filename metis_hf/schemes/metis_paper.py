"""Metis as published: spectral split of weights, activations and gradients, stochastic rounding."""

from __future__ import annotations

from metis_hf.config import MetisConfig
from metis_hf.schemes._parts import metis_scheme, quantizer
from metis_hf.schemes.base import Scheme, register_scheme


@register_scheme(
    "metis-paper",
    summary="spectral split as published: exact residual, stochastic rounding everywhere",
    source="arXiv 2509.00404",
)
def metis_paper(config: MetisConfig, rank: int) -> Scheme:
    """The paper's equations as written: residual = tensor - exact low-rank part, scales up."""
    return metis_scheme(
        config,
        rank,
        forward=quantizer(config, rounding="stochastic", scale_rounding="up"),
        backward=quantizer(config, rounding="stochastic", scale_rounding="up", backward=True),
        compensated=False,
    )
