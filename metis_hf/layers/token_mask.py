"""The attention mask of the running forward pass, so that padding is never sampled.

A layer sees rows, not sequences; the model sees the mask. One TokenMask per model hangs between
them: hooks on the model, and on models inside it that may be called by themselves, set and clear it
for the calling thread, layers read it there. A pass that is recomputed inside backward (activation
checkpointing) does not come through the model, and may run in another thread. So the inputs that
layers had in each call are remembered by fingerprint for as long as the call's graph lives, and a
recomputed layer finds its mask by its input.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from metis_hf.noise import fingerprint
from metis_hf.schemes.states import in_backward

DECODER_MASK = "decoder_attention_mask"
NO_LABEL = -100  # as transformers' losses leave tokens out
_CALL = nn.Module._call_impl.__code__  # around hooks and the forward pass


class _Call:
    """One call of the model with a mask, as far as backward may need it again."""

    def __init__(self, masks: tuple[Tensor, ...]) -> None:
        self.masks = masks
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
        self.model: nn.Module | None = None  # whose call it is; None outside of one
        self.masks: tuple[Tensor, ...] = ()  # the one given, and its last columns; or guesses
        # As `_rows` has them: layers that read one tensor are to have one mask.
        self.rows: dict[tuple[torch.device, int], Tensor] = {}
        # The last one, until the next begins, whatever becomes of its output.
        self.call: _Call | None = None
        self.grad_enabled = False


class _PerThread(threading.local):
    """One `_Running` for each thread.

    torch.compile follows changes of an object's attributes, and loses changes of a threading.local.
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
    the rows with a label: -100 marks the others. Where labels do not reach the model either, since
    Trainer smooths them, it has the rows whose token is not padding, in training. A model that
    gives its decoder the encoder's tokens, one later, has the encoder's mask there, one later.

    A mask may be longer than a call's tokens, where keys and values of earlier tokens come
    from a cache or from prefix tuning: its last columns belong to the call.

    Args:
        argument: name of the model's argument that holds the mask, [b s].
    """

    def __init__(self, argument: str = "attention_mask") -> None:
        self.argument = argument
        self._here = _PerThread()
        self._lock = threading.Lock()
        self._calls: tuple[weakref.ref[_Call], ...] = ()  # oldest first; replaced under the lock

    def register(self, model: nn.Module) -> None:
        """Add hooks to the forward pass of the model, and of models inside it with such a mask."""
        for module in model.modules():
            inner = module is not model
            if inner and not (isinstance(module, PreTrainedModel) and self._is_of(module)):
                continue
            names = tuple(inspect.signature(module.forward).parameters)
            module.register_forward_pre_hook(_Begin(self, names, inner), with_kwargs=True)
            module.register_forward_hook(_End(self), always_call=True)

    def _is_of(self, module: nn.Module) -> bool:
        """Return whether a model inside another takes this mask, for layers that read it.

        The decoder of an encoder-decoder calls its own mask what is the encoder's elsewhere.
        """
        masks = {id(each) for m in module.modules() if (each := getattr(m, "token_mask", None))}
        names = inspect.signature(module.forward).parameters
        own = masks == {id(self)} or DECODER_MASK in names
        return own and id(self) in masks and self.argument in names

    @staticmethod
    def unregister(model: nn.Module) -> None:
        """Remove every TokenMask's hooks from the model, and from models inside it."""
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in list(hooks.items()):
                    if isinstance(hook, _Begin | _End):
                        del hooks[key]
                        module._forward_pre_hooks_with_kwargs.pop(key, None)
                        module._forward_hooks_always_called.pop(key, None)

    @property
    def runs(self) -> bool:
        """True inside a call of the model, in this thread.

        A call that an interrupt ended has left its mask here: hooks after it have not run.
        """
        model = self._here.running.model
        return model is not None and (torch.compiler.is_compiling() or _is_called(model))

    def rows(self, x: Tensor, owner: str) -> Tensor | None:
        """Return the mask as [t] bool for the rows of x [... c]; None where there is none for them.

        Args:
            x: input of a layer: [b s c], or [b*s c].
            owner: name of the layer.
        """
        running = self._here.running
        if running.model is None:
            return self._recall(x, owner) if in_backward() else None
        mask = _fitting(running.masks, x)
        if mask is None:
            return None
        if running.grad_enabled and not torch.compiler.is_compiling():
            if running.call is None:
                running.call = self._remember(running.masks)
            running.call.inputs.setdefault(owner, []).append(fingerprint(x))
        if torch.compiler.is_compiling():
            return _rows(mask, x)
        name = x.device, mask.shape[1]
        if name not in running.rows:
            running.rows[name] = _rows(mask, x)
        return running.rows[name]

    def _remember(self, masks: tuple[Tensor, ...]) -> _Call:
        """Return a new call that `_recall` finds from any thread."""
        call = _Call(masks)
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
            (other, mask)
            for call in calls
            if (mask := _fitting(call.masks, x)) is not None
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

    def _begin(self, model: nn.Module, given: dict[str, Any]) -> None:
        """Take the mask of a call from its arguments by name."""
        running = self._here.running
        mask = given.get(self.argument)
        decodes = self.argument == DECODER_MASK
        running.masks = ()
        if mask is None and decodes:
            running.masks = _decoder_masks(model, given)
        elif isinstance(mask, Tensor) and mask.dim() == 2:
            count = _positions(given, "decoder_" if decodes else "")
            longer = count is not None and 0 < count < mask.shape[1]
            running.masks = (mask, mask[:, -count:]) if longer else (mask,)  # type: ignore[operator]
        running.rows = {}
        running.model = model
        running.call = None
        running.grad_enabled = torch.is_grad_enabled()  # reentrant checkpointing turns it off

    def _end(self, model: nn.Module, output: Any) -> None:
        running = self._here.running
        if running.model is not model:  # one inside it
            return
        running.masks = ()
        running.rows = {}
        running.model = None
        if running.call is not None and not torch.compiler.is_compiling():
            running.call.tie(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenMask:
        """Return the mask itself: a copy of a layer goes on in the same model.

        Copies of the model have one of their own, which its hooks have made.
        """
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"argument": self.argument}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


