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

SPLIT = ("activation", "gradient")  # tensors, unless the config says otherwise
_GRADIENT_SHARE = 0.25  # of the rank, for output gradients
_ROWS = 16  # sums of rows for each column of the sketch of a subspace
# Split tensor -> the operand beside it that is corrected.
_CORRECTED_BY = {
    "weight": Role.FPROP_INPUT,
    "activation": Role.FPROP_WEIGHT,
    "gradient": Role.DGRAD_WEIGHT,
}


@register_scheme(
    "metis",
    summary="compensated spectral splits; rounding errors added where the other operand is large",
    source="arXiv 2509.00404, and eval/results/report/method.md",
    rank_multiple=16,  # one block
    least_rank=48,
)
def metis(config: MetisConfig, rank: int) -> Scheme:
    """Return the default scheme; eval/results/report/method.md measures each of its choices.

    - Residuals are taken against the quantized low-rank part, Q(x - Q(a) lam Q(v^T)), and so make
      up for the rounding of the factors, at the same number of bits.
    - The weight is one dense matrix and quantized directly: its spectrum is flat beside the
      spectra of inputs and gradients, and a split of it gives less than the same
      multiply-adds spent on their rank. `decompose` can name "weight" too; it is then split
      whenever it is quantized. Trained factors (`split_weight=True`) are another
      parametrization, with another optimum.
    - Output gradients have a quarter of the directions that inputs have: the loss feels inputs
      alone, and a gradient's error comes mostly from the forward pass. So the same multiply-adds
      do more for inputs.
    - Directions come from sums of rows with random signs: rows drawn one by one miss directions in
      which few tokens are large, and find fewer of the others.
    - What rounding took off weights (fprop, dgrad) is added in the dominant directions of inputs
      and output gradients, in FP4 and as k more channels of the same GEMM (`gemm` has the
      equations): their rounding meets only the residual of the other operand. Where the weight is
      split, what rounding took off inputs is added along its directions. The rounding error of
      output gradients is unbiased, so it is not added.
    - Forward tensors are rounded to nearest, gradients stochastically with scales up, so that they
      stay unbiased. A block of a forward tensor has the scale, of six, that fits it best.
    - In contraction mode each GEMM has copies of its own with blocks along what it contracts, the
      weight too: 16x16 tiles, which would be the same for fprop and dgrad, round more coarsely.
    """
    forward, backward = nearest_forward(config)
    if forward.fmt == NVFP4:
        forward = replace(forward, scale_rule=ScaleRule.SEARCH)
    split = replace(spectral(config, rank, compensated=True), rows=_ROWS, summed=True)
    of_gradients = replace(split, rank=gradient_rank(config, rank, _GRADIENT_SHARE))
    # All rows: they are few beside the tokens. The sketch changes with the weight, step by step and
    # process by process, and rounding errors with it: they average out.
    split_weight = replace(split, sample_frac=1.0)

    tensors = config.decompose
    if tensors is None:
        tensors = SPLIT
    if config.split_weight is True:  # stored factors are a split, whatever else is
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
