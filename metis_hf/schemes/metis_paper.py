"""Metis as published: spectral split of weights, activations and gradients, stochastic rounding."""

from __future__ import annotations

from metis_hf.config import MetisConfig
from metis_hf.operands import IDENTITY, Operand
from metis_hf.schemes.base import Scheme, register_scheme
from metis_hf.schemes.parts import in_mode, spectral, stochastic_everywhere


@register_scheme(
    "metis-paper",
    summary="spectral split as published: exact residual, stochastic rounding everywhere",
    source="arXiv 2509.00404",
    rank_multiple=1,
)
def metis_paper(config: MetisConfig, rank: int) -> Scheme:
    """The paper's equations as written: residual = tensor - exact low-rank part, scales up.

    Tensors that `config.decompose` does not name are quantized directly; without "weight" the
    weight is one dense matrix.
    """
    forward, backward = stochastic_everywhere(config)
    split = spectral(config, rank, compensated=False)
    scheme = Scheme(
        fprop_input=Operand(forward, split if "activation" in config.decompose else IDENTITY),
        fprop_weight=Operand(forward),
        dgrad_grad_output=Operand(backward, split if "gradient" in config.decompose else IDENTITY),
        split_weight="weight" in config.decompose,
        compensated=False,
    )
    return in_mode(scheme, config.operand_mode or "shared")
