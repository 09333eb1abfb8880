"""Metis with a compensated residual: the default scheme."""

from __future__ import annotations

from metis_hf.config import MetisConfig
from metis_hf.schemes._parts import metis_scheme, quantizer
from metis_hf.schemes.base import Scheme, register_scheme


@register_scheme(
    "metis",
    summary="spectral split with compensated residual, nearest forward, stochastic backward",
    source="arXiv 2509.00404, residual taken against the quantized low-rank part",
    rank_multiple=16,
)
def metis(config: MetisConfig, rank: int) -> Scheme:
    """The default: the residual makes up for the rounding of the quantized factors.

    Quantizing the factors costs a large part of the dominant energy, which the published residual
    never gives back; Q(x - Q(a) lam Q(v^T)) does, at the same number of bits. The stored factors of
    a weight have entries of unit RMS; see `weights.SplitWeight`.
    """
    return metis_scheme(
        config,
        rank,
        forward=quantizer(config, rounding="nearest", scale_rounding="nearest"),
        backward=quantizer(config, rounding="stochastic", scale_rounding="up", backward=True),
        compensated=True,
    )
