"""Count the four-bit share of a training step: tables next to the record and in docs/choosing.md.

    python eval/studies/four_bit_share.py

Counts multiply-adds and bytes of three models from their configs, scheme by scheme. Nothing is
trained and no weight is allocated. The record is eval/results/four-bit-share.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from publish import RESULTS, ROOT, page_with
from transformers import AutoConfig, PreTrainedConfig

from metis_hf import MetisConfig, get_metis_model
from metis_hf.conversion.report import gemm_weights
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.cost import Overhead, meta_model, model_overhead
from metis_hf.lab.rank_memory import Workload, saved_bytes, state_memory
from metis_hf.lab.show.table import markdown_table
from metis_hf.lab.training_plan import step_flops

RECORD = RESULTS / "four-bit-share.json"
PAGES = (RECORD.with_suffix(".md"), ROOT / "docs" / "choosing.md")
WAYS = (("bf16", "fp32"), ("metis", "fp32"), ("metis", "4 bit"))  # scheme, AdamW's moments
SCHEMES = ("nvfp4-rne", "nvidia", "quartet2", "metis")
TOKENS = 8192  # in a step; the costs of weights are spread over them
IN_FOUR_BITS = ("thin_products", "corrections")  # parts a scheme adds whose factors are both codes
# torchao 0.18: AdamW4bit has two moments of 4 bits, with an fp32 scale per 128 values.
MOMENT_BYTES = {"fp32": 4.0, "4 bit": 0.5 + 4 / 128}


@dataclass(frozen=True)
class Model:
    """A model and the sequence length that it is trained with."""

    name: str
    config: PreTrainedConfig
    sequence_length: int


def models() -> list[Model]:
    """Return the three models."""
    smol = AutoConfig.for_model(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return [Model("SmolLM2-135M", smol, 2048)] + [
        Model(name, AutoConfig.for_model(SIZES[size].model_type, **SIZES[size].config),
              SIZES[size].sequence_length)
        for name, size in (("GPT-2 1.1B", "1b1"), ("Llama-3 8B", "8b"))
    ]  # fmt: skip


def multiply_adds(model: Model, scheme: str) -> dict[str, Any]:
    """Count a step's exact multiply-adds, and the shares of codes by quantized part."""
    dense = meta_model(model.config)
    load = workload(model)
    gemms = gemm_weights(dense)
    everything = tuple({name.rpartition(".")[2] for name in gemms})  # the head too, tied or not
    get_metis_model(dense, MetisConfig(scheme=scheme))
    costs = step_flops(dense, gemms, load)
    passes = load.tokens_per_step
    head = 6.0 * passes * model.config.vocab_size * model.config.hidden_size
    exact = {"linear": costs["gemm"], "head": head, "attention": costs["attention"]}
    added = model_overhead(model.config, MetisConfig(scheme=scheme), TOKENS)
    whole = MetisConfig(scheme=scheme, target_modules=everything)
    with_head = model_overhead(model.config, whole, TOKENS)
    assert abs(costs["other_gemm"] - head) < 1e-6 * head, "a GEMM is neither counted nor known"
    return {
        "exact": exact,
        "linear": _share(exact, ("linear",), added),
        "head": _share(exact, ("linear", "head"), with_head),
        "attention": _share(exact, ("linear", "attention"), added),
        "all": _share(exact, ("linear", "head", "attention"), with_head),
    }


def _share(exact: dict[str, float], quantized: tuple[str, ...], added: Overhead) -> float:
    """Return the share of all multiply-adds, the scheme's own included, that multiply codes.

    Attention products are counted as plain block quantization, which adds none.
    """
    layers = sum(exact[kind] for kind in quantized if kind != "attention")
    codes = sum(exact[kind] for kind in quantized)
    codes += layers * sum(added.parts.get(kind, 0.0) for kind in IN_FOUR_BITS)
    return codes / (sum(exact.values()) + layers * added.share)


