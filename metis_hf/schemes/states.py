"""States that schemes keep of a layer from step to step: the base class, and those there are.

Scales of whole tensors that calibration fixes, running ranges of input channels with the scales and
shifts made of them, and the paths of weights that oscillate. A scheme names its state; layers hold
the buffers, and call the hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from metis_hf.operands import Channels, TensorAmax


class StatefulLayer(Protocol):
    """A layer between two optimizer steps, as the hooks of its state see it."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers of the state by name; hooks write to them in place."""

    @property
    def is_split(self) -> bool:
        """Return whether the weight is stored as factors and a residual."""

    def weight(self) -> Tensor:
        """Return the stored matrix [o i], in fp32, gathered where it is sharded."""

    def quantize(self, weight: Tensor) -> Tensor:
        """Return a matrix [o i] as the forward pass quantizes the weight in evaluation, fp32."""

    def write(self, weight: Tensor) -> None:
        """Give the stored matrix another value [o i], the same on every process."""


class LayerState:
    """A scheme's memory of a layer beside its weight, in buffers that are saved with the model.

    Every method has a default that does nothing; subclasses are frozen dataclasses, which hold
    settings and no tensors. Layers whose states are equal are handled together.

    Every call of the layer takes `freeze`'s result into its plan, and the plan binds it to each
    conditioner (`Conditioner.bind`): forward and backward see the same. A recomputed forward pass,
    and further micro-batches of a step, must get what the first one got. So `update` may only add
    up (idempotently) what later steps will use; it knows a new step by `mark`, which is equal as
    long as the weight is. MetisCallback calls `synchronize` and then `after_step` when the
    optimizer has made its step; a loop of one's own does that by `layer_states.after_step`.

    Attributes:
        writes_weights: what in `after_step` writes to weights, by its name for messages; engines
            that train copies of the weights are then refused.
    """

    writes_weights: ClassVar[str] = ""

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        """Return the buffers by name, as they are before the first call."""
        return {}

    def update(self, buffers: Mapping[str, Tensor], x: Tensor, mark: Tensor) -> None:
        """Take note of the input x [t i] of a call in training, in place, without host sync."""

    def freeze(self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor) -> Any:
        """Return what a call with input x [t i] takes for weight [o i]; None: nothing."""
        return None

    def update_and_freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, mark: Tensor
    ) -> Any:
        """Do `update` and then `freeze` for a call in training; override to read x only once."""
        self.update(buffers, x, mark)
        return self.freeze(buffers, x, weight)

    def synchronize(self, layers: Mapping[str, StatefulLayer]) -> None:
        """Make the processes agree on the buffers of these layers; only where there are several.

        All processes call it together, with the same layers in the same order.
        """

    def after_step(
        self, layers: Mapping[str, StatefulLayer], step: int, max_steps: int
    ) -> dict[str, dict[str, float]]:
        """Do what has to be done between two optimizer steps. All processes call it together.

        Args:
            layers: those that keep this state, by name.
            step: optimizer steps taken so far, the last one included.
            max_steps: of the whole training.

        Returns:
            Figures for the log: name -> layer -> value; the log has their means.
        """
        return {}


