"""Split the time of a layer's step by part, by wrapping functions of the package."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from metis_hf.layers import gemm
from metis_hf.layers.gemm import GemmPlan
from metis_hf.numerics import kernels
from metis_hf.operands import Hadamard, Quantized, Spectral, SplitWeight, conditioner, operand
from metis_hf.operands.conditioners import identity, spectral

GEMMS, QUANTIZE, SUBSPACE, PROJECT = "GEMMs", "quantize", "subspace", "project"
LOW_RANK, WEIGHT, ROTATE, REST = "low-rank and residual", "weight factors", "rotate", "rest"
CORRECT = "corrections"
NAMES = (GEMMS, QUANTIZE, SUBSPACE, PROJECT, LOW_RANK, CORRECT, WEIGHT, ROTATE, REST)
# The time of a part excludes calls to functions of other parts.
_WRAPPED: list[tuple[Any, str, str]] = [
    (gemm, "contract", GEMMS),
    (kernels, "fake_quantize", QUANTIZE),
    (identity, "pack", QUANTIZE),
    (identity, "unpack", QUANTIZE),
    (conditioner, "pack", QUANTIZE),
    (conditioner, "unpack", QUANTIZE),
    (operand, "pack_with_values", QUANTIZE),
    (operand, "unpack", QUANTIZE),
    (spectral, "pack", QUANTIZE),
    (spectral, "pack_with_values", QUANTIZE),
    (spectral, "unpack", QUANTIZE),
    (spectral, "find_basis", SUBSPACE),
    (spectral, "project", PROJECT),
    (Spectral, "with_factors", LOW_RANK),
    (Spectral, "encode", LOW_RANK),
    (Spectral, "decode_with_factors", LOW_RANK),
    (GemmPlan, "_term", CORRECT),
    (Quantized, "error_along", CORRECT),
    (gemm, "finish_product", CORRECT),
    (SplitWeight, "quantize", WEIGHT),
    (SplitWeight, "gradients", WEIGHT),
    (Hadamard, "__call__", ROTATE),
    (Hadamard, "encode", ROTATE),
    (Hadamard, "decode", ROTATE),
]


class Stopwatch:
    """Seconds by part; the time of a nested part is subtracted from the enclosing part."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._inner: list[float] = []

    def clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return time.perf_counter()
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()

    def wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self.clock()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                total = self.clock() - started
                self.seconds[part] += total - self._inner.pop()
                if self._inner:
                    self._inner[-1] += total

        return timed


def by_part(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the seconds of each part, including the rest, in one call of `step`."""
    watch = Stopwatch(device)
    with contextlib.ExitStack() as stack:
        for owner, name, part in _WRAPPED:
            wrapped = watch.wrap(getattr(owner, name), part)
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        started = watch.clock()
        step()
        total = watch.clock() - started
    found = {name: watch.seconds.get(name, 0.0) for name in NAMES if name != REST}
    return found | {REST: total - sum(found.values())}


def medians_ms(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part over several steps, in ms."""
    return {name: statistics.median(step[name] for step in steps) * 1e3 for name in NAMES}
