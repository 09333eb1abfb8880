"""States that schemes keep of a layer from step to step: the base class, and two of them.

Scales of whole tensors that calibration fixes, and the paths of weights that oscillate; running
ranges of input channels are in `channel_ranges`. A scheme names its state; layers hold the buffers,
and call the hooks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from metis_hf.operands import TensorAmax
from metis_hf.operands.kept import Kept, mark_of
from metis_hf.schemes.noise_keys import CallKeys


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
        follows_frozen_weights: whether `update` is called where the layer's weight does not train.
            Checkpoints of adapters have no buffers of the base.
        can_be_recorded: whether a CUDA graph of a step may hold its calls; they then depend on the
            host by `phase` alone.
    """

    writes_weights: ClassVar[str] = ""
    follows_frozen_weights: ClassVar[bool] = False
    can_be_recorded: ClassVar[bool] = False

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        """Return the buffers by name, as they are before the first call."""
        return {}

    def update(self, buffers: Mapping[str, Tensor], x: Tensor, mark: Tensor) -> None:
        """Take note of the input x [t i] of a call in training, in place, without host sync."""

    def freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> Any:
        """Return the state for a call with input x [t i] and weight [o i]; None: nothing.

        Args:
            buffers: of the state, by name.
            x: the input of the call.
            weight: the stored matrix.
            keys: the noise keys of the call, by role.
        """
        return None

    def update_and_freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> Any:
        """Do `update` and then `freeze` for a call in training; override to read x only once."""
        self.update(buffers, x, keys.mark)
        return self.freeze(buffers, x, weight, keys)

    def phase(self, buffers: Mapping[str, Tensor]) -> Hashable:
        """Return the host's part in what the next call does; see `can_be_recorded`."""
        return None

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

    follows_frozen_weights: ClassVar[bool] = True  # until they are fixed, which resuming checks
    can_be_recorded: ClassVar[bool] = True  # `is_known_set` is False there: the device decides

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        return {
            "input_amax": torch.zeros((), dtype=torch.float32),
            "weight_amax": torch.zeros((), dtype=torch.float32),
            "scales_frozen": torch.zeros((), dtype=torch.int32),
        }

    def update(self, buffers: Mapping[str, Tensor], x: Tensor, mark: Tensor) -> None:
        if self.input and not is_known_set(buffers["scales_frozen"]):
            _note(buffers, largest_magnitude(x), buffers["scales_frozen"] > 0)

    def freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> TensorAmax:
        known = buffers["input_amax"], buffers["weight_amax"]
        if is_known_set(buffers["scales_frozen"]):
            return TensorAmax(*known, fixed=not any(each.is_inference() for each in known))
        own, fixed = largest_magnitude(x) if self.input else known[0], buffers["scales_frozen"] > 0
        return TensorAmax(torch.where(fixed, known[0], own), _of_weight(buffers, weight, fixed))

    def update_and_freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> TensorAmax:
        if not self.input or is_known_set(buffers["scales_frozen"]):
            return self.freeze(buffers, x, weight, keys)
        fixed = buffers["scales_frozen"] > 0
        own = _note(buffers, largest_magnitude(x), fixed)
        return TensorAmax(own, _of_weight(buffers, weight, fixed))

    def synchronize(self, layers: Mapping[str, StatefulLayer]) -> None:
        largest = torch.stack([layer.buffers["input_amax"] for layer in layers.values()])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        for layer, amax in zip(layers.values(), largest):
            layer.buffers["input_amax"].copy_(amax)


def _note(buffers: Mapping[str, Tensor], own: Tensor, fixed: Tensor) -> Tensor:
    """Keep the largest magnitude of an input, unless it is fixed; return the one in force."""
    known = buffers["input_amax"]
    own = torch.where(fixed, known, own)
    torch.maximum(known, own, out=known)
    return own


def _of_weight(buffers: Mapping[str, Tensor], weight: Tensor, fixed: Tensor) -> Tensor:
    return torch.where(fixed, buffers["weight_amax"], largest_magnitude(weight))


# The last reading of each flag.
_READ: MutableMapping[Tensor, Kept] = WeakTensorKeyDictionary()


def is_known_set(flag: Tensor) -> bool:
    """Return whether a flag that seldom changes is set, as far as it costs no step any time.

    A flag is read from its device once after each change of it. False also where reading is
    impossible, or would wait in every step: while a graph is traced or captured, for tensors
    without values, and with several processes, as DDP writes buffers before each forward pass.

    Args:
        flag: 0-dim integers, written in place.
    """
    if (
        cannot_be_read(flag)
        or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        or (flag.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return False
    kept = _READ.get(flag)
    if kept is None:
        kept = _READ[flag] = Kept()
    mark = mark_of(flag)
    known = kept.at(mark) or kept.start(mark)
    if "set" not in known:
        known["set"] = bool(flag.item())
    return bool(known["set"])


def in_backward() -> bool:
    """Return whether a backward pass is running, so that a forward pass is a recomputed one."""
    return torch._C._current_graph_task_id() != -1


def cannot_be_read(flag: Tensor) -> bool:
    """Return whether the host cannot read a tensor: in a graph that is traced, or on "meta"."""
    return (
        torch.compiler.is_compiling()
        or bool(torch._C._len_torch_dispatch_stack())
        or type(flag) is not Tensor
        or flag.is_meta
        or flag.is_inference()
    )


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, 0-dim fp32; 0 of an empty or not finite one."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    kind = torch.float64 if x.dtype is torch.float64 else torch.float32
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=kind).float()
    return torch.nan_to_num(largest, nan=0.0, posinf=0.0)


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
        period: optimizer steps from the start of one window to the next start.
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


def finite_or(values: Tensor, other: float) -> Tensor:
    """Return the values, and another number where they are NaN or infinite."""
    return torch.where(values.isfinite(), values, torch.full_like(values, other))