@dataclass(frozen=True)
class StaticScales(LayerState):
    """The amax of input and weight that tensor scales are made of, fixed before deployment.

    Until they are frozen, a call takes the amax of its own input and weight, so that nothing is
    clipped and a recomputed call does as the first one did. `input_amax` meanwhile follows the
    largest of all inputs in training. `calibrate` and `freeze_scales` fix both; what lies beyond is
    then clipped. NaN and infinity are left out. Three buffers of one number: `input_amax` and
    `weight_amax`, 0 until there is one, and `scales_frozen`, 0 or 1.

    Each process notes its own inputs; `synchronize` takes the largest of all processes.

    Args:
        input: whether inputs are quantized at all.
    """

    input: bool = True

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        return {
            "input_amax": torch.zeros((), dtype=torch.float32),
            "weight_amax": torch.zeros((), dtype=torch.float32),
            "scales_frozen": torch.zeros((), dtype=torch.int32),
        }

    def update(self, buffers: Mapping[str, Tensor], x: Tensor, mark: Tensor) -> None:
        if self.input and not is_known_set(buffers["scales_frozen"]):
            self._note(buffers, largest_magnitude(x))

    def freeze(self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor) -> TensorAmax:
        known = buffers["input_amax"], buffers["weight_amax"]
        if is_known_set(buffers["scales_frozen"]):
            return TensorAmax(*known, fixed=not any(each.is_inference() for each in known))
        return self._of_call(buffers, largest_magnitude(x) if self.input else known[0], weight)

    def update_and_freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, mark: Tensor
    ) -> TensorAmax:
        if not self.input or is_known_set(buffers["scales_frozen"]):
            return self.freeze(buffers, x, weight)
        own = largest_magnitude(x)
        self._note(buffers, own)
        return self._of_call(buffers, own, weight)

    @staticmethod
    def _note(buffers: Mapping[str, Tensor], own: Tensor) -> None:
        known = buffers["input_amax"]
        known.copy_(_until_frozen(buffers, torch.maximum(known, own), known))

    @staticmethod
    def _of_call(buffers: Mapping[str, Tensor], own: Tensor, weight: Tensor) -> TensorAmax:
        return TensorAmax(
            _until_frozen(buffers, own, buffers["input_amax"]),
            _until_frozen(buffers, largest_magnitude(weight), buffers["weight_amax"]),
        )

    def synchronize(self, layers: Mapping[str, StatefulLayer]) -> None:
        largest = torch.stack([layer.buffers["input_amax"] for layer in layers.values()])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        for layer, amax in zip(layers.values(), largest):
            layer.buffers["input_amax"].copy_(amax)


def _until_frozen(buffers: Mapping[str, Tensor], own: Tensor, fixed: Tensor) -> Tensor:
    """Return `own` until the scales are frozen, and `fixed` from then on."""
    return torch.where(buffers["scales_frozen"] > 0, fixed, own)


# What was last read of flags: where they were, their version, and whether they were set.
_READ: MutableMapping[Tensor, tuple[int, int, bool]] = WeakTensorKeyDictionary()


def is_known_set(flag: Tensor) -> bool:
    """Return whether a flag that seldom changes is set, as far as it costs no step any time.

    A flag is read from its device once after each change of it. False also where reading is
    impossible, or would wait in every step: while a graph is traced or captured, for tensors
    without values, and with several processes, as DDP writes buffers before each forward pass.

    Args:
        flag: 0-dim integers, written in place.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or type(flag) is not Tensor
        or flag.is_meta
        or flag.is_inference()
        or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        or (flag.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return False
    found = _READ.get(flag)
    if found is None or found[:2] != (flag.data_ptr(), flag._version):
        found = flag.data_ptr(), flag._version, bool(flag.item())
        _READ[flag] = found
    return found[2]


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, 0-dim fp32; 0 of an empty or not finite one."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return _finite_or(torch.linalg.vector_norm(x, torch.inf).float(), 0.0)


DECAY = 0.9  # of the running range, for each optimizer step: a memory of about ten steps


@dataclass(frozen=True)
class RunningRange(LayerState):
    """Moving average over optimizer steps of each input channel's largest x and largest -x.

    A call uses the average over the steps before its own. Until there is one (the first step, or
    a layer whose weight never changes), it uses its own extremes. Channels with NaN or infinity are
    left out. Two buffers [2 i], the averages and the extremes of the running step, and the mark of
    that step: as soon as the weight is another one, its extremes enter the averages. Maxima do not
    change when a call is repeated, so recomputed forward passes are harmless.

    Each process has its own: DDP broadcasts those of rank 0 with its buffers, and `synchronize`
    takes the maxima over all processes that have run the layer in this step: an expert may have no
    tokens on one. The others get what these have.
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

    def synchronize(self, layers: Mapping[str, StatefulLayer]) -> None:
        own = [[layer.buffers[name] for name in STATE] for layer in layers.values()]
        marks = torch.stack([mark for _, _, mark in own]).long()
        # The mark of a layer that has run is another one than after the last time.
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
        high, low = torch.where(running.isinf(), _extremes(x), running)
        return -low, high


STATE = ("running_range", "step_range", "step_mark")
_NO_MARK = torch.iinfo(torch.int64).min
# Marks as the last `synchronize` left them, by their buffers; nothing of a run that is resumed.
_SYNCHRONIZED: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


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


