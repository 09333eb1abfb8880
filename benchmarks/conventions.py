"""NVFP4 as other implementations compute it, each reduced to the lines that differ.

All functions take x [r c] (fp32, c a multiple of 16), round to nearest and return `Blocks` with
codes and scales in the shape of x. Sources: TransformerEngine d0067d0, torchao 0.18.0, NVIDIA
ModelOpt 0.47.0, fouroversix dadfad6, Quartet-II 8776a90, the code released with arXiv 2509.00404.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metis_hf.numerics import E2M1, E4M3, NVFP4, Quantizer
from metis_hf.numerics.definition import Blocks
from metis_hf.numerics.formats import FLT_MAX
from metis_hf.numerics.rounding import round_nearest

TORCHAO_SMALLEST = 2.0**-6  # E4M3's smallest normal value
MODELOPT_SMALLEST = 2.0**-9  # E4M3's smallest value


def as_rows(blocks: Blocks) -> Blocks:
    codes = blocks.codes.flatten(-2)
    return Blocks(codes, blocks.scale.expand(blocks.codes.shape).flatten(-2), blocks.global_scale)


def library(**options) -> Callable[[Tensor], Blocks]:
    quantizer = Quantizer(NVFP4, **options)
    return lambda x: as_rows(quantizer.blocks(x))


def nvfp4(
    x: Tensor,
    *,
    largest: float = E4M3.max,
    smallest: float = 0.0,
    divide: bool = False,
    round_twice: bool = False,
    clamp: bool = True,
) -> Blocks:
    """Quantize to two-level NVFP4, with the details that differ between implementations.

    Args:
        largest: block scale of the tensor's largest block.
        smallest: lower bound of block scales.
        divide: x / (scale / S) instead of x times the rounded reciprocal.
        round_twice: (amax / 6) * S instead of amax * (S / 6).
        clamp: clamp scaled elements to 6; otherwise a value that rounds to 8 does not fit in three
            bits and packs to zero.
    """
    blocks = x.unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    six = torch.full_like(amax, E2M1.max)
    encode = torch.full_like(amax[:1, :1], E2M1.max * largest) / amax.amax()
    wanted = (amax / six) * encode if round_twice else amax * (encode * (1 / E2M1.max))
    scale = wanted.clamp(smallest, E4M3.max).to(torch.float8_e4m3fn).float()
    decoded = scale * encode.reciprocal()
    scaled = blocks / decoded if divide else blocks * decoded.reciprocal().clamp(max=FLT_MAX)
    if clamp:
        codes = round_nearest(scaled.clamp(-E2M1.max, E2M1.max).nan_to_num(), E2M1)
    else:
        codes = round_nearest(scaled.nan_to_num().clamp(-8, 8), E2M1)
        codes = codes.masked_fill(codes.abs() > E2M1.max, 0.0)
    return as_rows(Blocks(codes, scale, encode.reciprocal().reshape(())))


def fp32_scale(x: Tensor, *, decode_in_e4m3: bool) -> Blocks:
    """Encode with an unrounded block scale; decode with that scale or with its E4M3 rounding."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = blocks.abs().amax(-1, keepdim=True) / E2M1.max + 1e-9
    codes = round_nearest((blocks / scale).clamp(-E2M1.max, E2M1.max), E2M1)
    if decode_in_e4m3:
        scale = scale.to(torch.float8_e4m3fn).float()
    return as_rows(Blocks(codes, scale, None))


def kernel_order(x: Tensor) -> Tensor:
    """Decode the same bits in the order of TransformerEngine's dequantize kernel."""
    blocks = as_rows(Quantizer().blocks(x))
    return blocks.codes * ((blocks.scale * x.abs().amax()) * (1 / (E2M1.max * E4M3.max)))


# name -> (source, x -> blocks)
CONVENTIONS: dict[str, tuple[str, Callable[[Tensor], Blocks]]] = {
    "ours": ("TransformerEngine", library()),
    "scale rounded up": ("the paper", library(scale_rounding="up")),
    "no tensor scale": ("the paper's text", library(two_level=False)),
    "fp32 block scale": (
        "the paper's code, early",
        lambda x: fp32_scale(x, decode_in_e4m3=False),
    ),
    "fp32 to encode, E4M3 to decode": (
        "the paper's code, later",
        lambda x: fp32_scale(x, decode_in_e4m3=True),
    ),
    "6 or 4 by squared error": ("Four Over Six", library(scale_rule="four-over-six")),
    "scale product rounded twice": ("ports of the kernels", lambda x: nvfp4(x, round_twice=True)),
    "scales at least 2^-6": ("torchao", lambda x: nvfp4(x, smallest=TORCHAO_SMALLEST)),
    "division, scales at least 2^-9": (
        "ModelOpt",
        lambda x: nvfp4(x, divide=True, smallest=MODELOPT_SMALLEST),
    ),
    "largest scale 447.99": ("Quartet II", lambda x: nvfp4(x, largest=447.99)),
    "no clamp at 6": ("fouroversix, static", lambda x: nvfp4(x, clamp=False)),
}
