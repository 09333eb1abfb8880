"""Matrix transforms that make quantization easier: spectral split, Hadamard rotation."""

from metis_hf.transforms.hadamard import rotate, unrotate
from metis_hf.transforms.spectral import SpectralSplit, decompose_weight, spectral_split

__all__ = ["SpectralSplit", "decompose_weight", "rotate", "spectral_split", "unrotate"]