@dataclass(frozen=True)
class Oscillation(LayerState):
    """OsciReset (arXiv 2510.27527): weights that flip between two FP4 values are put onto one.

    Late in training a weight near the border of two bins moves little, and its quantized value
    jumps each time it crosses. Over a window of steps both paths are measured, |w_t - w_(t-1)| and
    |Q(w_t) - Q(w_(t-1))| summed; where their ratio is high the weight is set to Q(w), the centre of
    its bin. Optimizer states stay as they are. Weights that are stored split are left alone, since
    no element of w_hat then belongs to one of theirs.

    Three buffers [o i], 12 bytes for each weight, on every process: the weight before the last step
    and the two paths. They are saved with the model, so that a resumed run goes on where the saved
    one was.

    Args:
        period: optimizer steps from the start of one window to that of the next.
        window: steps over which paths are measured; the reset comes at its end.
        threshold: ratio of the paths from which a weight counts as oscillating.
        start: share of all steps before the first window.
    """

    period: int = 200
    window: int = 50
    threshold: float = 8.0
    start: float = 0.6

    writes_weights: ClassVar[str] = "OsciReset"

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        names = ("previous_weight", "weight_path", "quantized_path")
        shape, kind = (out_features, in_features), torch.float32
        return {name: torch.zeros(shape, dtype=kind) for name in names}

    def after_step(
        self, layers: Mapping[str, StatefulLayer], step: int, max_steps: int
    ) -> dict[str, dict[str, float]]:
        """Measure paths, and resets oscillating weights at the end of a window.

        Returns:
            "oscillation_reset": the share of each layer's weights that was reset.
        """
        phase = step % self.period
        begin = step - phase  # after the first step at the earliest
        if begin < max(self.start * max_steps, 1) or phase > self.window:
            return {}
        shares = {}
        for name, layer in layers.items():
            if layer.is_split:
                continue
            weight = layer.weight()
            quantized = layer.quantize(weight)
            if phase == 0:
                self._begin(layer.buffers, weight)
            else:
                self._follow(layer, weight, quantized)
            if phase == self.window:
                shares[name] = self._reset(layer, weight, quantized)
        return {"oscillation_reset": shares} if shares else {}

    def ratio(self, buffers: Mapping[str, Tensor]) -> Tensor:
        """Return the quantized weight's path over the weight's, [o i]; 0 where neither moved."""
        ratio = buffers["quantized_path"] / buffers["weight_path"]
        return ratio.masked_fill_(buffers["weight_path"] == 0, 0.0)

    @staticmethod
    def _begin(buffers: Mapping[str, Tensor], weight: Tensor) -> None:
        buffers["previous_weight"].copy_(weight)
        for name in ("weight_path", "quantized_path"):
            buffers[name].zero_()

    @staticmethod
    def _follow(layer: StatefulLayer, weight: Tensor, quantized: Tensor) -> None:
        buffers = layer.buffers
        previous = buffers["previous_weight"]
        buffers["weight_path"].add_((weight - previous).abs())
        buffers["quantized_path"].add_((quantized - layer.quantize(previous)).abs())
        previous.copy_(weight)

    def _reset(self, layer: StatefulLayer, weight: Tensor, quantized: Tensor) -> float:
        oscillates = self.ratio(layer.buffers) >= self.threshold
        layer.write(torch.where(oscillates, quantized, weight))
        return oscillates.float().mean().item()


def _extremes(x: Tensor) -> Tensor:
    """Return the largest x and -x of each column of x [t i], fp32 [2 i]; -inf where not finite."""
    if x.shape[0] == 0:
        return x.new_full((2, x.shape[1]), -torch.inf, dtype=torch.float32)
    extremes = torch.stack([x.amax(0), -x.amin(0)]).float()
    return extremes.masked_fill(~extremes.isfinite().all(0), -torch.inf)


def _usable(scale: Tensor) -> Tensor:
    """Return scales; 1 where a channel has none: its x or its weight is zero, or not finite."""
    return _finite_or(scale.masked_fill(scale <= 0, torch.inf), 1.0)


def _finite_or(values: Tensor, other: float) -> Tensor:
    return torch.where(values.isfinite(), values, torch.full_like(values, other))
