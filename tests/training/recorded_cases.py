"""Cases of distributed_run: steps that each process records by itself, under FSDP2 by blocks."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from metis_hf.training import trainer as trainer_module
from metis_hf.training.block_graphs import BlockGraphs
from metis_hf.training.cuda_graph import StepGraphs
from training.distributed_cases import error_of, outcome
from training.distributed_run import Rows, build, make_trainer
from training.recordings import Again, AgainFromPlaces

CONFIGS = {
    "kept subspaces": {"scheme": "metis", "subspace_interval": 2, "subspace_refinements": 1},
    "split weight": {"scheme": "metis", "split_weight": True},
}


@contextlib.contextmanager
def recording_by(recorder):
    """Let trainers record steps, and blocks under FSDP2, with a stand-in for CUDA graphs."""

    class Steps(StepGraphs):
        def __init__(self, model) -> None:
            super().__init__(model, recorder)

    class Blocks(BlockGraphs):
        def __init__(self, blocks) -> None:
            super().__init__(blocks, recorder)

    stand_ins = {"StepGraphs": Steps, "BlockGraphs": Blocks}
    with mock.patch.multiple(trainer_module, **stand_ins):
        yield


class TwoLengths(Rows):
    """Every second batch of the second process is shorter, so it records its steps later."""

    def __getitem__(self, index):
        length = 16 if index // 4 % 4 == 3 else 32
        return {key: row[:length] for key, row in super().__getitem__(index).items()}


class Noted(torch.nn.Module):
    """A norm with a running mean, of which each process has its own after a forward pass."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(), 0.1)
        return self.norm(x)


def recorded(engine, out):
    """Steps of two micro-batches, in Python and from recordings."""
    results = {}
    for name, config in CONFIGS.items():
        for cuda_graphs in (False, True):
            model = build(**config)
            model.model.norm = Noted(model.model.norm)
            options = {"max_steps": 8, "gradient_accumulation_steps": 2}
            trainer = make_trainer(engine, out, model, **options)
            trainer.train_dataset = TwoLengths(128)
            trainer.cuda_graphs = cuda_graphs
            recorder = Again(model) if engine == "ddp" else AgainFromPlaces(model)
            with recording_by(recorder):
                trainer.train()
            buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
            seen = {"played": recorder.played, "buffers": buffers}
            results[name, cuda_graphs] = outcome(trainer) | seen
    return results


def spare_parameter(engine, out):
    """The error of a parameter that gets no gradient."""
    model = build()
    model.spare = torch.nn.Parameter(torch.zeros(1))
    trainer = make_trainer(engine, out, model)
    trainer.cuda_graphs = True
    return error_of(trainer.train)
