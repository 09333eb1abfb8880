"""Checkpoints to export, and what they compute."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import conftest
import torch
from conftest import VOCAB, llama
from texts import documents

from metis_hf import MetisConfig, get_metis_model
from metis_hf.data.corpus import train_tokenizer
from metis_hf.schemes import Role

ALL_SPLIT = {"scheme": "metis", "decompose": ["weight", "activation", "gradient"]}
mixtral = functools.partial(conftest.mixtral, 4, num_hidden_layers=2)


def checkpoint(path: Path, build=llama, tokenizer: bool = False, **config) -> Path:
    """A saved Metis checkpoint whose weights have moved since their decomposition."""
    model = get_metis_model(build(), MetisConfig(**config))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.01 * param.std() * torch.randn(param.shape, generator=generator)
                       if param.numel() > 1 else 0)  # fmt: skip
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(path)
    if tokenizer:
        train_tokenizer(documents()[:3], vocab_size=VOCAB + 1).save_pretrained(path)
    return path


def recorded_rows(out: Path) -> dict:
    """The rows of an export's record by kind of layer; JSON has no NaN and no infinity."""

    def fail(constant):
        raise AssertionError(constant)

    record = json.loads((out / "metis_export.json").read_text(), parse_constant=fail)
    return {row["kind"]: row for row in record["rows"]}


@torch.no_grad()
def logits(model, ids):
    return model.eval()(input_ids=ids).logits.float()


@torch.no_grad()
def w_hat(layer):
    """The weight as it enters the forward GEMM of a layer in evaluation, fp32."""
    operand = layer.eval_scheme.fprop_weight
    params = [param.detach() for param in layer.weight_params()]
    key = layer.call_keys(torch.zeros(1, layer.in_features))[Role.FPROP_WEIGHT]
    return layer.weight_form.quantize(params, operand, dim=-1, key=key, dtype=torch.float32)[0]
