"""What one of two processes of test_stateful_schemes does: trains layers under DDP or FSDP2."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from metis_hf import MetisConfig
from metis_hf.layers.make import convert_linear
from metis_hf.schemes import tetrajet2
from metis_hf.schemes.states import Oscillation
from metis_hf.training.layer_states import after_step

RANKS, STEPS = 2, 5
WINDOW = {"period": 4, "window": 1, "threshold": 1.0, "start": 0.0}

KEPT = {"rank": 4, "subspace_interval": 2, "subspace_refinements": 1}


def batch(step, rank):
    """[24 48], of another size in each step and on each rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(24, 48, generator=generator) * (1 + step / 3 + rank / 2)


def train(scheme, engine, rank):
    """State dict (whole) after the training, and the ranges of its steps on this process."""
    torch.manual_seed(0)
    linear = nn.Linear(48, 32)
    config = MetisConfig(scheme=scheme, **(KEPT if scheme == "metis" else {}))
    model = nn.Sequential(convert_linear(linear, config, name="layer").train())
    layer = model[0]
    if engine == "ddp":
        model = DistributedDataParallel(model)
    elif engine == "fsdp":
        fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ranges = []
    for step in range(1, STEPS + 1):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(model, step, STEPS)
        ranges.append({k: v.clone() for k, v in layer.state_buffers().items()})
    options = StateDictOptions(full_state_dict=True)
    return {"state": get_model_state_dict(model, options=options), "ranges": ranges}


def run(rank, engine, schemes, out):
    """Entry point of a process."""
    torch.set_num_threads(1)
    tetrajet2.Oscillation = functools.partial(Oscillation, **WINDOW)
    dist.init_process_group("gloo", f"file://{out}/store", rank=rank, world_size=RANKS)
    try:
        results = {scheme: train(scheme, engine, rank) for scheme in schemes}
        torch.save(results, f"{out}/{rank}.pt")
    finally:
        dist.destroy_process_group()
