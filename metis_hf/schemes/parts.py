"""Parts of a scheme: everything that the author of a scheme imports.

A scheme is a function (config, rank) -> `Scheme`, registered by name:

    from metis_hf.schemes.parts import (
        Hadamard, MetisConfig, Operand, Scheme, in_mode, nearest_forward, register_scheme,
    )

    @register_scheme("mine", summary="nearest forward, rotated inputs", source="my notes")
    def mine(config: MetisConfig, rank: int) -> Scheme:
        forward, backward = nearest_forward(config)
        scheme = Scheme(
            fprop_input=Operand(forward, Hadamard()),
            fprop_weight=Operand(forward, Hadamard()),
            dgrad_grad_output=Operand(backward),
        )
        return in_mode(scheme, config.operand_mode or "shared")

- Quantizers: `quantizer` applies the overrides of the config, including the format;
  `nearest_forward` and `stochastic_everywhere` make the usual pairs.
- Operands: `Operand` is a quantizer and a conditioner; `spectral` makes the dynamic split. Your own
  conditioner subclasses `AroundQuantizer` or `Conditioner`.
- Modes: `in_mode`, `with_own_copies` and `rotated_scheme` decide which copy each GEMM takes;
  `refuse_shared` is for schemes with one mode only. `three_operands` makes the usual scheme in one
  call.
- Weights: `DenseWeight`, `ClippedWeight` and `SplitWeight` say how the weight is stored.
- States: a `LayerState` keeps data of a layer over steps.

Load the file by `metis_hf.schemes.import_schemes`, by `--import` on the command line, or, in an
installed package, by an entry point of the group `metis_hf.schemes` that names its module.
"""

from __future__ import annotations

from dataclasses import replace

from metis_hf.config import MetisConfig
from metis_hf.noise import fingerprint, key_of
from metis_hf.numerics import (
    IF4,
    MIXFP4,
    MXFP4,
    NVFP4,
    UFP4,
    BlockFormat,
    CodebookFormat,
    MixedFormat,
    Quantizer,
    Rounding,
    ScaleRounding,
    ScaleRule,
    Tile,
    get_format,
)
from metis_hf.operands import (
    HIGH_PRECISION,
    IDENTITY,
    AroundQuantizer,
    Clamped,
    ClippedWeight,
    Conditioner,
    Contents,
    DenseWeight,
    DifferentiableEstimator,
    FullHadamard,
    Hadamard,
    HotChannels,
    Identity,
    MeanRemoved,
    Operand,
    Part,
    PerChannel,
    RandomHadamard,
    RandomKronecker,
    Requantized,
    Spectral,
    SplitWeight,
    StaticScale,
    WeightForm,
)
from metis_hf.schemes.base import Scheme
from metis_hf.schemes.channel_ranges import Shifting, Smoothing
from metis_hf.schemes.noise_keys import CallKeys
from metis_hf.schemes.registry import (
    BRANCH_MULTIPLE,
    RANK_MULTIPLE,
    register_scheme,
    share_of,
)
from metis_hf.schemes.roles import Role
from metis_hf.schemes.states import LayerState, Oscillation, StaticScales

__all__ = [
    "BRANCH_MULTIPLE",
    "HIGH_PRECISION",
    "IDENTITY",
    "IF4",
    "MIXFP4",
    "MXFP4",
    "NVFP4",
    "RANK_MULTIPLE",
    "UFP4",
    "AroundQuantizer",
    "BlockFormat",
    "CallKeys",
    "Clamped",
    "ClippedWeight",
    "CodebookFormat",
    "Conditioner",
    "Contents",
    "DenseWeight",
    "DifferentiableEstimator",
    "FullHadamard",
    "Hadamard",
    "HotChannels",
    "Identity",
    "LayerState",
    "MeanRemoved",
    "MetisConfig",
    "MixedFormat",
    "Operand",
    "Oscillation",
    "Part",
    "PerChannel",
    "Quantizer",
    "RandomHadamard",
    "RandomKronecker",
    "Requantized",
    "Role",
    "Rounding",
    "ScaleRounding",
    "ScaleRule",
    "Scheme",
    "Shifting",
    "Smoothing",
    "Spectral",
    "SplitWeight",
    "StaticScale",
    "StaticScales",
    "Tile",
    "WeightForm",
    "fingerprint",
    "get_format",
    "gradient_rank",
    "in_mode",
    "key_of",
    "nearest_forward",
    "quantizer",
    "refuse_shared",
    "register_scheme",
    "rotated_scheme",
    "spectral",
    "stochastic_everywhere",
    "three_operands",
    "with_own_copies",
    "with_rule",
]


def quantizer(
    config: MetisConfig,
    *,
    rounding: str,
    scale_rounding: str,
    backward: bool = False,
    fmt: BlockFormat = NVFP4,
) -> Quantizer:
    """Return a quantizer with the scheme's choices, unless the config overrides them.

    Args:
        config: of the layer; its `format`, roundings and `two_level` apply.
        rounding: of elements.
        scale_rounding: of block scales. If the config's format does not support it, as E8M0 scales
            do not round to nearest, that format's default applies.
        backward: whether the tensor is a gradient, to which `config.backward_rounding` applies.
        fmt: the scheme's format.

    Raises:
        ValueError: the format does not exist, or does not support `config.scale_rounding`.
    """
    override = config.backward_rounding if backward else config.forward_rounding
    own, fmt = fmt, get_format(config.format or fmt)
    if fmt != own and scale_rounding not in fmt.scale.roundings:
        scale_rounding = fmt.scale.roundings[0]
    return Quantizer(
        fmt,
        rounding=Rounding(override or rounding),
        scale_rounding=ScaleRounding(config.scale_rounding or scale_rounding),
        two_level=config.two_level and fmt.scale.tensor_scale,
    )


