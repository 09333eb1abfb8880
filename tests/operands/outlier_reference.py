"""Operands with outliers apart, in float64 from a recording; see layer_reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from layers.layer_reference import Recording, Slot, Terms, array, exact

from metis_hf.operands import RandomHadamard, Requantized
from metis_hf.operands.conditioners.clamped import thresholds
from metis_hf.schemes.noise_keys import CallKeys
from metis_hf.transforms.hadamard import group_size


def clamped_operand(recording: Recording, x: np.ndarray, row: Slot) -> Terms:
    """Q(clamp(x)) and what is missing, in BF16; thresholds as the layer has them."""
    low, high = thresholds(torch.from_numpy(x), x.size // 100)
    clamped = np.clip(x, array(low), array(high))
    rest = torch.from_numpy(x - clamped).bfloat16().float()
    assert rest.any()
    return recording.quantize(clamped, row) + exact(rest)


def hot_operand(recording: Recording, x: np.ndarray, row: Slot) -> Terms:
    """Q(x) + Q(x - Q(x)) in the 16 channels of largest mean error."""
    first = recording.quantize(x, row)
    error = x - first.value.astype(np.float32)
    score = np.abs(error.astype(np.float64)).mean(1 + row.dim)  # the other dimension
    hot = np.sort(np.argsort(-score)[:16])
    patch = recording.quantize(np.take(error, hot, axis=row.dim), row)
    place = np.eye(len(score))[:, hot]  # [channels 16]
    return first + (patch @ exact(place).T if row.dim else exact(place) @ patch)


def with_content(conditioner, keys: CallKeys, slot: str):
    """A random rotation that knows its call's signs: of the weight in dgrad, the input in wgrad."""
    content = (keys.weight_key if slot.startswith("dgrad") else keys.input_key).data
    if isinstance(conditioner, Requantized):
        return replace(conditioner, second=with_content(conditioner.second, keys, slot))
    if isinstance(conditioner, RandomHadamard):
        return replace(conditioner, content=content)
    return conditioner


def random_signs(conditioner: RandomHadamard, n: int) -> np.ndarray:
    """The signs of one group of n entries; a test of its own says that they are random."""
    assert conditioner.content is not None
    unit = torch.eye(group_size(n), device=conditioner.content.device)  # [g g]
    return np.sign(array(conditioner.forward(unit, dim=-1)[:, 0]))  # H's first row is positive
