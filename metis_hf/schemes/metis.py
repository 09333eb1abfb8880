"""Metis with compensated rounding: the default scheme."""

from __future__ import annotations

from dataclasses import replace

from metis_hf.schemes.parts import (
    NVFP4,
    Conditioner,
    MetisConfig,
    Operand,
    Quantizer,
    Role,
    ScaleRule,
    Scheme,
    gradient_rank,
    nearest_forward,
    register_scheme,
    spectral,
    with_own_copies,
)

SPLIT = ("activation", "gradient")  # tensors, unless `config.decompose` says otherwise
_GRADIENT_SHARE = 0.25  # of the rank, for output gradients
_ROWS = 16  # sums of rows for each column of the sketch of a subspace
# Split tensor -> the operand whose rounding error is added back along its directions.
_CORRECTED_BY = {
    "weight": Role.FPROP_INPUT,
    "activation": Role.FPROP_WEIGHT,
    "gradient": Role.DGRAD_WEIGHT,
}


@register_scheme(
    "metis",
    summary="compensated spectral splits; rounding errors added back along dominant directions",
    source="arXiv 2509.00404, and eval/results/report/method.md",
    rank_multiple=16,  # one block
    least_rank=48,
)
def metis(config: MetisConfig, rank: int) -> Scheme:
    """Return the default scheme; eval/results/report/method.md measures each of its choices.

    - Residuals are computed from the quantized low-rank part, Q(x - Q(a) lam Q(v^T)), and so
      compensate the rounding of the factors, at the same number of bits.
    - The weight is one dense matrix, quantized directly: its spectrum is flat compared with inputs
      and gradients, and a split of it gains less than the same multiply-adds spent on their rank.
      If `decompose` names "weight", it is split whenever it is quantized. Trained factors
      (`split_weight=True`) are a different parametrization, with a different optimum.
    - Output gradients have a quarter of the inputs' rank: of the two, only inputs affect the loss,
      and a gradient's error comes mostly from the forward pass. So the same multiply-adds do more
      for inputs.
    - Directions come from sums of rows with random signs: sampled rows miss directions in which few
      tokens are large, and find fewer of the others.
    - The rounding error of weights (fprop, dgrad) is added back along the dominant directions of
      inputs and output gradients, in FP4, as k more channels of the same GEMM (`corrections` has
      the equations): the error that remains meets only the residual of the other operand. If the
      weight is split, the rounding error of inputs is added back along its directions. The rounding
      error of output gradients is unbiased, so it is not added back.
    - Forward tensors are rounded to nearest, gradients stochastically with scales rounded up, so
      that they stay unbiased. Each block of a forward tensor has the best of six scales.
    - In contraction mode each GEMM has its own copies, in blocks along its contraction dimension,
      of the weight too: 16x16 tiles, which fprop and dgrad could share, round more coarsely.
    """
    forward, backward = nearest_forward(config)
    if forward.fmt == NVFP4:
        forward = replace(forward, scale_rule=ScaleRule.SEARCH)
    split = replace(spectral(config, rank, compensated=True), rows=_ROWS, summed=True)
    of_gradients = replace(split, rank=gradient_rank(config, rank, _GRADIENT_SHARE))
    # All rows: a weight has few, compared with the tokens. The sketch, and so the rounding error,
    # differs between steps and processes: errors average out.
    split_weight = replace(split, sample_frac=1.0)

    tensors = config.decompose
    if tensors is None:
        tensors = SPLIT
    if config.split_weight is True:  # stored factors are a split of the weight
        tensors = tuple({*tensors, "weight"})

    def operand(tensor: str, quantizer: Quantizer, conditioner: Conditioner) -> Operand:
        return Operand(quantizer, conditioner) if tensor in tensors else Operand(quantizer)

    scheme = Scheme(
        fprop_input=operand("activation", forward, split),
        fprop_weight=operand("weight", forward, split_weight),
        dgrad_grad_output=operand("gradient", backward, of_gradients),
        corrected=frozenset(_CORRECTED_BY[tensor] for tensor in tensors),
    )
    return with_own_copies(scheme, config.operand_mode or "shared")