def workload(model: Model) -> Workload:
    """Return a step of `TOKENS` tokens on one device, in BF16."""
    length = model.sequence_length
    batch = TOKENS // length
    return Workload(steps=1, sequence_length=length, global_batch=batch, device_batch=batch)


def held_bytes(model: Model, scheme: str) -> dict[str, float]:
    """Count the bytes on one device after a forward pass of `TOKENS` tokens, by kind."""
    dense = meta_model(model.config)
    get_metis_model(dense, MetisConfig(scheme=scheme))
    load = workload(model)
    state = state_memory(dense, load, sharded=False)
    saved = saved_bytes(dense, load, sharded=False)
    return {
        "weights": state["weights"],
        "gradients": state["gradients"],
        "moments": state["moments"],
        "linear_activations": saved["linear_activations"],
        "other_activations": saved["activations"],
        "weight_copies": saved["weight_copies"],
    }


def record() -> dict[str, Any]:
    """Return the numbers of all tables."""
    found: dict[str, Any] = {"tokens": TOKENS, "models": {}}
    for model in models():
        found["models"][model.name] = {
            "sequence_length": model.sequence_length,
            "multiply_adds": {name: multiply_adds(model, name) for name in SCHEMES},
            "bytes": {name: held_bytes(model, name) for name in ("bf16", "metis")},
        }
    return found


def multiply_add_table(found: dict[str, Any]) -> str:
    """Return the table of multiply-add shares, a row for each model and scheme."""
    rows = []
    for name, values in found["models"].items():
        for scheme, shares in values["multiply_adds"].items():
            cells = [f"{100 * shares[key]:.1f}" for key in ("linear", "head", "attention", "all")]
            rows.append([name, scheme, *cells])
    header = ["Model", "Scheme", "Linear layers, %", "and the head", "and attention", "and both"]
    return markdown_table(header, rows)


def held(values: dict[str, Any], scheme: str, moments: str) -> dict[str, float]:
    """Return a device's bytes of each kind, with moments in fp32 or in 4 bits."""
    found = dict(values["bytes"][scheme])
    found["moments"] *= MOMENT_BYTES[moments] / MOMENT_BYTES["fp32"]
    return found


def byte_table(found: dict[str, Any]) -> str:
    """Return the table of bytes held in a step, a row for each model and entry of `WAYS`."""
    rows = []
    for name, values in found["models"].items():
        for scheme, moments in WAYS:
            each = held(values, scheme, moments)
            four = (each["linear_activations"] if scheme == "metis" else 0.0) + (
                each["moments"] if moments == "4 bit" else 0.0
            )
            total = sum(each.values())
            parts = [f"{each[key] / 1e9:.2f}" for key in each]
            rows.append([name, scheme, moments, *parts, f"{total / 1e9:.2f}",
                         f"{100 * four / total:.0f}"])  # fmt: skip
    header = ["Model", "Scheme", "Moments", "Weights", "Gradients", "Moments",
              "Linear layers' inputs", "Other activations", "BF16 copies of weights", "All, GB",
              "Four bits, %"]  # fmt: skip
    return markdown_table(header, rows)


def device_table(found: dict[str, Any]) -> str:
    """Return the table of total bytes on a device, a row for each model."""
    rows = [
        [name, *(f"{sum(held(values, *way).values()) / 1e9:.0f}" for way in WAYS)]
        for name, values in found["models"].items()
    ]
    return markdown_table(["Model", "bf16, GB", "metis, GB", "metis, 4-bit moments, GB"], rows)


def with_tables(page: str, found: dict[str, Any]) -> str:
    """Return the page with the tables that it has markers for."""
    tables = {
        "four bits: multiply-adds": multiply_add_table,
        "four bits: bytes": byte_table,
        "four bits: devices": device_table,
    }
    for marker, table in tables.items():
        if f"<!-- {marker} -->" in page:
            page = page_with(marker, table(found), page)
    return page


def main() -> None:
    """Write the record and the tables."""
    found = record()
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), found))


if __name__ == "__main__":
    main()
