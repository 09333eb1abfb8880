"""Training steps as CUDA graphs: recorded once, then replayed.

A quantized layer runs about a hundred small operations, and their launch from Python takes most of
a step on a GPU. `StepGraphs` runs the forward and backward pass of a few steps in Python, records
the next step, and then replays the recording on each new batch: the same kernels, the same numbers.
Each batch shape and each precision of the layers has its own recording. Steps that cannot be
recorded run in Python, with one warning: they synchronize with the GPU (routing to experts), their
scheme keeps a state, or there are too many shapes. Kept subspaces (`subspace_interval`) need two
recordings per shape: with and without a search.

Under DDP each process records its own step without communication, since some processes record
while others still run in Python. Steps therefore bypass DDP, and `average` communicates afterwards.
Under FSDP2 blocks are recorded one by one; see `block_graphs`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import TrainingArguments, masking_utils
from transformers.utils import import_utils, logging

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import metis_layers
from metis_hf.layers.linear import MetisLayer
from metis_hf.schemes import Scheme
from metis_hf.training.weight_reuse import release

logger = logging.get_logger(__name__)

Inputs = Mapping[str, Any]
Step = Callable[[Inputs, Any], Tensor]
# Records a function: returns (replay function, result, whose contents each replay overwrites).
Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]

ENVIRONMENT = "METIS_CUDA_GRAPHS"  # 0 disables recording
WARM_UP = 3  # steps in Python before recording: kernels compile, constants are built
MOST_RECORDINGS = 4  # each recording holds the memory of a step
_KNOWN = (Tensor, bool, int, float, str, np.generic, type(None))  # types of batch values


class CudaRecorder:
    """Records into CUDA graphs that share a memory pool; only one graph replays at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # free the memory of Python steps for the recording's pool
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        self._pool = graph.pool()
        return graph.replay, result


@dataclass
class _Recording:
    """A recorded step and its static buffers."""

    inputs: list[Tensor]  # buffers for the batch's tensors, in order
    count: Tensor | None  # buffer for `num_items_in_batch`
    play: Callable[[], None]
    loss: Tensor  # 0-dim
    gradients: list[tuple[nn.Parameter, Tensor]]


def changing_state(model: nn.Module) -> str | None:
    """Say which schemes keep a state that a recording cannot update; None: no scheme does."""
    schemes = {
        layer.config.scheme
        for _, layer in metis_layers(model)
        if layer.state_names and layer.scheme.state and not layer.scheme.state.can_be_recorded
    }
    names = ", ".join(sorted(schemes))
    return f"{names} keeps state that changes with each step" if names else None


class Recordings:
    """The recordings of a model or a block, keyed by everything about a call known on the host.

    Args:
        model: a converted model, or a part of one.

    Attributes:
        recordings: number of recordings made.
        refused: why steps run in Python; None if they are recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[MetisLayer] = [layer for _, layer in metis_layers(model)]
        self.made: dict[Hashable, Any] = {}
        self.recordings = 0
        self._seen: dict[Hashable, int] = {}
        self._precisions: list[list[tuple[MetisConfig, Scheme]]] = []
        self._is_full = False  # and the warning was logged
        self.refused: str | None = None

    def runs_in_python(self, leaves: Sequence[Any]) -> bool:
        """Return whether a call with these values must run in Python."""
        if self.refused or any(layer._forward_hooks for layer in self._layers):
            return True
        if unknown := [leaf for leaf in leaves if not isinstance(leaf, _KNOWN)]:
            self.refuse(f"a batch contains a {type(unknown[0]).__name__}, which cannot be copied")
        return bool(unknown)

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the recording for a kind of call; None if the call must run in Python.

        Args:
            key: identifies the call, apart from the state of the layers and their parameters.
            make: records the call; returns None if that fails.
        """
        precision = self._precision()
        trained = tuple(id(p) for p in self._model.parameters() if p.requires_grad)
        key = (key, precision, trained, self._phases())
        if key not in self.made:
            seen = self._seen[key] = self._seen.get(key, 0) + 1
            if seen <= WARM_UP or not self._make_room(precision) or (made := make()) is None:
                return None
            self.made[key] = made
            self.recordings += 1
        return self.made[key]

    def _precision(self) -> int:
        """Return the index of the layers' current precision among all precisions seen."""
        # Compared by value: each switch makes new config and scheme objects.
        now = [(layer.config, layer.scheme) for layer in self._layers]
        for place, seen in enumerate(self._precisions):
            if seen == now:
                self._precisions[place] = now  # the same objects compare faster next time
                return place
        self._precisions.append(now)
        return len(self._precisions) - 1

    def _phases(self) -> frozenset[Hashable]:
        """Return the current phases of the layers' states."""
        states = ((layer, layer.scheme.state) for layer in self._layers if layer.state_names)
        return frozenset(state.phase(layer.state_buffers()) for layer, state in states if state)

    def _make_room(self, precision: int) -> bool:
        """Return whether a step may be recorded; evict a recording of another precision if full."""
        if len(self.made) < MOST_RECORDINGS:
            return True
        for key in self.made:
            if key[1] != precision:  # type: ignore[index]
                del self.made[key], self._seen[key]
                return True
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "cuda_graphs: %d kinds of steps are recorded, each of which keeps the memory of "
                "a step; all other kinds run in Python. Pad batches to fewer distinct lengths",
                MOST_RECORDINGS,
            )
        return False

    def refuse(self, reason: str) -> None:
        """Run in Python from now on, and log the reason."""
        self.refused = reason
        logger.warning("cuda_graphs: steps run in Python: %s", reason)