def nearest_forward(config: MetisConfig) -> tuple[Quantizer, Quantizer]:
    """Return (forward, backward): nearest elements and scales, then unbiased gradients.

    For schemes whose papers leave FP4's roundings open. Gradients are rounded stochastically with
    scales rounded up, so that nothing clips and rounding is unbiased.
    """
    forward = quantizer(config, rounding="nearest", scale_rounding="nearest")
    return forward, quantizer(config, rounding="stochastic", scale_rounding="up", backward=True)


def stochastic_everywhere(config: MetisConfig) -> tuple[Quantizer, Quantizer]:
    """Return (forward, backward): stochastic, scales rounded up, as in arXiv 2509.00404."""
    forward = quantizer(config, rounding="stochastic", scale_rounding="up")
    return forward, quantizer(config, rounding="stochastic", scale_rounding="up", backward=True)


def spectral(config: MetisConfig, rank: int, *, compensated: bool) -> Spectral:
    """Return the dynamic split of activations; for gradients, pass `gradient_rank`."""
    return Spectral(
        rank=rank,
        sample_frac=config.sample_frac,
        n_iter=config.n_iter,
        compensated=compensated,
    )


def gradient_rank(config: MetisConfig, rank: int, share: float = 1.0) -> int:
    """Return the rank of output gradients: a share of the layer's rank, rounded up.

    Args:
        config: of the layer; its `gradient_rank_frac` overrides `share`.
        rank: of the layer's other splits.
        share: the scheme's default.
    """
    if config.gradient_rank_frac is not None:
        share = config.gradient_rank_frac
    return share_of(share, rank)


def in_mode(scheme: Scheme, mode: str) -> Scheme:
    """Return a scheme with three operands, in one of the operand modes.

    "shared" does not change it: one copy of each tensor serves all its GEMMs. "contraction" gives
    each GEMM its own copy, in blocks along its contraction dimension; the weight gets square tiles,
    which are the same for fprop and dgrad.
    """
    if mode == "shared":
        return scheme
    weight = scheme.fprop_weight
    if weight.quantizer is not None:
        weight = replace(weight, quantizer=replace(weight.quantizer, tile=Tile.SQUARE))
    return replace(
        scheme,
        fprop_weight=weight,
        wgrad_grad_output=scheme.dgrad_grad_output,
        wgrad_input=scheme.fprop_input,
    )


def three_operands(
    config: MetisConfig,
    quantizers: tuple[Quantizer, Quantizer],
    *,
    input: Conditioner = IDENTITY,
    weight: Conditioner = IDENTITY,
    grad_output: Conditioner = IDENTITY,
) -> Scheme:
    """Return a scheme in the operand mode of the config, by default "shared"; see `in_mode`.

    Args:
        config: of the layer; its `operand_mode` applies.
        quantizers: of the forward and of the backward pass.
        input: conditioner of inputs.
        weight: conditioner of weights.
        grad_output: conditioner of output gradients.
    """
    forward, backward = quantizers
    scheme = Scheme(
        fprop_input=Operand(forward, input),
        fprop_weight=Operand(forward, weight),
        dgrad_grad_output=Operand(backward, grad_output),
    )
    return in_mode(scheme, config.operand_mode or "shared")


def with_own_copies(scheme: Scheme, mode: str) -> Scheme:
    """Do as `in_mode`, but with a separate copy of the weight for dgrad, not square tiles."""
    if mode == "shared":
        return scheme
    return replace(
        scheme,
        dgrad_weight=scheme.fprop_weight,
        wgrad_grad_output=scheme.dgrad_grad_output,
        wgrad_input=scheme.fprop_input,
    )


def with_rule(scheme: Scheme, rule: ScaleRule, *names: str) -> Scheme:
    """Return a scheme with another block scale rule for the operands of these names."""
    changes = {}
    for name in names:
        operand = getattr(scheme, name)
        changes[name] = replace(operand, quantizer=replace(operand.quantizer, scale_rule=rule))
    return replace(scheme, **changes)


def refuse_shared(config: MetisConfig) -> None:
    """Refuse shared mode for a scheme that is defined by its per-GEMM copies.

    Raises:
        ValueError: `operand_mode="shared"`.
    """
    if config.operand_mode == "shared":
        raise ValueError(
            f'scheme "{config.scheme}" quantizes a copy for each GEMM; operand_mode="shared" '
            'would make it a different scheme. Leave operand_mode unset, or use scheme "nvfp4"'
        )


def rotated_scheme(
    config: MetisConfig, quantizers: tuple[Quantizer, Quantizer], rotation: Conditioner
) -> Scheme:
    """Return a scheme that rotates all operands, in the operand mode of the config.

    "shared" rotates the features of all three tensors. "contraction" gives every GEMM its own
    copies, including the weight's, rotated and in blocks along its contraction dimension: the
    rotations cancel, and the GEMM multiplies FP4 matrices.
    """
    forward, backward = quantizers
    scheme = Scheme(
        fprop_input=Operand(forward, rotation),
        fprop_weight=Operand(forward, rotation),
        dgrad_grad_output=Operand(backward, rotation),
    )
    return with_own_copies(scheme, config.operand_mode or "shared")
