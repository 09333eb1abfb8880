"""Every way to quantize that the formats allow, tensors that are hard to quantize, comparisons.

The lists are written out rather than read from the library: a choice that vanishes has to fail.
"""

from __future__ import annotations

import numpy as np
import torch
from reference_formats import Element, midpoints
from torch import Tensor

from numerics.helpers import normal, seeded

MX_FORMATS = ["mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8-e4m3", "mxfp8-e5m2"]
FP8_FORMATS = ["fp8-e4m3", "fp8-e5m2"]
E4M3_SCALED = ["nvfp4", "nvint4"]
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


FLT_MAX = torch.finfo(torch.float32).max


def _inputs() -> dict[str, Tensor]:
    """Shapes, strides, dtypes and numbers, each of which some shortcut gets wrong."""
    base = normal(36, 20, seed=12)
    found = {
        "scalar": normal(dtype=torch.float64),
        "one": normal(1, dtype=torch.bfloat16),
        "short": normal(5, dtype=torch.float16),
        "vector": normal(33),
        "matrix": normal(3, 40, dtype=torch.bfloat16),
        "tall": normal(33, 17, seed=1, dtype=torch.float64),
        "batch": normal(2, 18, 34, seed=2, dtype=torch.float16),
        "every dimension": normal(34, 3, 5, seed=3),
        "rows alike": torch.randn(34, 50, generator=seeded(1)) * 64,
        "rows alike in bf16": torch.randn(20, 50, generator=seeded(2)).bfloat16(),
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "one row": base[:1].expand(9, -1),
        "one column": base[:, :1].expand(-1, 9),
    }
    found |= {str(shape): torch.empty(shape, dtype=torch.bfloat16)
              for shape in ((0,), (0, 32), (3, 0), (2, 0, 4))}  # fmt: skip
    found["zeros"] = torch.zeros(3, 40)
    found["zeros"][1] = -0.0
    found["zero blocks"] = normal(33, 40, seed=13)
    found["zero blocks"][:32, :32] = 0
    found["small signs"] = normal(4, 64, seed=16)
    found["small signs"] *= torch.tensor([0.0, -0.0, 1e-8, 1.0]).repeat(16)
    # Both ends of fp32: scales and their reciprocals are subnormal, or saturate.
    for size in (2.0**-149, 1e-40, 2.0**-127, 2.0**-126, 1e-36, 1e-20, 1e20, 1e36, 3e38, FLT_MAX):
        x = torch.randn(2, 35, generator=seeded(14), dtype=torch.float64)
        found[f"{size:.3g}"] = (x / x.abs().max() * size).clamp(-FLT_MAX, FLT_MAX).float()
    exponents = torch.linspace(-149, 127, 70, dtype=torch.float64).round()
    x = torch.randn(70, 8, generator=seeded(15), dtype=torch.float64).clamp(-1.9, 1.9)
    found["rows of every size"] = (x * torch.exp2(exponents)[:, None]).float()
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((2, 20), torch.finfo(dtype).max, dtype=dtype)
        x[:, 1::2] *= -1
        x[:, ::5] = torch.finfo(dtype).smallest_normal
        found[f"largest {dtype}"] = x
    for bad in (np.nan, np.inf, -np.inf):
        found[str(bad)] = normal(18, 35, seed=17)
        found[str(bad)][3, 20] = bad
    found["beyond fp32"] = torch.ones(4, 8, dtype=torch.float64)
    found["beyond fp32"][0, 3] = 1e300
    return found


INPUTS = _inputs()


def ways(x: Tensor) -> list[Options]:
    """Every way to quantize a tensor of this shape."""
    return [options for options in OPTIONS if x.dim() > 1 or options["tile"] != "square"]


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
