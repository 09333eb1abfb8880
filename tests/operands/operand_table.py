"""Which tensor enters which GEMM, and how, in every scheme: the table that layers are held to."""

from __future__ import annotations

from layers.layer_reference import (
    Slot,
)
from layers.layer_tools import (
    CONTRACTION_ONLY,
    FP4_SCHEME_MODES,
    SCHEME_MODES,
)

from metis_hf.schemes import Role

# y [t o] = x [t i] w [o i]^T;  dx = dy w;  dw = dy^T x. Columns: slot (GEMM and operand), source,
# shape of a block, dimension that it runs along, element rounding, rounding of the block scales,
# conditioner. Scales of NVFP4 have two levels. "split": the weight is stored as u s vh + residual;
# "rotated": the whole dimension that the GEMM contracts is rotated, quantized, rotated back, or the
# other one ("across"). "sylvester": blocks of 16 are rotated without signs.
# "mean": the mean row and the rest are quantized apart; "mean hadamard": the rest is rotated.
# "smooth", "shifted": columns are scaled (and shifted) before and back after, by ranges of x and w.
# "clipped": elements of w beyond a share of their block's largest are cut. "requantized": quantized
# to nearest along the features first. "split smooth": only the residual is quantized, scaled.
# "clamped": elements beyond two quantiles are cut, and the rest of them added. "hot": the residuals
# of the worst channels are quantized too. "random": groups are rotated with signs of the content.
# "spectral": x or dy is split as a lam v^T + residual, with all directions of the layer or a
# "quarter". Each of the three matrices is quantized alone, with the blocks of its line: along its
# last dimension, or its first for "tokens". Residuals are taken against the exact factors
# ("published") or the quantized ones ("compensated"). So is w where it is stored as one matrix,
# from all its rows. "corrected": what quantization took off the operand in the directions of the
# other one's split is quantized as it was, and added to the GEMM.
TABLE = """
bf16, shared
    fprop.input        x   -      -       -           -        direct
    fprop.weight       w   -      -       -           -        direct
    dgrad.grad_output  dy  -      -       -           -        direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
bf16-split, shared
    fprop.input        x   -      -       -           -        direct
    fprop.weight       w   -      -       -           -        split
    dgrad.grad_output  dy  -      -       -           -        direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
nvfp4, shared
    fprop.input        x   1x16   in      stochastic  up       direct
    fprop.weight       w   1x16   in      stochastic  up       direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
nvfp4, contraction
    fprop.input        x   1x16   in      stochastic  up       direct
    fprop.weight       w   16x16  -       stochastic  up       direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  stochastic  up       direct
nvidia, contraction
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   16x16  -       nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  nearest  direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest  hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest  hadamard
metis-paper, shared
    fprop.input        x   1x16   in      stochastic  up       spectral published
    fprop.weight       w   1x16   in      stochastic  up       split published
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral published
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
metis-paper, contraction
    fprop.input        x   1x16   in      stochastic  up       spectral published
    fprop.weight       w   16x16  -       stochastic  up       split published
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral published
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       spectral published
    wgrad.input        x   1x16   tokens  stochastic  up       spectral published
metis, shared
    fprop.input        x   1x16   in      nearest     nearest-search spectral compensated
    fprop.weight       w   1x16   in      nearest     nearest-search direct corrected
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral compensated quarter
    dgrad.weight       = fprop.weight corrected
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
metis, contraction
    fprop.input        x   1x16   in      nearest     nearest-search spectral compensated
    fprop.weight       w   1x16   in      nearest     nearest-search direct corrected
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral compensated quarter
    dgrad.weight       w   1x16   out     nearest     nearest-search direct corrected
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       spectral compensated quarter
    wgrad.input        x   1x16   tokens  nearest     nearest-search spectral compensated
metis of all, shared
    fprop.input        x   1x16   in      nearest     nearest-search spectral compensated corrected
    fprop.weight       w   1x16   in      nearest     nearest-search spectral compensated corrected
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral compensated quarter
    dgrad.weight       = fprop.weight corrected
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
metis of all, contraction
    fprop.input        x   1x16   in      nearest     nearest-search spectral compensated corrected
    fprop.weight       w   1x16   in      nearest     nearest-search spectral compensated corrected
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral compensated quarter
    dgrad.weight       w   1x16   out     nearest     nearest-search spectral compensated corrected
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       spectral compensated quarter
    wgrad.input        x   1x16   tokens  nearest     nearest-search spectral compensated
metis split, shared
    fprop.input        x   1x16   in      nearest     nearest-search spectral compensated corrected
    fprop.weight       w   1x16   in      nearest     nearest-search split compensated corrected
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral compensated quarter
    dgrad.weight       = fprop.weight corrected
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
metis split, contraction
    fprop.input        x   1x16   in      nearest     nearest-search spectral compensated corrected
    fprop.weight       w   1x16   in      nearest     nearest-search split compensated corrected
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral compensated quarter
    dgrad.weight       w   1x16   out     nearest     nearest-search split compensated corrected
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       spectral compensated quarter
    wgrad.input        x   1x16   tokens  nearest     nearest-search spectral compensated
metis of weights, shared
    fprop.input        x   1x16   in      nearest     nearest-search direct corrected
    fprop.weight       w   1x16   in      nearest     nearest-search spectral compensated
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
metis of weights, contraction
    fprop.input        x   1x16   in      nearest     nearest-search direct corrected
    fprop.weight       w   1x16   in      nearest     nearest-search spectral compensated
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       w   1x16   out     nearest     nearest-search spectral compensated
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  nearest     nearest-search direct
metis of activations, shared
    fprop.input        x   1x16   in      nearest     nearest-search spectral compensated
    fprop.weight       w   1x16   in      nearest     nearest-search direct corrected
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
metis of activations, contraction
    fprop.input        x   1x16   in      nearest     nearest-search spectral compensated
    fprop.weight       w   1x16   in      nearest     nearest-search direct corrected
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       w   1x16   out     nearest     nearest-search direct
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  nearest     nearest-search spectral compensated
metis-paper dense, shared
    fprop.input        x   1x16   in      stochastic  up       spectral published
    fprop.weight       w   1x16   in      stochastic  up       direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral published
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
metis-paper dense, contraction
    fprop.input        x   1x16   in      stochastic  up       spectral published
    fprop.weight       w   16x16  -       stochastic  up       direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       spectral published
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       spectral published
    wgrad.input        x   1x16   tokens  stochastic  up       spectral published
nvidia split, contraction
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   16x16  -       nearest     nearest  split compensated
    dgrad.grad_output  dy  1x16   out     stochastic  nearest  direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest  hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest  hadamard
quarot split, contraction
    fprop.input        x   1x16   in      nearest     nearest  rotated hadamard
    fprop.weight       w   1x16   in      nearest     nearest  split compensated
    dgrad.grad_output  dy  1x16   out     stochastic  up       rotated hadamard
    dgrad.weight       w   1x16   out     nearest     nearest  split compensated
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       rotated hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest  rotated hadamard
nvfp4-rne, shared
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   1x16   in      nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
nvfp4-rne, contraction
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   16x16  -       nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  nearest     nearest  direct
mxfp4, shared
    fprop.input        x   1x32   in      nearest     floor    direct
    fprop.weight       w   1x32   in      nearest     floor    direct
    dgrad.grad_output  dy  1x32   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
mxfp4, contraction
    fprop.input        x   1x32   in      nearest     floor    direct
    fprop.weight       w   32x32  -       nearest     floor    direct
    dgrad.grad_output  dy  1x32   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x32   tokens  stochastic  up       direct
    wgrad.input        x   1x32   tokens  nearest     floor    direct
four-over-six, contraction
    fprop.input        x   1x16   in      nearest     nearest-4/6 direct
    fprop.weight       w   16x16  -       nearest     nearest-4/6 direct
    dgrad.grad_output  dy  1x16   out     stochastic  nearest  direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest  hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest-4/6 hadamard
nvidia-paper, shared
    fprop.input        x   1x16   in      stochastic  up       rotated hadamard
    fprop.weight       w   1x16   in      stochastic  up       rotated hadamard
    dgrad.grad_output  dy  1x16   out     stochastic  up       rotated hadamard
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
nvidia-paper, contraction
    fprop.input        x   1x16   in      stochastic  up       rotated hadamard
    fprop.weight       w   1x16   in      stochastic  up       rotated hadamard
    dgrad.grad_output  dy  1x16   out     stochastic  up       rotated hadamard
    dgrad.weight       w   1x16   out     stochastic  up       rotated hadamard
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       rotated hadamard
    wgrad.input        x   1x16   tokens  stochastic  up       rotated hadamard
quarot, shared
    fprop.input        x   1x16   in      nearest     nearest  rotated hadamard
    fprop.weight       w   1x16   in      nearest     nearest  rotated hadamard
    dgrad.grad_output  dy  1x16   out     stochastic  up       rotated hadamard
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
quarot, contraction
    fprop.input        x   1x16   in      nearest     nearest  rotated hadamard
    fprop.weight       w   1x16   in      nearest     nearest  rotated hadamard
    dgrad.grad_output  dy  1x16   out     stochastic  up       rotated hadamard
    dgrad.weight       w   1x16   out     nearest     nearest  rotated hadamard
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       rotated hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest  rotated hadamard
quip, shared
    fprop.input        x   1x16   in      nearest     nearest  rotated kronecker
    fprop.weight       w   1x16   in      nearest     nearest  rotated kronecker
    dgrad.grad_output  dy  1x16   out     stochastic  up       rotated kronecker
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
quip, contraction
    fprop.input        x   1x16   in      nearest     nearest  rotated kronecker
    fprop.weight       w   1x16   in      nearest     nearest  rotated kronecker
    dgrad.grad_output  dy  1x16   out     stochastic  up       rotated kronecker
    dgrad.weight       w   1x16   out     nearest     nearest  rotated kronecker
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       rotated kronecker
    wgrad.input        x   1x16   tokens  nearest     nearest  rotated kronecker
halo, shared
    fprop.input        x   1x16   in      nearest     nearest  rotated hadamard
    fprop.weight       w   1x16   in      nearest     nearest  rotated hadamard
    dgrad.grad_output  dy  1x16   out     stochastic  up       rotated hadamard across
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
halo, contraction
    fprop.input        x   1x16   in      nearest     nearest  rotated hadamard
    fprop.weight       w   16x16  -       nearest     nearest  rotated hadamard
    dgrad.grad_output  dy  1x16   out     stochastic  up       rotated hadamard across
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  nearest     nearest  rotated hadamard across
mean, shared
    fprop.input        x   1x16   in      stochastic  up       mean
    fprop.weight       w   1x16   in      stochastic  up       direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       mean
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
mean, contraction
    fprop.input        x   1x16   in      stochastic  up       mean
    fprop.weight       w   16x16  -       stochastic  up       direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       mean
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       mean
    wgrad.input        x   1x16   tokens  stochastic  up       mean
smoothquant, shared
    fprop.input        x   1x16   in      nearest     nearest  smooth
    fprop.weight       w   1x16   in      nearest     nearest  smooth
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
smoothquant, contraction
    fprop.input        x   1x16   in      nearest     nearest  smooth
    fprop.weight       w   16x16  -       nearest     nearest  smooth
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  nearest     nearest  smooth
outlier-suppression-plus, shared
    fprop.input        x   1x16   in      nearest     nearest  shifted
    fprop.weight       w   1x16   in      nearest     nearest  shifted
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
outlier-suppression-plus, contraction
    fprop.input        x   1x16   in      nearest     nearest  shifted
    fprop.weight       w   16x16  -       nearest     nearest  shifted
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  nearest     nearest  shifted
omniquant, shared
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   1x16   in      nearest     nearest  clipped
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
omniquant, contraction
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   16x16  -       nearest     nearest  clipped
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  nearest     nearest  direct
svdquant, shared
    fprop.input        x   1x16   in      nearest     nearest  smooth
    fprop.weight       w   1x16   in      nearest     nearest  split smooth
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
svdquant, contraction
    fprop.input        x   1x16   in      nearest     nearest  smooth
    fprop.weight       w   16x16  -       nearest     nearest  split smooth
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  nearest     nearest  smooth
tetrajet2, contraction
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   1x16   in      nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  nearest  hadamard
    dgrad.weight       w   1x16   out     stochastic  nearest  requantized hadamard
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest  hadamard
    wgrad.input        x   1x16   tokens  stochastic  nearest  requantized hadamard
occ, shared
    fprop.input        x   1x16   in      nearest     nearest  clamped
    fprop.weight       w   1x16   in      nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
occ, contraction
    fprop.input        x   1x16   in      nearest     nearest  clamped
    fprop.weight       w   16x16  -       nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  up       direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  up       direct
    wgrad.input        x   1x16   tokens  nearest     nearest  clamped
hot-channel, contraction
    fprop.input        x   1x16   in      nearest     nearest  hot
    fprop.weight       w   16x16  -       nearest     nearest  hot
    dgrad.grad_output  dy  1x16   out     stochastic  nearest  direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest  hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest  hadamard
w4a4, shared
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   1x16   in      nearest     nearest-search direct
    dgrad.grad_output  dy  -      -       -           -        direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
w4a16, shared
    fprop.input        x   -      -       -           -        direct
    fprop.weight       w   1x16   in      nearest     nearest-search direct
    dgrad.grad_output  dy  -      -       -           -        direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  = dgrad.grad_output
    wgrad.input        = fprop.input
quartet2, contraction
    fprop.input        x   1x16   in      nearest     nearest-4/6 direct
    fprop.weight       w   1x16   in      nearest     nearest-4/6 direct
    dgrad.grad_output  dy  1x16   out     nearest     nearest-eden random
    dgrad.weight       w   1x16   out     nearest     nearest-eden requantized random
    wgrad.grad_output  dy  1x16   tokens  nearest     nearest-eden random
    wgrad.input        x   1x16   tokens  nearest     nearest-eden requantized random
averis, contraction
    fprop.input        x   1x16   in      nearest     nearest  mean
    fprop.weight       w   16x16  -       nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  nearest  mean
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest  mean
    wgrad.input        x   1x16   tokens  nearest     nearest  mean
averis-hadamard, contraction
    fprop.input        x   1x16   in      nearest     nearest  mean
    fprop.weight       w   16x16  -       nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  nearest  mean
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest  mean hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest  mean hadamard
ufp4, contraction
    fprop.input        x   1x16u  in      nearest     nearest  hadamard
    fprop.weight       w   1x16u  in      nearest     nearest  hadamard
    dgrad.grad_output  dy  1x16u  out     stochastic  nearest  hadamard
    dgrad.weight       w   1x16u  out     nearest     nearest  hadamard
    wgrad.grad_output  dy  1x16u  tokens  stochastic  nearest  hadamard
    wgrad.input        x   1x16u  tokens  nearest     nearest  hadamard
mxfp4-hadamard, contraction
    fprop.input        x   1x32   in      nearest     even     sylvester
    fprop.weight       w   1x32   in      nearest     even     sylvester
    dgrad.grad_output  dy  1x32   out     nearest     even     sylvester
    dgrad.weight       w   1x32   out     nearest     even     sylvester
    wgrad.grad_output  dy  1x32   tokens  nearest     even     sylvester
    wgrad.input        x   1x32   tokens  nearest     even     sylvester
nvidia-unbiased, contraction
    fprop.input        x   1x16   in      nearest     nearest  direct
    fprop.weight       w   16x16  -       nearest     nearest  direct
    dgrad.grad_output  dy  1x16   out     stochastic  nearest-unbiased direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest-unbiased hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest  hadamard
if4, contraction
    fprop.input        x   1x16i  in      nearest     nearest  direct
    fprop.weight       w   16x16i -       nearest     nearest  direct
    dgrad.grad_output  dy  1x16i  out     stochastic  nearest-unbiased direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16i  tokens  stochastic  nearest-unbiased hadamard
    wgrad.input        x   1x16i  tokens  nearest     nearest  hadamard
mixfp4, contraction
    fprop.input        x   1x16m  in      nearest     nearest  direct
    fprop.weight       w   16x16m -       nearest     nearest  direct
    dgrad.grad_output  dy  1x16m  out     stochastic  nearest  direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16m  tokens  stochastic  nearest  hadamard
    wgrad.input        x   1x16m  tokens  nearest     nearest  hadamard
four-over-six-unbiased, contraction
    fprop.input        x   1x16   in      nearest     nearest-4/6 direct
    fprop.weight       w   16x16  -       nearest     nearest-4/6 direct
    dgrad.grad_output  dy  1x16   out     stochastic  nearest-unbiased direct
    dgrad.weight       = fprop.weight
    wgrad.grad_output  dy  1x16   tokens  stochastic  nearest-unbiased hadamard
    wgrad.input        x   1x16   tokens  nearest     nearest  hadamard
"""


