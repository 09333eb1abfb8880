"""The device that is taken where none is named, and what is said of one that cannot compute."""

from __future__ import annotations

import pytest
import torch

from metis_hf.lab.compare.training import training_arguments
from metis_hf.lab.compare.variants import Experiment
from metis_hf.shared.devices import device_of
from metis_hf.training.start_checks import check_device


@pytest.fixture
def machine(monkeypatch):
    """Make a machine seem to have an accelerator of a kind."""

    def make(kind):
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda **_: torch.device(kind)
        )
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    return make


def test_an_accelerator_without_fp64_is_left_for_the_cpu(machine):
    machine("xpu")
    assert device_of(None).type == "xpu"
    machine("mps")
    assert device_of(None).type == "cpu"


def test_experiments_leave_it_too(machine, tmp_path):
    machine("mps")
    experiment = Experiment(
        model={}, training={"max_steps": 1}, sequence_length=8, health_interval=0, seed=0
    )
    found = training_arguments(experiment, tmp_path)
    assert (found.use_cpu, found.dataloader_pin_memory) == (True, False)


def test_a_device_that_cannot_compute_is_refused_by_name():
    with pytest.raises(ValueError, match=r"device='mps' cannot be used here \(it has no fp64"):
        device_of("mps")
    with pytest.raises(NotImplementedError, match=r"on mps.* no fp64.*use_cpu=True"):
        check_device(torch.device("mps"))
    check_device(torch.device("cuda"))
