"""What tests of fidelity measure, and the same model and tokens by plain means."""

from __future__ import annotations

import torch
import transformers

from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.lab.fidelity.settings import Settings

SMALL = {"sequences": 12, "length": 24, "batch": 2}


def settings(place, **changes):
    return Settings(str(place / "model"), place / "text.txt", **SMALL | changes)


def load(place):
    return transformers.LlamaForCausalLM.from_pretrained(place / "model")


def token_ids(place):
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    text = (place / "text.txt").read_text()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    count, length = SMALL["sequences"], SMALL["length"]
    return torch.tensor(ids[: count * length]).view(count, length)


def gradients(place, scheme, **options):
    """Return the gradient of all converted weights for each batch, of a plainly converted model."""
    model = get_metis_model(load(place), MetisConfig(scheme=scheme, **options)).train()
    rows = []
    for ids in token_ids(place)[8:].split(2):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        grads = [layer.weight.grad.flatten() for _, layer in metis_layers(model)]
        rows.append(torch.cat(grads).double())
    return rows
