"""Formats as data, rounding, block scaling, noise and error metrics; needs torch only."""

from metis_hf.numerics.formats import E2M1, E4M3, FORMATS, NVFP4, BlockFormat, FloatFormat
from metis_hf.numerics.metrics import relative_error, sqnr_db
from metis_hf.numerics.quantize import Quantizer, Tile, fake_quantize
from metis_hf.numerics.rounding import Rounding, ScaleRounding

__all__ = [
    "E2M1",
    "E4M3",
    "FORMATS",
    "NVFP4",
    "BlockFormat",
    "FloatFormat",
    "Quantizer",
    "Rounding",
    "ScaleRounding",
    "Tile",
    "fake_quantize",
    "relative_error",
    "sqnr_db",
]
