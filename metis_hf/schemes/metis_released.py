"""The code that the authors of Metis published: FP4 layers, each with a trained exact branch."""

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
    """Leave out the parts that `decompose` does not name: the branch is the weight's."""
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
    summary="the authors' code: FP4 on the weight's residual, u, s, vh a trained exact branch",
    source=_SOURCE,
    rank_multiple=BRANCH_MULTIPLE,
)
def metis_released(config: MetisConfig, rank: int) -> Scheme:
    """Take y = s (x vh^T) u^T + x_hat Q(residual)^T, as the authors' `BitLinear` computes it.

    The weight is split once, at conversion. The factors are plain layers that read the unquantized
    input and train in high precision, and so is every gradient that passes through them: this part
    of the step is not four bits. Inputs and output gradients are split as in `metis-paper`, but
    from all rows; inputs and residual round to nearest, output gradients stochastically. The rank
    is 16, and 64 at width 4,096, as in their scripts.

    In theirs (commit 8e567ba) block scales stay in fp32, the split is U U^T X where here it is
    X V V^T, and subspaces are kept and refined by power steps (`subspace_interval`,
    `subspace_refinements`). Fair controls have the same branch:
    `high_precision=["forward", "backward"]`, and other schemes with `split_weight="side-branch"`.
    """
    split = replace(spectral(config, rank, compensated=False), sample_frac=1.0)
    return _released(config, rank, split, replace(split, rank=gradient_rank(config, rank)))


@register_scheme(
    "mean-released",
    summary="the same with the exact token mean of inputs and gradients in place of their splits",
    source=_SOURCE,
    rank_multiple=BRANCH_MULTIPLE,
)
def mean_released(config: MetisConfig, rank: int) -> Scheme:
    """Take x_hat = 1 mu^T + Q(x - 1 mu^T) with an exact mean, and dy likewise; see `averis`."""
    mean = MeanRemoved(exact=True)
    return _released(config, rank, mean, mean)
