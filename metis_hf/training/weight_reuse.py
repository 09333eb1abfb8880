"""Quantizes each weight once for all micro-batches of an optimizer step.

A weight's noise depends on the weight alone, so all micro-batches of a step see the same w_hat
under any rounding, and reusing it changes no bit. Cached operands are packed, 4.5 bits per element
each. Nothing is reused inside torch.compile, nor where the operand depends on the call: with
channel scales, which come from the call's input until there is a running average, and with static
tensor scales until they are fixed.
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
    """Reuse quantized weights over the micro-batches in the block; no parameter may change in it.

        with reuse_weights(model):
            for batch in micro_batches:
                model(**batch).loss.backward()
        optimizer.step()

    MetisCallback does this if a step has several micro-batches or recomputes activations.
    """
    hold(model)
    try:
        yield
    finally:
        release(model)


def hold(model: nn.Module) -> None:
    """Start caching quantized weights, except sharded weights.

    A cached full copy of a sharded weight would outlive its gather. If a step is interrupted before
    `release`, the next optimizer step drops the cache; a hook is needed for this because fused
    optimizers change parameters without updating their version counters.
    """
    if model not in _FORGETTING:
        held = weakref.ref(model)
        _FORGETTING[model] = register_optimizer_step_post_hook(lambda *_: _forget(held()))
    for _, layer in metis_layers(model):
        # Under tensor parallelism the processes agree on the tensor scale in each call.
        is_cut = layer.shards is not None and layer.shards.cut
        if not is_cut and not any(map(is_sharded, layer.parameters(recurse=False))):
            layer.reused_weight = KeptWeight()


def release(model: nn.Module) -> None:
    """Drop the cached weights; call this before parameters change."""
    if (hook := _FORGETTING.pop(model, None)) is not None:
        hook.remove()
    _forget(model)


def _forget(model: nn.Module | None) -> None:
    for _, layer in metis_layers(model) if model is not None else ():
        layer.reused_weight = None
