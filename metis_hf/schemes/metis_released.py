"""The published code of the authors of Metis: FP4 layers, each with a trained exact branch."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.config import DECOMPOSABLE
from metis_hf.schemes.parts import (
    BRANCH_MULTIPLE,
    IDENTITY,
    Conditioner,
    MeanRemoved,
    MetisConfig,
    Scheme,
    SplitWeight,
    gradient_rank,
    nearest_forward,
    register_scheme,
    spectral,
    three_operands,
)

_SOURCE = "github.com/sii-research/Metis"


def _released(config: MetisConfig, rank: int, input: Conditioner, dy: Conditioner) -> Scheme:
    """Return the scheme without the parts that `decompose` omits; "weight" means the branch."""
    tensors = DECOMPOSABLE if config.decompose is None else config.decompose
    scheme = three_operands(
        config,
        nearest_forward(config),
        input=input if "activation" in tensors else IDENTITY,
        grad_output=dy if "gradient" in tensors else IDENTITY,
    )
    return replace(scheme, weight=SplitWeight.beside_gemm(rank)) if "weight" in tensors else scheme


@register_scheme(
    "metis-released",
    summary="the authors' code: residual weight in FP4; u, s, vh trained in high precision",
    source=_SOURCE,
    rank_multiple=BRANCH_MULTIPLE,
)
def metis_released(config: MetisConfig, rank: int) -> Scheme:
    """Compute y = s (x vh^T) u^T + x_hat Q(residual)^T, as the authors' `BitLinear` computes it.

    The weight is split once, at conversion. The factors are plain layers that read the unquantized
    input. They train in high precision, as do gradients through them: this part of the step is not
    four bits. Inputs and output gradients are split as in `metis-paper`, but from all rows; inputs
    and residual round to nearest, output gradients stochastically. The rank is 16, and 64 at width
    4,096, as in the authors' scripts.

    The authors' code (commit 8e567ba) differs: block scales stay in fp32, the split is U U^T X,
    here X V V^T, and subspaces are kept and refined by power steps (here by `subspace_interval`
    and `subspace_refinements`). Fair controls have the same branch: this scheme with
    `high_precision=["forward", "backward"]`, and others with `split_weight="side-branch"`.
    """
    split = replace(spectral(config, rank, compensated=False), sample_frac=1.0)
    return _released(config, rank, split, replace(split, rank=gradient_rank(config, rank)))


@register_scheme(
    "mean-released",
    summary="`metis-released` with exact token means of inputs and gradients instead of splits",
    source=_SOURCE,
    rank_multiple=BRANCH_MULTIPLE,
)
def mean_released(config: MetisConfig, rank: int) -> Scheme:
    """Compute x_hat = 1 mu^T + Q(x - 1 mu^T) with an exact mean, and dy_hat too; see `averis`."""
    mean = MeanRemoved(exact=True)
    return _released(config, rank, mean, mean)