@dataclass(frozen=True)
class _Hook:
    """A hook of a model, which its copies have with a mask of their own."""

    mask: TokenMask

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        # Hooks are copied before the layers below them, which then find this mask.
        mask = memo.setdefault(id(self.mask), TokenMask(self.mask.argument))
        return replace(self, mask=mask)


@dataclass(frozen=True)
class _Begin(_Hook):
    names: tuple[str, ...]  # of the model's arguments
    inner: bool  # of a model inside the one that was converted

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.inner and self.mask.runs:
            return
        self.mask._begin(module, dict(zip(self.names, args)) | kwargs)


class _End(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.mask._end(module, output)


def _positions(given: dict[str, Any], prefix: str) -> int | None:
    """Return the number of positions of each sequence of a call; None where that is unknown."""
    for name in ("input_ids", "inputs_embeds"):
        value = given.get(prefix + name)
        if isinstance(value, Tensor) and value.dim() > 1:
            return value.shape[1]
    return None


def _decoder_masks(model: nn.Module, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return possible masks of a decoder that is given none; the one that fits its rows counts.

    Of its labels [b s], which are no tokens' where they have another shape; of its tokens; of the
    encoder's tokens, where the model makes them the decoder's, one later.
    """
    masks = []
    labels, tokens = given.get("labels"), given.get("decoder_input_ids")
    if isinstance(labels, Tensor) and labels.dim() == 2:
        masks.append(labels != NO_LABEL)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if isinstance(tokens, Tensor):
        if model.training and padding is not None:
            masks.append(_from_the_second(tokens != padding))
    elif given.get("decoder_inputs_embeds") is None:
        encoder = given.get("attention_mask")
        if isinstance(encoder, Tensor) and encoder.dim() == 2:
            masks.append(_from_the_second(encoder.bool().roll(1, 1)))
    return tuple(masks)


def _from_the_second(mask: Tensor) -> Tensor:
    """Return a mask [b s] with the first token, which may be a decoder's padding."""
    mask[:, 0] = True
    return mask


def _is_called(model: nn.Module) -> bool:
    """Return whether a call of a model is under way in this thread."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _fitting(masks: tuple[Tensor, ...], x: Tensor) -> Tensor | None:
    """Return the mask [b s] that has an entry for each row of x [... c]; None where none has."""
    for mask in masks:
        if x.shape[:-1] == mask.shape or (x.dim() == 2 and x.shape[0] == mask.numel()):
            return mask
    return None


def _rows(mask: Tensor, x: Tensor) -> Tensor:
    """Return mask [b s] for the rows of x, as [b*s] bool on its device."""
    return mask.reshape(-1).bool().to(x.device)