class StepGraphs(Recordings):
    """The recordings of one model's training steps.

    Args:
        model: a converted model.
        record: records a step; None: into a CUDA graph.
    """

    def __init__(self, model: nn.Module, record: Recorder | None = None) -> None:
        super().__init__(model)
        self.record = CudaRecorder() if record is None else record
        if reason := changing_state(model):
            self.refuse(reason)
        self._places: set[int] = set()  # ids of the gradient buffers of all recordings

    def run(self, step: Step, inputs: Inputs, count: Any, *, extra: Hashable = None) -> Tensor:
        """Compute the loss of a batch, and add its gradients to `p.grad`.

        Args:
            step: the step in Python, called with the batch and `num_items_in_batch`.
            inputs: the batch, on the model's device.
            count: `num_items_in_batch`: an int, a 0-dim tensor or None.
            extra: other Python values that a recording fixes as constants.

        Returns:
            The loss, 0-dim.
        """
        leaves, tree = tree_flatten(dict(inputs))
        if self.runs_in_python(leaves):
            return step(inputs, count)
        counted = form(count) if isinstance(count, Tensor) else type(count)  # value is copied in
        key = (str(tree), *map(form, leaves), counted, extra)
        found = self.find(key, lambda: self._new(step, inputs, count))
        return step(inputs, count) if found is None else self._play(found, leaves, count)

    def forget(self) -> None:
        """Drop the recordings and free their device memory."""
        self.made.clear()
        self._places.clear()
        if isinstance(self.record, CudaRecorder):
            self.record = CudaRecorder()

    def _new(self, step: Step, inputs: Inputs, count: Any) -> _Recording | None:
        """Record a step; return None if that fails."""
        leaves, tree = tree_flatten(dict(inputs))
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = tree_unflatten(leaves, tree)
        device = next(self._model.parameters()).device
        place = None if count is None else torch.as_tensor(count, device=device).clone()
        reason = ""
        for masks in (_masks_of_whole_rows(inputs), contextlib.nullcontext()):
            release(self._model)  # a cached weight operand would become a constant
            try:
                trained = (p for p in self._model.parameters() if p.requires_grad)
                # Record with parameters that DDP does not hook: its hooks wait on the stream on
                # which DDP was built, not on the recorded stream.
                others = {p: nn.Parameter(p.detach()) for p in trained}
                with masks, stand_ins(self._model, others):
                    play, loss = self.record(lambda: step(places, place))
                gradients = [(p, q.grad) for p, q in others.items() if q.grad is not None]
                tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                self._places |= {id(grad) for _, grad in gradients}
                return _Recording(tensors, place, play, loss, gradients)
            except RuntimeError as error:
                cause = error.__context__ or error  # ending the capture then fails too
                reason = str(cause).strip().splitlines()[0]
            finally:
                release(self._model)
        self.refuse(f"recording a step failed: {reason}")
        return None

    def _play(self, recording: _Recording, batch: list[Any], count: Any) -> Tensor:
        tensors = (leaf for leaf in batch if isinstance(leaf, Tensor))
        for place, tensor in zip(recording.inputs, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
        if recording.count is not None:
            if isinstance(count, Tensor):
                recording.count.copy_(count, non_blocking=True)
            else:
                recording.count.fill_(count)
        # A replay overwrites the gradients of the last micro-batch, even if another recording made
        # them: all recordings share memory.
        for p in self._model.parameters():
            if id(p.grad) in self._places:
                p.grad = p.grad.clone()  # type: ignore[union-attr]
        recording.play()
        summed, added = [], []
        for p, grad in recording.gradients:
            if p.grad is None:
                p.grad = grad
            else:
                summed.append(p.grad)
                added.append(grad)
        if summed:
            torch._foreach_add_(summed, added)
        return recording.loss.clone()


@contextlib.contextmanager
def stand_ins(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Replace parameters of a model with others inside the block."""
    held = [
        (module, name, p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if p in others
    ]
    try:
        for module, name, p in held:
            setattr(module, name, others[p])
        yield
    finally:
        for module, name, p in held:
            setattr(module, name, p)


def average(model: DistributedDataParallel) -> None:
    """Average gradients over processes, and broadcast the first process's buffers.

    DDP does the same in its backward pass and before the next forward pass; this is for steps that
    bypass DDP.

    Raises:
        ValueError: a trainable parameter has no gradient, while other processes may have one.
    """
    trained = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
    if missing := [name for name, p in trained if p.grad is None]:
        raise ValueError(
            f"cuda_graphs: {len(missing)} of {len(trained)} trainable parameters have no gradient, "
            f"the first is {missing[0]}, and processes can only average gradients that all of them "
            "have. Freeze the parameters that the loss does not depend on "
            "(requires_grad_(False)), or leave cuda_graphs out"
        )
    group, size = model.process_group, dist.get_world_size(model.process_group)
    gradients = [p.grad for _, p in trained]
    torch._foreach_div_(gradients, size)
    work = [dist.all_reduce(grad, group=group, async_op=True) for grad in gradients]
    if model.broadcast_buffers:
        first = dist.get_global_rank(group, 0)
        for buffer in model.module.buffers():
            work.append(dist.broadcast(buffer, first, group=group, async_op=True))
    for one in work:
        one.wait()


@contextlib.contextmanager
def _masks_of_whole_rows(inputs: Inputs) -> Iterator[None]:
    """Make transformers leave causal masks to the attention kernel while a step is recorded."""
    # transformers reads from the GPU whether rows are padded or packed. During a capture it cannot,
    # and builds a full mask, which needs a slower kernel. A batch without mask and positions is
    # neither padded nor packed.
    with contextlib.ExitStack() as patches:
        if not {"attention_mask", "position_ids"} & inputs.keys():
            for module, name, answer in (
                (import_utils, "is_cuda_stream_capturing", lambda: False),
                (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
            ):
                if hasattr(module, name):  # only in transformers 5
                    patches.enter_context(mock.patch.object(module, name, answer))
        yield


def obstacles(args: TrainingArguments) -> list[str]:
    """Return the reasons why the steps of a run cannot be recorded; [] if they can."""
    reasons = []
    if os.environ.get(ENVIRONMENT) == "0":
        reasons.append(f"{ENVIRONMENT}=0 is set")
    if args.device.type != "cuda":
        reasons.append(f"the device is {args.device.type}, but CUDA graphs need a CUDA device")
    if args.n_gpu > 1:
        reasons.append(f"one process drives {args.n_gpu} devices; start one each (torchrun)")
    if args.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        reasons.append("DeepSpeed keeps gradients in its own buffers; use DDP or FSDP2")
    if args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        reasons += _obstacles_of_fsdp(args)
    if args.fp16:
        reasons.append("fp16 scales the loss by a number on the host; use bf16")
    if args.torch_compile:
        reasons.append(
            'torch_compile has its own CUDA graphs (torch_compile_mode="reduce-overhead")'
        )
    if args.torch_empty_cache_steps is not None:
        reasons.append("torch_empty_cache_steps frees memory that recordings use")
    return reasons


def _obstacles_of_fsdp(args: TrainingArguments) -> list[str]:
    config: Any = args.fsdp_config or {}
    version = config.get("version", 2) if args.fsdp else os.environ.get("FSDP_VERSION", 1)
    reasons = []
    if int(version) == 1:
        reasons.append("FSDP1 flattens parameters; use FSDP2 (fsdp_version: 2)")
    by_config = str(config.get("activation_checkpointing", False)).lower() == "true"
    by_launcher = parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING")
    if args.gradient_checkpointing or by_config or by_launcher:
        reasons.append(
            "recorded blocks are already recomputed in the backward pass; turn off activation "
            "checkpointing, which would recompute them a second time"
        )
    return reasons


def check(args: TrainingArguments) -> None:
    """Refuse a run whose steps cannot be recorded.

    Raises:
        ValueError: with the reasons and the remedies.
    """
    reasons = obstacles(args)
    if reasons:
        raise ValueError(
            f"cuda_graphs=True: {'; '.join(reasons)}. Leave cuda_graphs out to run steps in Python"
        )


def form(value: Any) -> Hashable:
    """Return the key of a batch value: (shape, dtype) of a tensor, repr(value) otherwise."""
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)