def parse(table: str) -> dict[tuple[str, str], dict[str, Slot]]:
    """(scheme, mode) -> slot name -> line."""
    sections: dict[tuple[str, str], dict[str, Slot]] = {}
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            scheme, mode = line.split(", ")
            section = sections.setdefault((scheme, mode), {})
            continue
        slot, source, *rest = line.split(maxsplit=6)
        if source == "=":
            rest = [" ".join(rest)]
            reused, *corrected = rest[0].split()
            section[slot] = Slot(slot, "", reuses=reused, corrected=corrected == ["corrected"])
            continue
        *rest, conditioner = rest
        corrected = conditioner.endswith(" corrected")
        conditioner = conditioner.removesuffix(" corrected")
        section[slot] = Slot(slot, source, *rest, conditioner, corrected=corrected)
    # Nothing is quantized in backward, so that the mode changes nothing.
    for scheme in ("bf16", "bf16-split", "w4a4", "w4a16"):
        sections[scheme, "contraction"] = sections[scheme, "shared"]
    return sections


OPERANDS = parse(TABLE)
# What the table has beside the registered schemes.
VARIANTS = {
    "metis split": {"scheme": "metis", "split_weight": True},
    "metis of all": {"scheme": "metis", "decompose": ("weight", "activation", "gradient")},
    "metis of weights": {"scheme": "metis", "decompose": ("weight",)},
    "metis of activations": {"scheme": "metis", "decompose": ("activation",)},
    "metis-paper dense": {"scheme": "metis-paper", "split_weight": False},
    "nvidia split": {"scheme": "nvidia", "split_weight": True},
    "quarot split": {"scheme": "quarot", "split_weight": True},
}
VARIANT_MODES = [
    (name, mode)
    for name in VARIANTS
    for mode in ("shared", "contraction")
    if name.split()[0] not in {*CONTRACTION_ONLY, "quarot"} or mode == "contraction"
]
ALL_MODES = [*SCHEME_MODES, *VARIANT_MODES]
ALL_FP4_MODES = [*FP4_SCHEME_MODES, *VARIANT_MODES]


def options(scheme: str) -> dict:
    """The config's fields for a name in the table."""
    return VARIANTS.get(scheme, {"scheme": scheme})


SLOTS = ["fprop.input", "fprop.weight", "dgrad.grad_output"]
SLOTS += ["dgrad.weight", "wgrad.grad_output", "wgrad.input"]

# No dimension is a multiple of 8: every block shape has an incomplete last one.
TOKENS, IN, OUT = 37, 70, 52
# Terms go through one sum over each dimension at most, and a few single operations each time.
ROUNDINGS = TOKENS + IN + OUT + 32
RANKS = {"thin": {"rank_frac": 0.05, "rank_multiple": 1}, "full block": {"rank_multiple": 16}}
FAR = 16  # modes that differ by this many tolerances cannot be taken for each other


def slot_of(role: Role) -> str:
    gemm, operand = role.name.lower().split("_", 1)
    return f"{gemm}.{operand}"
