"""The attention mask of the running forward pass, so that padding is never sampled.

A layer sees rows, not sequences; the model sees the mask. One TokenMask per model hangs between
them: hooks on the model set and clear it for the calling thread, layers read it there. A pass that
is recomputed inside backward (activation checkpointing) does not come through the model, and may
run in another thread. So the inputs that layers had in each call are remembered by fingerprint for
as long as the call's graph lives, and a recomputed layer finds its mask by its input.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from metis_hf.noise import fingerprint

DECODER_MASK = "decoder_attention_mask"
NO_LABEL = -100  # as transformers' losses leave tokens out


class _Call:
    """One call of the model with a mask, as far as backward may need it again."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.thread = threading.get_ident()
        self.inputs: dict[str, list[Tensor]] = {}  # layer -> fingerprints of its inputs

    def tie(self, output: Any) -> None:
        """Make the graph of a model's output own this call, so that both go together."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                metadata: Any = leaf.grad_fn.metadata
                metadata[self] = True


class _Running:
    """The call of the model that one thread is running."""

    def __init__(self) -> None:
        self.active = False  # inside a call of the model
        self.mask: Tensor | None = None
        # By device, as `_rows` has them: layers that read one tensor are to have one mask.
        self.rows: dict[torch.device, Tensor] = {}
        # The last one, until the next begins, whatever becomes of its output.
        self.call: _Call | None = None
        self.grad_enabled = False


class _PerThread(threading.local):
    """One `_Running` for each thread.

    torch.compile follows changes of an object's attributes, and loses those of a threading.local.
    """

    def __init__(self) -> None:
        self.running = _Running()


class TokenMask:
    """Knowledge of which rows of a layer's input are tokens, not padding.

    Threads may share the model, and so may the replicas of nn.DataParallel, each in a thread: each
    has the mask of its own call. If several of them train it at once on one device, recompute
    activations, and give a layer equal inputs under different masks, then a recomputed layer takes
    the mask of the calling thread; where backward has threads of its own (on a GPU), the last one.

    A decoder whose batches have labels and no mask, as collators of transformers leave them, has
    the rows with a label: -100 marks the others.

    Args:
        argument: name of the model's argument that holds the mask, [b s].
    """

    def __init__(self, argument: str = "attention_mask") -> None:
        self.argument = argument
        self._here = _PerThread()
        self._lock = threading.Lock()
        self._calls: tuple[weakref.ref[_Call], ...] = ()  # oldest first; replaced under the lock

    def register(self, model: nn.Module) -> None:
        """Add hooks to the model's forward pass."""
        names = list(inspect.signature(model.forward).parameters)
        position = names.index(self.argument) if self.argument in names else None
        model.register_forward_pre_hook(_Begin(self, position), with_kwargs=True)
        model.register_forward_hook(_End(self), always_call=True)

    @staticmethod
    def unregister(model: nn.Module) -> None:
        """Remove every TokenMask's hooks from the model."""
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, _Begin | _End):
                    del hooks[key]
                    model._forward_pre_hooks_with_kwargs.pop(key, None)
                    model._forward_hooks_always_called.pop(key, None)

    def rows(self, x: Tensor, owner: str) -> Tensor | None:
        """Return the mask as [t] bool for the rows of x [... c]; None where there is none for them.

        Args:
            x: input of a layer: [b s c], or [b*s c].
            owner: name of the layer.
        """
        running = self._here.running
        if not running.active:
            return self._recall(x, owner) if _in_backward() else None
        mask = running.mask
        if mask is None or not _fits(mask, x):
            return None
        if running.grad_enabled and not torch.compiler.is_compiling():
            if running.call is None:
                running.call = self._remember(mask)
            running.call.inputs.setdefault(owner, []).append(fingerprint(x))
        if torch.compiler.is_compiling():
            return _rows(mask, x)
        if x.device not in running.rows:
            running.rows[x.device] = _rows(mask, x)
        return running.rows[x.device]

    def _remember(self, mask: Tensor) -> _Call:
        """Return a new call that `_recall` finds from any thread."""
        call = _Call(mask)
        with self._lock:
            alive = (known for known in self._calls if known() is not None)
            self._calls = (*alive, weakref.ref(call))
        return call

    def _recall(self, x: Tensor, owner: str) -> Tensor | None:
        """Return the mask of the remembered call that had this input; nothing leaves the device."""
        here = threading.get_ident()
        calls = [call for known in self._calls if (call := known()) is not None]
        calls.sort(key=lambda call: call.thread == here)  # the later one wins
        # A replica's fingerprints are on another device.
        seen = [
            (other, call.mask)
            for call in calls
            if _fits(call.mask, x)
            for other in call.inputs.get(owner, ())
            if other.device == x.device
        ]
        if not seen:
            return None
        mine = fingerprint(x)
        found = torch.ones(seen[0][1].numel(), dtype=torch.bool, device=x.device)
        for other, mask in seen:
            found = torch.where(mine == other, _rows(mask, x), found)
        return found

    def _begin(self, kwargs: dict[str, Any], mask: Any = None) -> None:
        """Take the mask of a call: the one given, or that of its keyword arguments."""
        running = self._here.running
        mask = kwargs.get(self.argument) if mask is None else mask
        labels = kwargs.get("labels") if self.argument == DECODER_MASK else None
        if mask is None and isinstance(labels, Tensor):
            mask = labels != NO_LABEL
        running.rows = {}
        running.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        running.active = True
        running.call = None
        running.grad_enabled = (
            torch.is_grad_enabled()
        )  # reentrant checkpointing turns it off inside

    def _end(self, output: Any) -> None:
        running = self._here.running
        running.mask = None
        running.rows = {}
        running.active = False
        if running.call is not None and not torch.compiler.is_compiling():
            running.call.tie(output)

    def __getstate__(self) -> dict[str, Any]:
        return {"argument": self.argument}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _Begin:
    def __init__(self, mask: TokenMask, position: int | None) -> None:
        self.mask = mask
        self.position = position  # of the mask where it is no keyword argument

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        mask = None
        if self.position is not None and self.position < len(args):
            mask = args[self.position]
        self.mask._begin(kwargs, mask)


class _End:
    def __init__(self, mask: TokenMask) -> None:
        self.mask = mask

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.mask._end(output)


def _fits(mask: Tensor, x: Tensor) -> bool:
    """Return whether x [... c] has a row for each entry of mask [b s]."""
    return x.shape[:-1] == mask.shape or (x.dim() == 2 and x.shape[0] == mask.numel())


def _rows(mask: Tensor, x: Tensor) -> Tensor:
    """Return mask [b s] for the rows of x, as [b*s] bool on its device."""
    return mask.reshape(-1).bool().to(x.device)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
