"""The attention mask of the running forward pass, so that padding is never sampled.

A layer sees rows, not sequences; the model sees the mask. One TokenMask per model hangs between
them: hooks on the model set and clear it, layers read it. A pass that is recomputed inside backward
(activation checkpointing) does not come through the model, so each layer's calls are remembered
with a fingerprint of their input, and the recomputed call finds its own mask by it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from metis_hf.noise import fingerprint

_REMEMBERED_CALLS = 64  # per layer, between two backward passes


class TokenMask:
    """Which rows of a layer's input are tokens, not padding.

    Args:
        argument: name of the model's keyword argument that holds the mask, [b s].
    """

    def __init__(self, argument: str = "attention_mask") -> None:
        self.argument = argument
        self._current: Tensor | None = None
        self._running = False  # inside a call of the model
        self._grad_enabled = False
        self._calls: dict[str, deque[tuple[Tensor, Tensor]]] = {}
        self._recomputed = False

    def register(self, model: nn.Module) -> None:
        """Hooks into the model's forward pass."""
        model.register_forward_pre_hook(_Begin(self), with_kwargs=True)
        model.register_forward_hook(_End(self), always_call=True)

    @staticmethod
    def unregister(model: nn.Module) -> None:
        """Removes every TokenMask's hooks from the model."""
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, _Begin | _End):
                    del hooks[key]
                    model._forward_pre_hooks_with_kwargs.pop(key, None)
                    model._forward_hooks_always_called.pop(key, None)

    def rows(self, x: Tensor, owner: str) -> Tensor | None:
        """The mask as [t] bool for the t rows of x [... c]; None where there is no mask for them.

        Args:
            x: input of a layer: [b s c], or [b*s c].
            owner: name of the layer.
        """
        if not self._running and _in_backward():
            return self._recall(x, owner)
        mask = self._current if self._running else None
        mask = mask if mask is not None and _fits(mask, x) else None
        if mask is None:
            return None
        if self._grad_enabled and not torch.compiler.is_compiling():
            calls = self._calls.setdefault(owner, deque(maxlen=_REMEMBERED_CALLS))
            calls.append((fingerprint(x), mask))
        return mask.reshape(-1).bool()

    def _recall(self, x: Tensor, owner: str) -> Tensor | None:
        """The mask of the remembered call whose input this was; nothing leaves the device."""
        self._recomputed = True
        calls = [call for call in self._calls.get(owner, ()) if _fits(call[1], x)]
        if not calls:
            return None
        found = torch.ones(calls[0][1].numel(), dtype=torch.bool, device=x.device)
        mine = fingerprint(x)
        for other, mask in calls:
            found = torch.where(mine == other, mask.reshape(-1).bool(), found)
        return found

    def _begin(self, kwargs: dict[str, Any]) -> None:
        if self._recomputed and not _in_backward():
            self._calls.clear()  # those calls have been through backward
            self._recomputed = False
        mask = kwargs.get(self.argument)
        self._current = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._running = True
        self._grad_enabled = torch.is_grad_enabled()  # reentrant checkpointing turns it off inside

    def _end(self) -> None:
        self._current = None
        self._running = False

    def __getstate__(self) -> dict[str, Any]:
        return {"argument": self.argument}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _Begin:
    def __init__(self, mask: TokenMask) -> None:
        self.mask = mask

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.mask._begin(kwargs)


class _End:
    def __init__(self, mask: TokenMask) -> None:
        self.mask = mask

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.mask._end()


def _fits(mask: Tensor, x: Tensor) -> bool:
    """Whether x [... c] has a row for each entry of mask [b s]."""
    return x.shape[:-1] == mask.shape or (x.dim() == 2 and x.shape[0] == mask.numel())


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
