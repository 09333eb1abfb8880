"""Quantizing each weight once for all micro-batches of an optimizer step.

A weight's noise depends on the weight alone, so that all micro-batches of a step see the very same
w_hat, whatever the rounding: reusing it changes no bit. What is kept is packed, 4.5 bits an element
and operand. Inside torch.compile nothing is reused, nor where the operand depends on the call:
under a scheme with scales per channel, which come from the call's own input until there is an
average, and with static tensor scales until they are fixed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, MutableMapping

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from metis_hf.conversion.convert import metis_layers
from metis_hf.layers.parallelism import is_sharded
from metis_hf.operands.kept_weight import KeptWeight

_FORGETTING: MutableMapping[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def reuse_weights(model: nn.Module) -> Iterator[None]:
    """Reuse quantized weights in the block, in which no parameter may change: for micro-batches.

        with reuse_weights(model):
            for batch in micro_batches:
                model(**batch).loss.backward()
        optimizer.step()

    MetisCallback does this where a step has several micro-batches or recomputes activations.
    """
    hold(model)
    try:
        yield
    finally:
        release(model)


def hold(model: nn.Module) -> None:
    """Begin to keep what is quantized of weights, except of those that are sharded.

    Their whole copies would outlive the moment for which they are gathered, and a part's tensor
    scale comes from all processes in each call. Where nobody calls `release`, because a step was
    interrupted, the next step of an optimizer ends it: fused optimizers write parameters without a
    trace that could be seen.
    """
    if model not in _FORGETTING:
        held = weakref.ref(model)
        _FORGETTING[model] = register_optimizer_step_post_hook(lambda *_: _forget(held()))
    for _, layer in metis_layers(model):
        # Operands of a cut layer take the tensor scale of all processes, call by call.
        is_cut = layer.shards is not None and layer.shards.cut
        if not is_cut and not any(map(is_sharded, layer.parameters(recurse=False))):
            layer.reused_weight = KeptWeight()


def release(model: nn.Module) -> None:
    """Forget it; before parameters change."""
    if (hook := _FORGETTING.pop(model, None)) is not None:
        hook.remove()
    _forget(model)


def _forget(model: nn.Module | None) -> None:
    for _, layer in metis_layers(model) if model is not None else ():
        layer.reused_weight = None
