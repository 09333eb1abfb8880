"""CUDA graphs per block, for FSDP2, which gathers the weights of one block at a time.

A recording reads tensors at fixed addresses, but FSDP2 gathers weights to a new address each time.
So each block has its own recordings, which read inputs and weights from static buffers shared by
all blocks; inputs and weights are copied there before each replay. FSDP2's gather and reduce run
between the blocks.

A block has one recording of the forward pass and one of the backward pass. The backward recording
starts by recomputing the forward pass: as under activation checkpointing, only the inputs of a
block are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import Cache

from metis_hf.conversion.convert import metis_layers
from metis_hf.training.cuda_graph import (
    CudaRecorder,
    Recorder,
    Recordings,
    changing_state,
    form,
    logger,
    stand_ins,
)
from metis_hf.training.weight_reuse import release


def units(model: nn.Module) -> list[nn.Module] | None:
    """Return the innermost FSDP2 units that have converted layers.

    Return None if FSDP2 does not shard the model.
    """
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inner = [one for one in found if sum(isinstance(m, FSDPModule) for m in one.modules()) == 1]
    return [one for one in inner if any(metis_layers(one))] if found else None


class BlockGraphs:
    """The recordings of a model's blocks; replaces the blocks' forward passes.

    Args:
        blocks: of a converted model, on one device, called one after the other.
        record: records a function; None: into a CUDA graph.

    Attributes:
        blocks: the recordings of each block.
        refused: why blocks run in Python; None if they are recorded.
    """

    def __init__(self, blocks: Iterable[nn.Module], record: Recorder | None = None) -> None:
        self.record = CudaRecorder() if record is None else record
        self._places: dict[Hashable, Tensor] = {}
        self.refused: str | None = None
        self.blocks = [_Block(block, self) for block in blocks]
        for block in self.blocks:
            if reason := changing_state(block.module):
                block.refuse(reason)
        if not self.blocks:
            self.refused = "no block that FSDP2 wraps separately contains a converted layer"
            logger.warning("cuda_graphs: steps run in Python: %s", self.refused)

    def places(self, name: str, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the shared buffers for tensors with the role `name` and the forms of `like`."""
        keys = [(name, number, *_form(tensor)) for number, tensor in enumerate(like)]
        for key, tensor in zip(keys, like):
            if key not in self._places:
                self._places[key] = torch.empty_like(tensor, requires_grad=False)
        return [self._places[key] for key in keys]

    def forget(self) -> None:
        """Restore the blocks' forward passes and free recordings and buffers."""
        for block in self.blocks:
            block.restore()
        self.blocks = []
        self._places.clear()


@dataclass
class _Recording:
    """The recorded passes of a block and their static buffers."""

    inputs: list[Tensor]  # tensor arguments, then parameters
    outputs: list[Tensor]
    grad_outputs: list[Tensor]
    grad_inputs: list[Tensor | None]  # one per input
    tree: Any  # pytree of the returned values
    play_forward: Callable[[], None]
    play_backward: Callable[[], None] | None  # None: no input needs a gradient


