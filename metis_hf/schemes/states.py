"""Per-layer states that schemes keep over steps: the base class, and two of them.

`StaticScales` holds tensor scales that calibration fixes, `Oscillation` the paths of oscillating
weights; `channel_ranges` has running ranges of input channels, `subspaces` kept subspaces. A scheme
names its state; layers hold the buffers and call the hooks.
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
from metis_hf.schemes.noise_keys import CallKeys, several_processes


class StatefulLayer(Protocol):
    """A layer as the hooks of its state see it, between two optimizer steps."""

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
        """Overwrite the stored matrix [o i]; every process passes the same value."""


class LayerState:
    """State that a scheme keeps for a layer besides the weight, in buffers saved with the model.

    Every method does nothing by default. Subclasses are frozen dataclasses, which hold settings and
    no tensors; layers with equal states are handled together.

    Every call of the layer puts the result of `freeze` into its plan, and the plan binds it to each
    conditioner (`Conditioner.bind`), so that forward and backward see the same state. A recomputed
    forward pass, and further micro-batches of a step, must get the same result as the first call.
    `update` may therefore only accumulate, idempotently, data for later steps. It recognizes a new
    step by `mark`, which changes when the weight does. After each optimizer step MetisCallback
    calls `synchronize` and then `after_step`; your own training loop calls
    `layer_states.after_step`.

    Attributes:
        writes_weights: name, for messages, of the method that writes to weights in `after_step`;
            engines that train copies of the weights are then refused.
        follows_frozen_weights: whether `update` also runs if the layer's weight does not train.
            Checkpoints of adapters do not contain buffers of the base model.
        can_be_recorded: whether a CUDA graph of a step may contain calls of the layer; they then
            depend on the host through `phase` alone.
    """

    writes_weights: ClassVar[str] = ""
    follows_frozen_weights: ClassVar[bool] = False
    can_be_recorded: ClassVar[bool] = False

    def initial(self, in_features: int, out_features: int) -> dict[str, Tensor]:
        """Return the initial buffers by name."""
        return {}

    def update(self, buffers: Mapping[str, Tensor], x: Tensor, mark: Tensor) -> None:
        """Update the buffers in place from the input x [t i] of a training call, no host sync."""

    def freeze(
        self, buffers: Mapping[str, Tensor], x: Tensor, weight: Tensor, keys: CallKeys
    ) -> Any:
        """Return the state for a call with input x [t i] and weight [o i]; None: no state.

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
        """Call `update`, then `freeze`, for a training call; override to read x only once."""
        self.update(buffers, x, keys.mark)
        return self.freeze(buffers, x, weight, keys)

    def phase(self, buffers: Mapping[str, Tensor]) -> Hashable:
        """Return the host's data that the next call depends on; see `can_be_recorded`."""
        return None

    def synchronize(self, layers: Mapping[str, StatefulLayer]) -> None:
        """Make the processes, if there are several, agree on the buffers of these layers.

        All processes must call it together, with the same layers in the same order.
        """

    def after_step(
        self, layers: Mapping[str, StatefulLayer], step: int, max_steps: int
    ) -> dict[str, dict[str, float]]:
        """Run between two optimizer steps, on all processes together.

        Args:
            layers: the layers that have this state, by name.
            step: optimizer steps taken so far, the last one included.
            max_steps: of the whole training.

        Returns:
            Metrics: name -> layer -> value; the log has their means.
        """
        return {}


@dataclass(frozen=True)
class StaticScales(LayerState):
    """The amax of input and weight for tensor scales, frozen before deployment.

    Until the scales are frozen, a call uses the amax of its own input and weight, so that nothing
    clips and a recomputed call repeats the first one. Meanwhile `input_amax` is the running maximum
    over all training inputs. `calibrate` and `freeze_scales` freeze both; larger values then clip.
    NaN and infinity are ignored. Three scalar buffers: `input_amax` and `weight_amax`, 0 until they
    are known, and `scales_frozen`, 0 or 1.

    Each process tracks its own inputs; `synchronize` takes the maximum over processes.

    Args:
        input: whether inputs are quantized at all.
    """

    input: bool = True

    follows_frozen_weights: ClassVar[bool] = True  # until they are frozen
    can_be_recorded: ClassVar[bool] = True  # the device decides: `is_known_set` is False then

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
    """Update `input_amax` with an input's own amax, unless `fixed`; return the amax to use."""
    known = buffers["input_amax"]
    own = torch.where(fixed, known, own)
    torch.maximum(known, own, out=known)
    return own


def _of_weight(buffers: Mapping[str, Tensor], weight: Tensor, fixed: Tensor) -> Tensor:
    return torch.where(fixed, buffers["weight_amax"], largest_magnitude(weight))


# Flag -> its cached value on the host.
_READ: MutableMapping[Tensor, Kept] = WeakTensorKeyDictionary()


def is_known_set(flag: Tensor) -> bool:
    """Return whether a rarely changed flag is set, without a host sync in every step.

    The flag is read from its device once after each change. The result is also False if reading is
    impossible or would wait in every step: while a graph is traced or captured, for tensors without
    values, and with several processes, since DDP writes buffers before each forward pass.

    Args:
        flag: 0-dim integer tensor, written in place.
    """
    if (
        cannot_be_read(flag)
        or several_processes()
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
    """Return whether a backward pass is running; a forward pass inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def cannot_be_read(flag: Tensor) -> bool:
    """Return whether the host cannot read a tensor, or track its changes by version."""
    return (
        torch.compiler.is_compiling()
        or bool(torch._C._len_torch_dispatch_stack())
        or type(flag) is not Tensor
        or flag.is_meta
        or flag.is_inference()
    )


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the amax of a tensor, 0-dim fp32; 0 if it is empty or not finite."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    kind = torch.float64 if x.dtype is torch.float64 else torch.float32
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=kind).float()
    return torch.nan_to_num(largest, nan=0.0, posinf=0.0)


@dataclass(frozen=True)
class Oscillation(LayerState):
    """OsciReset (arXiv 2510.27527): sets weights that flip between two FP4 values to one of them.

    Late in training a weight near the border of two bins moves little, but its quantized value
    jumps each time the weight crosses. Over a window of steps the lengths of both paths are summed,
    |w_t - w_(t-1)| and |Q(w_t) - Q(w_(t-1))|. Where the ratio of the second to the first is high,
    the weight is set to Q(w), the center of its bin. Optimizer states do not change. Layers with
    split weights are skipped, since the elements of w_hat do not correspond to stored elements.

    Three fp32 buffers [o i], 12 bytes per weight, on every process: the weight before the last step
    and the two paths. They are saved with the model, so that a resumed run continues where the
    saved one stopped.

    Args:
        period: optimizer steps from the start of one window to the start of the next.
        window: steps over which paths are measured; the reset follows.
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
        """Measure paths, and reset oscillating weights at the end of a window.

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
        """Return path of Q(w) / path of w, [o i]; 0 where w did not move."""
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
    """Return the values, with `other` in place of NaN and infinity."""
    return torch.where(values.isfinite(), values, torch.full_like(values, other))
