"""Cases of distributed_run: steps that each process records by itself under DDP."""

from __future__ import annotations

from unittest import mock

import torch

from metis_hf.training import trainer as trainer_module
from metis_hf.training.cuda_graph import StepGraphs
from training.distributed_cases import error_of, outcome
from training.distributed_run import Rows, build, make_trainer
from training.recordings import Again

CONFIGS = {
    "kept subspaces": {"scheme": "metis", "subspace_interval": 2, "subspace_refinements": 1},
    "split weight": {"scheme": "metis", "split_weight": True},
}


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
            graphs = StepGraphs(model, Again(model))
            with mock.patch.object(trainer_module, "StepGraphs", return_value=graphs):
                trainer.train()
            buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
            seen = {"played": graphs.record.played, "buffers": buffers}
            results[name, cuda_graphs] = outcome(trainer) | seen
    return results


def spare_parameter(engine, out):
    """The error of a parameter that gets no gradient."""
    model = build()
    model.spare = torch.nn.Parameter(torch.zeros(1))
    trainer = make_trainer(engine, out, model)
    trainer.cuda_graphs = True
    return error_of(trainer.train)
