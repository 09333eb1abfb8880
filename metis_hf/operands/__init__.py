"""Operands: how one tensor enters one GEMM, and how a layer stores its weight.

`operand` defines the operand, `conditioner` the base class of transforms around the quantizer, and
`conditioners` the published ones, one family per file. `weight_forms` and `split_weight` define how
weights are stored. Schemes choose the operands of each GEMM.
"""

from metis_hf.operands.conditioner import (
    AroundQuantizer,
    Conditioner,
    Encoded,
    LowRank,
    Part,
)
from metis_hf.operands.conditioners.channelwise import ChannelAffine, Channels, PerChannel
from metis_hf.operands.conditioners.clamped import Clamped
from metis_hf.operands.conditioners.gradient_estimator import DifferentiableEstimator
from metis_hf.operands.conditioners.hadamard import Hadamard
from metis_hf.operands.conditioners.hot_channels import HotChannels
from metis_hf.operands.conditioners.identity import IDENTITY, Identity
from metis_hf.operands.conditioners.mean import MeanRemoved
from metis_hf.operands.conditioners.ms_eden import Contents, RandomHadamard
from metis_hf.operands.conditioners.requantized import Requantized
from metis_hf.operands.conditioners.rotated import FullHadamard, RandomKronecker
from metis_hf.operands.conditioners.spectral import Spectral
from metis_hf.operands.conditioners.static_scale import GivenScale, StaticScale, TensorAmax
from metis_hf.operands.operand import HIGH_PRECISION, Operand, Quantized
from metis_hf.operands.split_weight import SplitWeight
from metis_hf.operands.weight_forms import ClippedWeight, DenseWeight, WeightForm

__all__ = [
    "HIGH_PRECISION",
    "IDENTITY",
    "AroundQuantizer",
    "ChannelAffine",
    "Channels",
    "Clamped",
    "ClippedWeight",
    "Conditioner",
    "Contents",
    "DenseWeight",
    "DifferentiableEstimator",
    "Encoded",
    "FullHadamard",
    "GivenScale",
    "Hadamard",
    "HotChannels",
    "Identity",
    "LowRank",
    "MeanRemoved",
    "Operand",
    "Part",
    "PerChannel",
    "Quantized",
    "RandomHadamard",
    "RandomKronecker",
    "Requantized",
    "Spectral",
    "SplitWeight",
    "StaticScale",
    "TensorAmax",
    "WeightForm",
]
