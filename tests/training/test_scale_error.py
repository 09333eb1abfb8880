"""The sample that calibration by squared error measures."""

from __future__ import annotations

import itertools

import pytest
import torch

from metis_hf.numerics import Quantizer
from metis_hf.training import scale_error
from metis_hf.training.scale_error import BlockSample

QUANTIZER = Quantizer()


def batches(count=3, rows=64, columns=160):
    """Heavy tails, outlying channels, rows of zeros, and values that repeat."""
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        x = torch.randn(rows, columns, generator=g) * torch.randn(rows, 1, generator=g).exp()
        x[:, 3] *= 30
        x[::5] = 0
        x[1::5] = 1.5
        found.append(x.bfloat16().float())
    return found


def sampled(parts):
    sample = BlockSample(QUANTIZER)
    for part in parts:
        sample.add(part, part)
    return sample


def amaxes(parts):
    largest = max(part.abs().max().item() for part in parts)
    return [largest * 2.0 ** (-step / 4) for step in range(9)]


def whole(parts):
    x = torch.cat(parts)
    return [
        (QUANTIZER(x, amax=torch.tensor(amax)) - x).double().square().sum().item()
        for amax in amaxes(parts)
    ]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(scale_error, "LARGEST", 100)
    monkeypatch.setattr(scale_error, "SPREAD", 300)


def test_few_blocks_are_measured_all():
    parts = batches()
    torch.testing.assert_close(sampled(parts).errors(amaxes(parts)), whole(parts))


@pytest.mark.usefixtures("small")
def test_the_order_of_batches_changes_no_bit():
    parts = batches()
    found = [sampled(order).errors(amaxes(parts)) for order in itertools.permutations(parts)]
    assert all(each == found[0] for each in found)
    assert found[0] != whole(parts)  # it is a sample


@pytest.mark.usefixtures("small")
def test_a_sample_stands_for_the_whole():
    """Most of the error of the small scales is that of a few clipped blocks, which are all kept."""
    parts = batches(8)
    found, expected = sampled(parts).errors(amaxes(parts)), whole(parts)
    assert found == pytest.approx(expected, rel=0.1)
    assert found.index(min(found)) == expected.index(min(expected))


def test_an_input_of_several_layers_counts_once():
    (x,) = batches(1)
    sample = sampled([x])
    once = sample.errors([1.0])
    sample.add(x.view(-1, x.shape[1]), x)
    assert sample.errors([1.0]) == once
    sample.add(x, x.clone())
    assert sample.errors([1.0]) == pytest.approx([2 * once[0]])
