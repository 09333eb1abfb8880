"""Marks of tensors, and values that are kept as long as a mark holds."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from metis_hf.operands.kept import Kept, mark_of

CHANGES = {
    "in place": lambda x: x.mul_(2),
    "of a view": lambda x: x[:2].zero_(),
    "data": lambda x: setattr(x, "data", x.data.clone()),
    "dtype": lambda x: setattr(x, "data", x.data.view(torch.int32)),
    "place in its storage": lambda x: setattr(x, "data", x.data[1:]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_another_mark(change):
    x, other = torch.ones(8), torch.ones(8)
    before, both = mark_of(x), mark_of(x, other)
    assert mark_of(x) == before
    assert mark_of(other) != before
    CHANGES[change](x)
    assert mark_of(x) != before
    assert mark_of(x, other) != both


def test_a_new_tensor_at_an_old_address_has_another_mark():
    x = torch.ones(4096)
    before, storage = mark_of(x), StorageWeakRef(x.untyped_storage())
    del x
    assert storage.expired()  # a mark keeps no memory
    for _ in range(50):
        assert mark_of(torch.ones(4096)) != before


def test_another_mark_drops_the_values():
    kept, x = Kept(), torch.ones(3)
    assert kept.is_empty
    assert kept.at(mark_of(x)) is None
    kept.start(mark_of(x))["a"] = 1
    assert kept.at(mark_of(x)) == {"a": 1}
    x.add_(1)
    assert kept.at(mark_of(x)) is None
    assert len(kept) == 1  # until something is made of the new contents
    assert kept.start(mark_of(x)) == {}
    assert len(kept) == 0


def test_forgetting():
    kept, x = Kept(), torch.ones(3)
    old = kept.start(mark_of(x))
    new = kept.start(mark_of(x, x))
    kept.forget(old)
    assert kept.at(mark_of(x, x)) is new
    kept.forget(new)
    assert kept.is_empty
