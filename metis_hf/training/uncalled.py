"""Warns about converted layers that are not called and therefore not quantized.

A loss that multiplies by `lm_head.weight` itself computes in high precision, while the conversion
report and health list the layer as converted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from torch import nn
from transformers.utils import logging

from metis_hf.conversion.deployed import every_expert
from metis_hf.layers.linear import MetisLayer
from metis_hf.training.copies import by_place

logger = logging.get_logger(__name__)

READ_INSTEAD = (
    "the model or the loss may read their weights without calling them, as fused and chunked "
    "losses do with an output head (Liger's, TRL's)"
)
_IN_FULL = 4  # names of one kind that are listed, at most


def warn_of_uncalled(model: nn.Module, layers: Mapping[str, MetisLayer]) -> None:
    """Warn about the converted layers that were not called since `layer.calls.forget()`."""
    running, _ = by_place(model, layers)  # without PEFT's inactive copies
    names = [name for name in running.values() if not layers[name].calls.any]
    if names:
        logger.warning(
            "the first step called %d of %d converted layers, but not %s. This is expected for "
            "experts without tokens, for modules of another branch (such as an image encoder in "
            "a batch of text) and for parts that run under torch.no_grad. Otherwise %s: these "
            "products are in high precision, although the conversion report and health list the "
            "layers as quantized. Use a loss that calls the layers, or leave them out with "
            "exclude_modules",
            len(running) - len(names),
            len(running),
            by_kind(names),
            READ_INSTEAD,
        )


def warn_of_unpacked(layers: Collection[str], called: Collection[str]) -> None:
    """Warn about the layers that calibration did not call.

    A call of one expert counts for all experts of its block.
    """
    places = {every_expert(name) for name in called}
    names = [name for name in layers if every_expert(name) not in places]
    if names:
        logger.warning(
            "calibration called %d of %d converted layers, but not %s. This is expected for "
            "modules of another branch (such as an image encoder if tokens are text). Otherwise "
            "%s: these layers are in high precision here, but in four bits in an export",
            len(layers) - len(names),
            len(layers),
            by_kind(names),
            READ_INSTEAD,
        )


def by_kind(names: Sequence[str]) -> str:
    """Return names in one line; many that differ only in numbers become a pattern and a count."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    parts = [
        ", ".join(members) if len(members) <= _IN_FULL else f"{kind} ({len(members)} layers)"
        for kind, members in kinds.items()
    ]
    return ", ".join(parts)
