"""Formats as data, rounding, block scaling, packed storage and error metrics; needs torch only."""

from metis_hf.numerics.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FORMATS,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    NVINT4,
    BlockFormat,
    FloatFormat,
    IntFormat,
    ScaleFormat,
    get_format,
)
from metis_hf.numerics.layout import Tile
from metis_hf.numerics.metrics import relative_error, sqnr_db
from metis_hf.numerics.quantize import Quantizer, fake_quantize
from metis_hf.numerics.rounding import Rounding
from metis_hf.numerics.scaling import ScaleRounding, ScaleRule
from metis_hf.numerics.storage import QuantizedTensor, dequantize, quantize

__all__ = [
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "FORMATS",
    "FP8_E4M3",
    "FP8_E5M2",
    "INT4",
    "MXFP4",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "NVFP4",
    "NVINT4",
    "BlockFormat",
    "FloatFormat",
    "IntFormat",
    "QuantizedTensor",
    "Quantizer",
    "Rounding",
    "ScaleFormat",
    "ScaleRounding",
    "ScaleRule",
    "Tile",
    "dequantize",
    "fake_quantize",
    "get_format",
    "quantize",
    "relative_error",
    "sqnr_db",
]
