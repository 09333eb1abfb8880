"""Outlier clamping and compensation with the differentiable gradient estimator."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    Clamped,
    CodebookFormat,
    DifferentiableEstimator,
    MetisConfig,
    MixedFormat,
    Scheme,
    nearest_forward,
    register_scheme,
    three_operands,
)


@register_scheme(
    "occ",
    summary="inputs clamped at 1 % and 99 % quantiles, sparse BF16 remainder; DGE for weights",
    source="arXiv 2501.17116 (FP4 training, OCC and DGE)",
)
def occ(config: MetisConfig, rank: int) -> Scheme:
    """Condition inputs with `Clamped` and weights with `DifferentiableEstimator`.

    alpha = .99, k = 5 and the cap of 3 are the paper's. The paper's FP4 has one scale per token and
    per output channel; here it is NVFP4 by default. The paper's sparse product is in FP8 or FP16;
    here the sparse part is in BF16. The paper gives no quantizer for output gradients, although its
    cost model counts backward GEMMs as FP4 ones: here they are rounded stochastically, without
    clamping. Gradients of weights are multiplied by the estimator's slope, 0.6 on average.

    Raises:
        ValueError: the format is mixed or has a codebook.
    """
    quantizers = nearest_forward(config)
    fmt = quantizers[0].fmt
    if isinstance(fmt.element, MixedFormat | CodebookFormat):
        raise ValueError(
            "its estimator of weight gradients needs one grid of codes, the same on both sides of "
            f"zero, and blocks of {fmt.name} may not have one; choose "
            "another format or scheme"
        )
    return three_operands(config, quantizers, input=Clamped(), weight=DifferentiableEstimator())
