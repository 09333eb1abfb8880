"""The part `large`: training steps of the full Llama-3 8B on one GPU.

Weights, gradients and AdamW's state are in bf16, 64 GB together. Blocks are recomputed in the
backward pass, by activation checkpointing or from their recordings. One model fits at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import torch
import transformers
from memory import peak_memory
from timing import Row, interleave, summary

from metis_hf import MetisConfig, get_metis_model
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.training.block_graphs import BlockGraphs
from metis_hf.training.cuda_graph import WARM_UP
from on_gpu.context import Context
from on_gpu.record import Item

CONTROL = "bf16"
# (scheme, whether blocks are recorded), most valuable first.
CASES = (
    (CONTROL, False), ("metis", True), ("nvfp4-rne", True), ("metis", False), ("nvidia", True),
    (CONTROL, True),
)  # fmt: skip
BATCH, LENGTH = 2, 2048
_QUICK = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def large(context: Context) -> Iterator[Item]:
    for scheme, recorded in CASES:
        if not recorded or context.device.type == "cuda":
            yield Item(_title(scheme, recorded), partial(measure, scheme, recorded, context))


def _title(scheme: str, recorded: bool) -> str:
    return f"{scheme}, {'blocks recorded' if recorded else 'by Python'}"


def measure(scheme: str, recorded: bool, context: Context) -> Row:
    """Measure a step of the model under a scheme: time, tokens per second, memory."""
    device, size = context.device, SIZES["8b"]
    config = transformers.AutoConfig.for_model(
        size.model_type, **size.config | (_QUICK if context.quick else {}), use_cache=False
    )
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if scheme != CONTROL:
        get_metis_model(model, MetisConfig(scheme=scheme))
    graphs = BlockGraphs(model.model.layers) if recorded else None
    if graphs is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    shape = (BATCH, 32 if context.quick else LENGTH)
    ids = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP + 1 if recorded else 1):
        step()
    with peak_memory(device) as peak:
        (seconds,) = interleave([step], context.rounds, budget=context.budget, device=device)
    found = summary(seconds) | {
        "name": scheme,
        "recorded": graphs is not None and graphs.refused is None,
        "note": None if graphs is None else graphs.refused,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_s": ids.numel() / statistics.median(seconds),
        "peak_bytes": peak.get("bytes"),
    }
    if graphs is not None:
        graphs.forget()
    return {"rows": [found]}
