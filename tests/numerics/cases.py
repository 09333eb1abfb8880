"""Every way to quantize that the formats allow, and comparisons to the bit, sign of zero included.

The lists are written out rather than read from the library: a choice that vanishes has to fail.
"""

from __future__ import annotations

import numpy as np
import torch
from reference_formats import Element, midpoints
from torch import Tensor

MX_FORMATS = ["mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8-e4m3", "mxfp8-e5m2"]
FP8_FORMATS = ["fp8-e4m3", "fp8-e5m2"]
E4M3_SCALED = ["nvfp4", "nvint4"]
INT_FORMATS = ["int4", "nvint4", "ufp4"]  # elements without a negative zero
FORMAT_NAMES = ["nvfp4", *MX_FORMATS, *FP8_FORMATS, "int4", "nvint4", "ufp4"]
MIXED_FORMATS = ["if4", "mixfp4"]  # test_mixed_formats.py
BLOCK_SIZES = {"nvfp4": 16, "nvint4": 16, "ufp4": 16, "int4": 32} | dict.fromkeys(MX_FORMATS, 32)

Options = dict[str, object]


def _options() -> list[Options]:
    options: list[Options] = []
    for tile in ("row", "square"):
        for fmt in E4M3_SCALED:
            for scale_rounding in ("nearest", "up"):
                for two_level in (True, False):
                    base = {"fmt": fmt, "tile": tile, "scale_rounding": scale_rounding}
                    options.append({**base, "two_level": two_level})
                    if fmt == "nvfp4":
                        options.append(
                            {**base, "two_level": two_level, "scale_rule": "four-over-six"}
                        )
                if fmt == "nvfp4" and scale_rounding == "nearest":
                    options.append({**base, "two_level": True, "scale_rule": "search"})
                    options.append({**base, "two_level": True, "scale_rule": "unbiased"})
        for fmt in MX_FORMATS:
            for scale_rounding in ("floor", "up", "even"):
                options.append({"fmt": fmt, "tile": tile, "scale_rounding": scale_rounding})
        options += [{"fmt": fmt, "tile": tile} for fmt in ("int4", "ufp4")]
    options.append({"fmt": "int4", "tile": "tensor"})
    for fmt in FP8_FORMATS:
        options += [{"fmt": fmt, "tile": tile} for tile in ("row", "tensor")]
    return options


OPTIONS = _options()
ROW_OPTIONS = [options for options in OPTIONS if options["tile"] == "row"]


def label(value: object) -> str:
    """Test id: the values of a dict of options, or the thing itself."""
    if isinstance(value, dict):
        return "-".join(f"level{1 + v}" if isinstance(v, bool) else str(v) for v in value.values())
    return str(value)


def has_tensor_scale(options: Options) -> bool:
    """Whether one bad element spoils the whole tensor: it shares a scale with all others."""
    return bool(options.get("two_level")) or options["tile"] == "tensor"


def probes(element: Element) -> np.ndarray:
    """Every value, every tie, and the fp32 neighbours of both, with both signs; clamped."""
    points = np.array(element.grid + midpoints(element.grid), np.float32)
    below = np.nextafter(points, np.float32(-np.inf))
    above = np.nextafter(points, np.float32(np.inf))
    near = np.concatenate([points, below, above])
    return np.clip(np.concatenate([near, -near]), -element.max, element.max).astype(np.float32)


def assert_same_bits(actual: Tensor, wanted: Tensor) -> None:
    """Same shape, dtype, values and sign of zero; any NaN equals any NaN."""
    assert actual.shape == wanted.shape
    assert actual.dtype == wanted.dtype
    same = (actual == wanted) & (actual.signbit() == wanted.signbit())
    same |= actual.isnan() & wanted.isnan()
    if not bool(same.all()):
        first = (~same).nonzero()[0].tolist()
        raise AssertionError(
            f"{int((~same).sum())} of {same.numel()} differ, first at {first}: "
            f"{actual[~same][0].item()!r} instead of {wanted[~same][0].item()!r}"
        )


def assert_same_array(actual: np.ndarray, wanted: np.ndarray) -> None:
    assert_same_bits(torch.from_numpy(np.array(actual)), torch.from_numpy(np.array(wanted)))


def fp32(array: np.ndarray) -> Tensor:
    """An fp32 tensor of any array; ml_dtypes arrays included."""
    return torch.from_numpy(np.asarray(array).astype(np.float32))
