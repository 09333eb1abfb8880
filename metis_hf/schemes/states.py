"""Running ranges of a layer's input channels, and the scales and shifts made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from metis_hf.operands.conditioners.channelwise import Channels

DECAY = 0.9  # of the running range, for each optimizer step: a memory of about ten steps


@dataclass(frozen=True)
class RunningRange:
    """Moving average over optimizer steps of each input channel's largest x and largest -x.

    A call uses the average over the steps before its own. Until there is one (the first step, or
    a layer whose weight never changes), it uses its own extremes. Channels with NaN or infinity are
    left out. Two buffers [2 i], the averages and the extremes of the running step, and the mark of
    that step: as soon as the weight is another one, its extremes enter the averages. Maxima do not
    change when a call is repeated, so recomputed forward passes are harmless.

    Each process has its own: DDP broadcasts those of rank 0 with its buffers, and
    `refreshing.synchronize_state` (which MetisCallback calls) takes the maxima over all processes.
    """

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        # In fp32 whatever the default dtype: from_pretrained sets that to the model's.
        nothing = torch.full((2, in_features), -torch.inf, dtype=torch.float32)
        return {
            "running_range": nothing,
            "step_range": nothing.clone(),
            "step_mark": torch.zeros((), dtype=torch.int32),
        }

    def update(self, buffers: Mapping[str, Tensor], x: Tensor, mark: Tensor) -> None:
        running, step, of_step = (buffers[name] for name in STATE)
        new = of_step != mark
        mixed = torch.where(running.isinf(), step, torch.lerp(step, running, DECAY))
        running.copy_(torch.where(new & step.isfinite(), mixed, running))
        own = _extremes(x)
        step.copy_(torch.where(new, own, torch.maximum(step, own)))
        of_step.copy_(mark)

    def range(self, buffers: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value of each channel [i], for a call with input x."""
        running = buffers["running_range"]
        high, low = torch.where(running.isinf(), _extremes(x), running)
        return -low, high


STATE = ("running_range", "step_range", "step_mark")


@dataclass(frozen=True)
class Smoothing(RunningRange):
    """s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) (arXiv 2211.10438, equation 4)."""

    alpha: float = 0.5

    def freeze(self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor) -> Channels:
        low, high = self.range(buffers, x)
        largest = torch.maximum(-low, high)
        of_weight = weight.float().abs().amax(0)
        return Channels(_usable(largest**self.alpha / of_weight ** (1 - self.alpha)))


@dataclass(frozen=True)
class Shifting(RunningRange):
    """z = (min + max) / 2, s = max(1, r / t) with r = (max - min) / 2 (arXiv 2304.09145, eq. 3, 5).

    The paper searches t on calibration data. Here t = sqrt(median(r) max(r)): channels at most that
    wide stay as they are, and the widest gives its weight column half of its excess over the
    median, in logarithms, as SmoothQuant's alpha of one half.
    """

    def freeze(self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor) -> Channels:
        low, high = self.range(buffers, x)
        shift = _finite_or((low + high) / 2, 0.0)
        half = _finite_or((high - low) / 2, 0.0)
        threshold = (half.median() * half.amax()).sqrt()
        return Channels(_usable(half / threshold).clamp_min(1.0), shift)


def _extremes(x: Tensor) -> Tensor:
    """The largest x and -x of each column of x [t i], fp32 [2 i]; -inf where not finite."""
    if x.shape[0] == 0:
        return x.new_full((2, x.shape[1]), -torch.inf, dtype=torch.float32)
    extremes = torch.stack([x.amax(0), -x.amin(0)]).float()
    return extremes.masked_fill(~extremes.isfinite().all(0), -torch.inf)


def _usable(scale: Tensor) -> Tensor:
    """Scales; 1 where a channel has none: its x or its weight is zero, or not finite."""
    return _finite_or(scale.masked_fill(scale <= 0, torch.inf), 1.0)


def _finite_or(values: Tensor, other: float) -> Tensor:
    return torch.where(values.isfinite(), values, torch.full_like(values, other))
