"""What a run trains on, and the memory that it takes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from transformers import TrainingArguments

from metis_hf.lab.compare.meters import PeakMemory
from metis_hf.lab.compare.training import whole_batches


def arguments(folder, steps):
    return TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, use_cpu=True,
    )  # fmt: skip


def test_every_step_of_several_epochs_has_a_whole_batch(tmp_path):
    """The last sequences of an epoch would be a smaller batch, and its tokens counted in full."""
    rows = datasets.Dataset.from_dict({"input_ids": [[n] for n in range(10)]})
    found = whole_batches(rows, arguments(tmp_path, steps=3))
    assert [row["input_ids"] for row in found] == [[n] for n in range(8)]
    ids = torch.arange(10)
    found = whole_batches(torch.utils.data.TensorDataset(ids), arguments(tmp_path, steps=3))
    assert [int(row[0]) for row in found] == list(range(8))


def test_nothing_is_taken_off_a_run_within_one_epoch(tmp_path):
    rows = datasets.Dataset.from_dict({"input_ids": [[n] for n in range(10)]})
    assert whole_batches(rows, arguments(tmp_path, steps=2)) is rows


def test_less_than_a_batch_is_refused(tmp_path):
    rows = datasets.Dataset.from_dict({"input_ids": [[1]] * 3})
    with pytest.raises(ValueError, match="3 sequences to train on are no batch of 4"):
        whole_batches(rows, arguments(tmp_path, steps=1))


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_memory_is_the_peak_where_there_is_no_proc(platform, unit, monkeypatch):
    """Also where what was in use then is free again."""

    def missing(path, *args):
        raise FileNotFoundError

    peaks = iter((100, 700, 700))
    for method in ("read_text", "write_text"):
        monkeypatch.setattr(Path, method, missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=next(peaks)))
    memory = PeakMemory()
    assert [memory.bytes(), memory.bytes()] == [600 * unit] * 2
