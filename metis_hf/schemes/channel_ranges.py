"""Running ranges of a layer's input channels, and the scales and shifts computed from them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from metis_hf.operands import Channels
from metis_hf.schemes.noise_keys import CallKeys
from metis_hf.schemes.states import LayerState, StatefulLayer, finite_or

STATE = ("running_range", "step_range", "step_mark")
_NO_MARK = torch.iinfo(torch.int64).min
# Buffer of a mark -> its value after the last `synchronize`; empty when a run is resumed.
_SYNCHRONIZED: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
DECAY = 0.9  # of the running range per optimizer step: it spans about ten steps


@dataclass(frozen=True)
class RunningRange(LayerState):
    """Moving average over optimizer steps of each input channel's largest x and largest -x.

    A call uses the average over earlier steps. Until there is one (in the first step, or if the
    weight never changes), it uses its own extremes. It also does if averaging of models (EMA) has
    turned the initial infinities into NaN. Channels with NaN or infinity are left out. The buffers
    are the averages [2 i], the extremes [2 i] of the current step, and the mark of that step: when
    the weight changes, the extremes enter the averages. Repeating a call does not change maxima, so
    recomputed forward passes are harmless.

    Each process has its own buffers: DDP broadcasts the buffers of rank 0, and `synchronize` takes
    the maxima over the processes that ran the layer in this step, since an expert may have no
    tokens on one of them. The other processes get the same maxima.
    """

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        # Always fp32: from_pretrained sets the default dtype to the model's.
        nothing = torch.full((2, in_features), -torch.inf, dtype=torch.float32)
        return {
            "running_range": nothing,
            "step_range": nothing.clone(),
            "step_mark": torch.zeros((), dtype=torch.int32),
        }

    def update(self, buffers: Mapping[str, Tensor], x: Tensor, mark: Tensor) -> None:
        running, step, of_step = (buffers[name] for name in STATE)
        new = of_step != mark
        mixed = torch.where(running.isfinite(), torch.lerp(step, running, DECAY), step)
        running.copy_(torch.where(new & step.isfinite(), mixed, running))
        own = _extremes(x)
        step.copy_(torch.where(new, own, torch.maximum(step, own)))
        of_step.copy_(mark)

    def synchronize(self, layers: Mapping[str, StatefulLayer]) -> None:
        own = [[layer.buffers[name] for name in STATE] for layer in layers.values()]
        marks = torch.stack([mark for _, _, mark in own]).long()
        # The mark of a layer that has run differs from its mark after the last `synchronize`.
        before = torch.stack([_SYNCHRONIZED.get(mark, mark - 1) for _, _, mark in own])
        has_run = marks != before
        ranges = torch.cat(
            [
                torch.stack([running, step]).masked_fill(~run, -torch.inf).flatten()
                for (running, step, _), run in zip(own, has_run)
            ]
        )
        newest = marks.masked_fill(~has_run, _NO_MARK)
        for each in (ranges, newest):
            dist.all_reduce(each, dist.ReduceOp.MAX)
        parts = ranges.split([2 * step.numel() for _, step, _ in own])
        for (running, step, mark), part, new in zip(own, parts, newest):
            somewhere = new > _NO_MARK
            for buffer, value in zip((running, step), part.view(2, *step.shape)):
                buffer.copy_(torch.where(somewhere, value, buffer))
            mark.copy_(torch.where(somewhere, new, mark))
            _SYNCHRONIZED[mark] = mark.clone()

    def range(self, buffers: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value of each channel [i], for a call with input x."""
        running = buffers["running_range"]
        high, low = torch.where(running.isfinite(), running, _extremes(x))
        return -low, high


@dataclass(frozen=True)
class Smoothing(RunningRange):
    """s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) (arXiv 2211.10438, equation 4)."""

    alpha: float = 0.5

    def freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> Channels:
        low, high = self.range(buffers, x)
        largest = torch.maximum(-low, high)
        of_weight = weight.float().abs().amax(0)
        return Channels(_usable(largest**self.alpha / of_weight ** (1 - self.alpha)))


@dataclass(frozen=True)
class Shifting(RunningRange):
    """z = (min + max) / 2, s = max(1, r / t) with r = (max - min) / 2 (arXiv 2304.09145, eq. 3, 5).

    The paper searches t on calibration data. Here t = sqrt(median(r) max(r)): channels with r <= t
    are not scaled, and the widest moves half of its excess over the median, in logarithms, to its
    weight column, as SmoothQuant does with alpha = 1/2.
    """

    def freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> Channels:
        low, high = self.range(buffers, x)
        shift = finite_or((low + high) / 2, 0.0)
        half = finite_or((high - low) / 2, 0.0)
        threshold = (half.median() * half.amax()).sqrt()
        return Channels(_usable(half / threshold).clamp_min(1.0), shift)


def _extremes(x: Tensor) -> Tensor:
    """Return the largest x and -x of each column of x [t i], fp32 [2 i]; -inf where not finite."""
    if x.shape[0] == 0:
        return x.new_full((2, x.shape[1]), -torch.inf, dtype=torch.float32)
    extremes = torch.stack([x.amax(0), -x.amin(0)]).float()
    return extremes.masked_fill(~extremes.isfinite().all(0), -torch.inf)


def _usable(scale: Tensor) -> Tensor:
    """Return scales, with 1 for channels whose x or weight is zero or not finite."""
    return finite_or(scale.masked_fill(scale <= 0, torch.inf), 1.0)
