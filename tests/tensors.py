"""Tensors that tests compare, and the logits that they are of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def named(tensors) -> dict:
    """The tensors of a module, a mapping or a sequence, by their names or places."""
    if isinstance(tensors, nn.Module):
        tensors = tensors.state_dict()
    return dict(tensors if isinstance(tensors, Mapping) else enumerate(tensors))


def bits(tensor: Tensor) -> Tensor:
    """The bytes, in which NaN and the sign of zero count."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def same(found, expected) -> bool:
    """Whether two modules, mappings or sequences have the same tensors, to the bit."""
    found, expected = named(found), named(expected)
    return found.keys() == expected.keys() and not differing(found, expected)


def assert_same(found, expected) -> None:
    """Names the tensors that are not the same, to the bit."""
    found, expected = named(found), named(expected)
    assert found.keys() == expected.keys()
    assert not differing(found, expected)


def differing(found: dict, expected: dict) -> list:
    return [
        name
        for name, value in expected.items()
        if (found[name].dtype, found[name].shape) != (value.dtype, value.shape)
        or not torch.equal(bits(found[name]), bits(value))
    ]


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, of that of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest element that is expected."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def logits(model, ids: Tensor) -> Tensor:
    """In evaluation."""
    return model.eval()(input_ids=ids).logits
