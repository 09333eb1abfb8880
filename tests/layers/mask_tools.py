"""Batches with padding, and the models that tests of token masks give them to."""

from __future__ import annotations

import conftest
import torch
from conftest import VOCAB, llama

from metis_hf import MetisConfig, get_metis_model, metis_layers

THREADS, LENGTH = 3, 24


def batches() -> list[dict[str, torch.Tensor]]:
    """Of one shape, each with its own padding; the last two differ in nothing else."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for index in range(THREADS):
        ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
        if index == THREADS - 1:
            ids = made[-1]["input_ids"]
        mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH - 5 * index], [20]])).long()
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
    return made


def llama_with(scheme: str, checkpointing: bool = False, layers: int = 2, **changes):
    torch.manual_seed(0)
    config = MetisConfig(scheme=scheme, rank=4, **changes)
    model = get_metis_model(llama(layers), config).train()
    if checkpointing:
        options = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def t5():
    """A converted encoder-decoder."""
    return get_metis_model(conftest.t5(pad_token_id=0), MetisConfig(scheme="metis", rank=4))


def masks_of(model, call):
    """The rows of tokens that each layer is told of in call(), by name."""
    seen = {}

    def note(name):
        return lambda layer, args: seen.__setitem__(name, layer.row_mask(args[0]))

    hooks = [
        layer.register_forward_pre_hook(note(name), prepend=True)
        for name, layer in metis_layers(model)
    ]
    call()
    for hook in hooks:
        hook.remove()
    return seen