class _Block(Recordings):
    def __init__(self, block: nn.Module, owner: BlockGraphs) -> None:
        super().__init__(block)
        self._owner = owner
        self.module, self._python = block, block.forward
        self._replaced = vars(block).get("forward")  # set on the instance by accelerate
        self._returned: dict[Hashable, tuple[list[Tensor], Any]] = {}  # (meta tensors, pytree)
        block.forward = self._forward

    def restore(self) -> None:
        """Restore the block's forward pass."""
        del self.module.forward
        if self._replaced is not None:
            self.module.forward = self._replaced

    def refuse(self, reason: str) -> None:
        """Run all blocks in Python from now on, and log the reason."""
        if self._owner.refused is None:
            self._owner.refused = reason
            super().refuse(reason)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._python(*args, **kwargs)
        # Drop the key-value cache: models create one in training too, and nothing reads it.
        leaves, tree = tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, Cache))
        leaves = [None if isinstance(leaf, Cache) else leaf for leaf in leaves]
        if self._owner.refused or self.runs_in_python(leaves):
            return self._python(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = self._device().type
        mixed = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        forms = tuple(_form(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        key = (str(tree), forms, mixed, self.module.training)
        found = self.find(key, partial(self._new, key, leaves, tree, mixed))
        if found is None:
            return self._in_python(key, *tree_unflatten(leaves, tree))
        outputs = _Played.apply(found, *tensors, *self.module.parameters())
        return tree_unflatten(list(outputs), found.tree)

    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _in_python(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block and note the form of its outputs; refuse it if it cannot be recomputed."""
        state = partial(_generator_state, self._device())
        before = state()
        returned = self._python(*args, **kwargs)
        if not torch.equal(state(), before):
            self.refuse(
                "a block draws random numbers (dropout), and recomputing it would draw different "
                "ones"
            )
        leaves, tree = tree_flatten(returned)
        if all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
            self._returned[key] = [torch.empty_like(leaf, device="meta") for leaf in leaves], tree
        else:
            self.refuse("a block returns something other than floating-point tensors")
        return returned

    def _new(
        self, key: Hashable, leaves: list[Any], tree: Any, mixed: tuple[bool, torch.dtype]
    ) -> _Recording | None:
        """Record both passes; return None if that fails."""
        places = self._owner.places
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        parameters = [*self.module.parameters()]
        given = [*tensors, *parameters]
        inputs = [*places("input", tensors), *places("parameter", parameters)]
        like, returned = self._returned[key]
        device = self._device()
        like = [torch.empty_like(one, device=device) for one in like]
        outputs, grad_outputs = places("output", like), places("grad_output", like)
        wanted = [number for number, tensor in enumerate(given) if tensor.requires_grad]
        grads = places("grad_input", [inputs[number] for number in wanted])

        def run() -> tuple[list[Tensor], list[Tensor]]:
            """Return (inputs to differentiate by, outputs)."""
            own = [
                place.detach().requires_grad_(tensor.requires_grad)
                for place, tensor in zip(inputs, tensors)
            ]
            others = {
                p: nn.Parameter(place, requires_grad=p.requires_grad)
                for place, p in zip(inputs[len(own) :], parameters)
            }
            arguments = iter(own)
            mine = [next(arguments) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(mine, tree)
            # Autocast's cache would keep casts of these parameters in the recording's memory.
            amp = torch.autocast(device.type, mixed[1], enabled=mixed[0], cache_enabled=False)
            with amp, stand_ins(self.module, others):
                return [*own, *others.values()], tree_flatten(self._python(*args, **kwargs))[0]

        def forward() -> None:
            with torch.no_grad():
                torch._foreach_copy_(outputs, run()[1])

        def backward() -> None:
            with torch.enable_grad():
                own, made = run()
            pairs = [(out, grad) for out, grad in zip(made, grad_outputs) if out.requires_grad]
            with torch.autocast(device.type, enabled=False):
                found = torch.autograd.grad(
                    [out for out, _ in pairs],
                    [own[number] for number in wanted],
                    [grad for _, grad in pairs],
                    materialize_grads=True,
                )
            torch._foreach_copy_(grads, list(found))

        release(self.module)  # a cached weight operand would become a constant of the recording
        try:
            play_forward = self._owner.record(forward)[0]
            play_backward = self._owner.record(backward)[0] if wanted else None
        except RuntimeError as error:
            cause = error.__context__ or error
            self.refuse(f"recording a block failed: {str(cause).strip().splitlines()[0]}")
            return None
        of = dict(zip(wanted, grads))
        grad_inputs = [of.get(number) for number in range(len(given))]
        return _Recording(
            inputs, outputs, grad_outputs, grad_inputs, returned, play_forward, play_backward
        )


class _Played(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: _Recording, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        ctx.save_for_backward(*given)
        torch._foreach_copy_(recording.inputs, given)
        recording.play_forward()
        return tuple(place.clone() for place in recording.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        recording = ctx.recording
        torch._foreach_copy_(recording.inputs, ctx.saved_tensors)
        torch._foreach_copy_(recording.grad_outputs, grads)
        recording.play_backward()
        found = (None if place is None else place.clone() for place in recording.grad_inputs)
        return None, *found


def _form(x: Tensor) -> tuple[Hashable, ...]:
    return form(x), x.stride(), x.requires_grad


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
