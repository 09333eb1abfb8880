"""The attention mask of the running forward pass, so that padding is never sampled.

A layer sees rows, not sequences; only the model sees the mask. Each model has one TokenMask. Hooks
on the model, and on inner models that may be called directly, set and clear the mask of the calling
thread, and layers read it. Activation checkpointing recomputes layers inside backward without
calling the model, perhaps in another thread. TokenMask therefore remembers fingerprints of each
call's layer inputs for as long as the call's graph lives, and a recomputed layer finds its mask by
its input.
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
NO_LABEL = -100  # the label that transformers' losses ignore
_CALL = nn.Module._call_impl.__code__  # the frame around hooks and forward pass


class _Call:
    """One call of the model: its masks and layer inputs, which a recomputation may need."""

    def __init__(self, masks: tuple[Tensor, ...]) -> None:
        self.masks = masks
        self.thread = threading.get_ident()
        self.inputs: dict[str, list[Tensor]] = {}  # layer -> fingerprints of its inputs

    def tie(self, output: Any) -> None:
        """Let the graph of the model's output own this call, so that both are freed together."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                metadata: Any = leaf.grad_fn.metadata
                metadata[self] = True


class _Running:
    """The call of the model that one thread is running."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None  # the called model; None outside a call
        self.masks: tuple[Tensor, ...] = ()  # the given mask and its last columns, or candidates
        # Cache of `_rows`: layers that read one tensor must get the same mask object.
        self.rows: dict[tuple[torch.device, int], Tensor] = {}
        # The last call, kept until the next begins even if its output is freed.
        self.call: _Call | None = None
        self.grad_enabled = False


class _PerThread(threading.local):
    """One `_Running` for each thread.

    torch.compile tracks changes of an object's attributes, but loses changes of a threading.local.
    """

    def __init__(self) -> None:
        self.running = _Running()


class TokenMask:
    """Tells layers which rows of their input are tokens, not padding.

    Threads may share the model, as replicas of nn.DataParallel do; each has the mask of its own
    call. If several threads train it at once on one device, recompute activations, and give a layer
    equal inputs under different masks, a recomputed layer takes the mask of the calling thread; if
    backward has its own threads (on a GPU), it takes the mask of the latest call.

    For a decoder without a mask, as transformers' collators leave it, the rows whose label is not
    -100 are tokens. If Trainer smooths labels, and so does not pass them to the model, the rows
    whose token is not padding are tokens, in training. If the model shifts the encoder's tokens
    right by one for its decoder, the encoder's mask is shifted too.

    A mask may be longer than a call's tokens, if keys and values of earlier tokens come from a
    cache or from prefix tuning: its last columns belong to the call.

    Args:
        argument: name of the model's argument that holds the mask, [b s].
    """

    def __init__(self, argument: str = "attention_mask") -> None:
        self.argument = argument
        self._here = _PerThread()
        self._lock = threading.Lock()
        self._calls: tuple[weakref.ref[_Call], ...] = ()  # oldest first; replaced under the lock

    def register(self, model: nn.Module) -> None:
        """Add hooks to the forward pass of the model, and of inner models that take this mask."""
        for module in model.modules():
            inner = module is not model
            if inner and not (isinstance(module, PreTrainedModel) and self._is_of(module)):
                continue
            names = tuple(inspect.signature(module.forward).parameters)
            module.register_forward_pre_hook(_Begin(self, names, inner), with_kwargs=True)
            module.register_forward_hook(_End(self), always_call=True)

    def _is_of(self, module: nn.Module) -> bool:
        """Return whether an inner model takes this mask, and has layers that read it.

        In a decoder inside an encoder-decoder, `attention_mask` is the decoder's own mask.
        """
        masks = {id(each) for m in module.modules() if (each := getattr(m, "token_mask", None))}
        names = inspect.signature(module.forward).parameters
        own = masks == {id(self)} or DECODER_MASK in names
        return own and id(self) in masks and self.argument in names

    @staticmethod
    def unregister(model: nn.Module) -> None:
        """Remove the hooks of every TokenMask from the model and its inner models."""
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

        An interrupted call skips its end hook and leaves its mask, so this also checks the stack.
        """
        model = self._here.running.model
        return model is not None and (torch.compiler.is_compiling() or _is_called(model))

    def rows(self, x: Tensor, owner: str) -> Tensor | None:
        """Return the mask as [t] bool for the rows of x [... c]; None if no mask fits them.

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
        """Register a new call, which `_recall` finds from any thread."""
        call = _Call(masks)
        with self._lock:
            alive = (known for known in self._calls if known() is not None)
            self._calls = (*alive, weakref.ref(call))
        return call

    def _recall(self, x: Tensor, owner: str) -> Tensor | None:
        """Return the mask of the remembered call that had this input, without host sync."""
        here = threading.get_ident()
        calls = [call for known in self._calls if (call := known()) is not None]
        calls.sort(key=lambda call: call.thread == here)  # later ones win
        # Fingerprints of other replicas are on other devices.
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
        """Set the mask of a call from its arguments by name."""
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
        if running.model is not model:  # an inner model
            return
        running.masks = ()
        running.rows = {}
        running.model = None
        if running.call is not None and not torch.compiler.is_compiling():
            running.call.tie(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenMask:
        """Return this mask: a copied layer stays in the same model.

        A copied model has its own mask, which its copied hooks make.
        """
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"argument": self.argument}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


@dataclass(frozen=True)
class _Hook:
    """A hook of a model; a copy of the model has a copy of the hook with its own mask."""

    mask: TokenMask

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        # Hooks are copied before the layers of the model, which then find this mask in `memo`.
        mask = memo.setdefault(id(self.mask), TokenMask(self.mask.argument))
        return replace(self, mask=mask)


@dataclass(frozen=True)
class _Begin(_Hook):
    names: tuple[str, ...]  # of the model's arguments
    inner: bool  # the hook is on an inner model

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.inner and self.mask.runs:
            return
        self.mask._begin(module, dict(zip(self.names, args)) | kwargs)


class _End(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.mask._end(module, output)


def _positions(given: dict[str, Any], prefix: str) -> int | None:
    """Return the sequence length of a call; None if unknown."""
    for name in ("input_ids", "inputs_embeds"):
        value = given.get(prefix + name)
        if isinstance(value, Tensor) and value.dim() > 1:
            return value.shape[1]
    return None


def _decoder_masks(model: nn.Module, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return candidate masks of a decoder without one; the first that fits its rows is used.

    They come from labels [b s] (other shapes are not labels of tokens), from the decoder's tokens,
    or, if the model shifts the encoder's tokens right for the decoder, from the encoder's mask.
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
    """Set a mask [b s] to True at the first token, which may equal the padding token."""
    mask[:, 0] = True
    return mask


def _is_called(model: nn.Module) -> bool:
    """Return whether this thread is inside a call of the model."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _fitting(masks: tuple[Tensor, ...], x: Tensor) -> Tensor | None:
    """Return the first mask [b s] with an entry for each row of x [... c]; None if none has."""
    for mask in masks:
        if x.shape[:-1] == mask.shape or (x.dim() == 2 and x.shape[0] == mask.numel()):
            return mask
    return None


def _rows(mask: Tensor, x: Tensor) -> Tensor:
    """Return mask [b s] for the rows of x, as [b*s] bool on its device."""
    return mask.reshape(-1).bool().to(x.device)
