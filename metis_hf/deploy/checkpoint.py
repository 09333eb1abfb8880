"""Exports a Metis checkpoint for software that does not know this package.

"dense": a plain transformers directory with the represented weights. "compressed-tensors": NVFP4 in
the layout `nvfp4-pack-quantized`, with the low-rank part of split weights folded in or in a side
file. "modelopt": NVFP4 in the layout of NVIDIA's ModelOpt. Layers with calibrated scales quantize
their inputs too (W4A4). `compressed_tensors` packs a matrix; `report` measures the errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from metis_hf.conversion.convert import metis_layers, to_dense
from metis_hf.deploy import modelopt
from metis_hf.deploy.casting import cast
from metis_hf.deploy.compressed_tensors import (
    CompressedFactors,
    CompressedMatrix,
    compress,
    is_split,
    layer_state,
    load_low_rank,
    save_low_rank,
    split_layer,
    weight_quantizer,
)
from metis_hf.deploy.fused import mixed_notes, scale_notes, share_others, shared_amaxes
from metis_hf.deploy.inputs import InputQuantizer, quantized_input, quantizing_inputs
from metis_hf.deploy.kept_experts import kept_experts
from metis_hf.deploy.loading import load_lines, serve_line, why_not_packed
from metis_hf.deploy.model_card import add_to_card, model_card, read_metrics
from metis_hf.deploy.packed_experts import (
    experts_notes,
    has_packed_experts,
    names_in_files,
    unfuse,
)
from metis_hf.deploy.packed_layouts import (
    MODELOPT_FILE,
    RESIDUAL_DIR,
    UNPACKED,
    compressed_config,
)
from metis_hf.deploy.report import (
    CONVERTED,
    REFERENCE,
    ExportReport,
    LossRow,
    WeightErrors,
    report_section,
)
from metis_hf.deploy.source import (
    base_model,
    check_packable,
    check_weights,
    copy_companions,
    held_out_windows,
    load_metis_model,
    represented,
)
from metis_hf.deploy.staging import check_free, staged
from metis_hf.deploy.tied import head_note, untie

__all__ = ["ExportReport", "LossRow", "export_checkpoint", "load_low_rank", "load_metis_model"]

FORMATS = ("dense", "compressed-tensors", "modelopt")
LOW_RANK = ("fold", "side-file")
DTYPES = ("bfloat16", "float16", "float32")
UNPACKED_DTYPE = str(UNPACKED).removeprefix("torch.")
REPORT_FILE = "metis_export.json"


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    format: str = "dense",
    dtype: str | torch.dtype = "bfloat16",
    low_rank: str = "fold",
    share_scales: bool = True,
    text: str | Path | None = None,
    results: str | Path | None = None,
    load: Callable[[str | Path], PreTrainedModel] = load_metis_model,
) -> ExportReport:
    """Write a Metis checkpoint in a format that needs no metis_hf.

    All arithmetic is in fp32, whatever the checkpoint's dtype. The files are written to a hidden
    staging directory, next to `out` or inside it if it exists, and moved into place once all are
    complete. The next export to `out` removes what a killed export left behind.

    Args:
        checkpoint: a directory that `save_pretrained` or Trainer wrote for a converted model;
            with another `load`, whatever that accepts.
        out: the directory to write; must not exist, or be empty.
        format: "dense", "compressed-tensors" or "modelopt". If tensor scales are calibrated
            (schemes "w4a4" and "w4a16"), the packed formats store them and inputs are quantized as
            the scheme says; otherwise only weights are quantized.
        dtype: "bfloat16", "float16" or "float32", by name or as a torch dtype, for everything that
            is not packed. A packed checkpoint for the compressed-tensors library must use
            "bfloat16".
        low_rank: for split weights (stored split, or split when quantized) in compressed-tensors:
            "fold" quantizes the dense weight that they represent instead of the parts quantized in
            training; "side-file" packs the residual and writes the factors, quantized as in
            training, to a side file.
        share_scales: pack weights that inference engines fuse (query, key and value; gate and up)
            under one tensor scale; without it engines compute wrong values. False packs each weight
            under its own scale, as in training, which "side-file" always does.
        text: a file of held-out text (UTF-8), or JSON lines of messages or texts (.jsonl), to
            measure the loss on; causal language models only.
        results: a JSON file of metrics to show in the model card.
        load: builds the converted model from `checkpoint`, in fp32 on the CPU. The tokenizer and
            other companion files are copied from `checkpoint`, a directory or hub name.

    Returns:
        The report, also written to `metis_export.json`.

    Raises:
        ValueError: `checkpoint` is incomplete or not a Metis checkpoint; a choice is unknown; the
            layout cannot hold a layer; scales are not calibrated; a weight to pack is not finite;
            `out` is not empty, or another process is writing it; a text is given for a model that
            is not a causal language model, has tokens outside the vocabulary, or is not UTF-8;
            `results` is not a JSON object.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    for name, value, choices in (
        ("format", format, FORMATS),
        ("dtype", dtype, DTYPES),
        ("low_rank", low_rank, LOW_RANK),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r}; choose one of {', '.join(choices)}")
    if format == "compressed-tensors" and low_rank == "fold" and dtype != UNPACKED_DTYPE:
        raise ValueError(
            f"dtype={dtype!r}: the compressed-tensors library always unpacks to {UNPACKED_DTYPE}, "
            "so this checkpoint would fail in its first forward pass; "
            f"choose {UNPACKED_DTYPE}. To compute in another dtype, load the checkpoint with that "
            "dtype and quantization_config=CompressedTensorsConfig(dequantize=True)"
        )
    shown, out = str(out), Path(out).resolve()
    check_free(out)
    if format != "compressed-tensors" and low_rank == "side-file":
        raise ValueError(
            f'low_rank="side-file" requires format="compressed-tensors"; format={format!r} cannot '
            'store the factors. Use low_rank="fold"'
        )
    metrics = None if results is None else read_metrics(Path(results))
    windows = None if text is None else held_out_windows(checkpoint, Path(text))
    with staged(out) as partial:
        model = load(checkpoint)
        split = any(is_split(layer) for _, layer in metis_layers(model))
        if format != "dense":
            check_packable(model)
            check_weights(model)
            if low_rank == "side-file" and has_packed_experts(model):
                raise ValueError(
                    'low_rank="side-file" cannot store the factors of fused experts; use '
                    'low_rank="fold"'
                )
            if low_rank == "side-file" and not split:
                raise ValueError(
                    'low_rank="side-file" needs split weights, but scheme '
                    f"{model.config.quantization_config.scheme!r} with this checkpoint's config "
                    'does not split any; use low_rank="fold"'
                )
        kind = _kind(model, format, low_rank)
        card = model_card(
            model, name=out.name, kind=kind, results=metrics, base_model=base_model(checkpoint)
        )
        loading = load_lines(model, kind, shown)
        values = getattr(torch, dtype)
        packed: tuple[str, ...] = ()
        notes: tuple[str, ...] = ()
        held_out = {} if windows is None else {CONVERTED: _loss(model, windows)}
        if kind == "dense":
            rows = _write_dense(model, partial, values, windows, held_out)
        else:
            packed, rows, notes = _write_packed(
                model, partial, values, kind, share_scales, windows, held_out
            )
        copy_companions(checkpoint, partial)
        size = sum(path.stat().st_size for path in partial.rglob("*.safetensors"))
        kept = low_rank if kind != "dense" and split else None
        if REFERENCE in held_out:
            held_out = {REFERENCE: held_out[REFERENCE], **held_out}  # first in the report
        serving = serve_line(model, kind, shown, notes)
        report = ExportReport(
            format, dtype, kept, packed, rows, held_out, size, loading, serving, notes
        )
        (partial / REPORT_FILE).write_text(report.to_json(), "utf-8")
        served = serve_line(model, kind, out.name, notes)
        add_to_card(card, served, report_section(report), inputs=kind == "w4a4")
        card.save(partial / "README.md")
    return report


def _kind(model: PreTrainedModel, format: str, low_rank: str) -> str:
    """Return the kind of export that `format` and `low_rank` select, as named by `model_card`."""
    if low_rank == "side-file":
        return low_rank
    quantizes = any(quantized_input(layer) is not None for _, layer in metis_layers(model))
    return "w4a4" if format == "compressed-tensors" and quantizes else format


def _write_dense(
    model: PreTrainedModel,
    out: Path,
    dtype: torch.dtype,
    windows: list[Tensor] | None,
    held_out: dict[str, float],
) -> tuple[LossRow, ...]:
    """Write the dense model; return the errors."""
    errors = WeightErrors()
    for name, layer in metis_layers(model):
        weight = represented(layer)
        errors.add("dense", name, weight, weight.to(dtype).float())
    dense = to_dense(model)
    assert isinstance(dense, PreTrainedModel)
    if windows is not None:
        held_out[REFERENCE] = _loss(dense, windows)
        if dtype is not torch.float32:
            _round_parameters(dense, dtype)
            held_out[f"dense, {str(dtype).removeprefix('torch.')}"] = _loss(dense, windows)
    cast(dense, dtype)
    dense.save_pretrained(out)
    return errors.rows()


def _write_packed(
    model: PreTrainedModel,
    out: Path,
    dtype: torch.dtype,
    kind: str,
    share: bool,
    windows: list[Tensor] | None,
    held_out: dict[str, float],
) -> tuple[tuple[str, ...], tuple[LossRow, ...], tuple[str, ...]]:
    """Write the packed model; return the packed layers, the errors and the notes."""
    share = share and kind != "side-file"
    shared = shared_amaxes(model) if share else {}
    errors = WeightErrors()
    folded: dict[str, CompressedMatrix] = {}
    residuals: dict[str, CompressedMatrix] = {}
    factors: dict[str, CompressedFactors] = {}
    inputs: dict[str, InputQuantizer] = {}
    for name, layer in metis_layers(model):
        quantizer = weight_quantizer(layer)
        if quantizer is None:
            continue  # the scheme leaves this layer in high precision
        weight = represented(layer)
        folded[name] = compress(layer, weight, shared.get(name))
        if is_split(layer):
            residuals[name], factors[name] = split_layer(layer, quantizer)
            whole = residuals[name].dequantize() + factors[name].dense()
            errors.add("side-file", name, weight, whole)
        if (quantized := quantized_input(layer)) is not None:
            inputs[name] = quantized
    layers = dict(metis_layers(model))
    others = share_others(model, folded) if share else {}
    folded |= others
    for name, matrix in folded.items():
        errors.add("fold", name, represented(layers[name]), matrix.dequantize())
    notes: tuple[str, ...] = ()
    if kind != "side-file":
        notes = scale_notes(model, folded, shared, bool(others), share)
        notes += mixed_notes(model, folded, inputs)
    notes += experts_notes(model)
    reason = why_not_packed(model) if kind in ("compressed-tensors", "w4a4") else None
    dense = to_dense(model)
    assert isinstance(dense, PreTrainedModel)
    unfuse(dense, folded)
    notes += untie(dense, folded) + head_note(dense, folded)
    if reason is not None:
        how = "Load the export with quantization_config=CompressedTensorsConfig(dequantize=True)"
        lost = ", which does not quantize inputs, or with metis_hf.load_packed" * bool(inputs)
        notes += (f"{reason} {how}{lost}.",)
    if windows is not None:
        held_out[REFERENCE] = _loss(dense, windows)
        _round_parameters(dense, dtype)
        with quantizing_inputs(dense, inputs):
            held_out["fold"] = _loss(_with_weights(dense, folded, {}), windows)
        if factors:  # `load_low_rank` returns plain layers, which do not quantize inputs
            parts = _with_weights(dense, folded | residuals, factors)
            held_out["side-file"] = _loss(parts, windows)
    if kind == "side-file":
        _save_packed(dense, out / RESIDUAL_DIR, folded | residuals, {}, kind, dtype)
        save_low_rank(out, factors)
    else:
        _save_packed(dense, out, folded, inputs, kind, dtype)
    written = names_in_files(dense, folded).values()
    return tuple(name for parts in written for name, _ in parts), errors.rows(), notes


def _save_packed(
    model: PreTrainedModel,
    out: Path,
    packed: Mapping[str, CompressedMatrix],
    inputs: Mapping[str, InputQuantizer],
    kind: str,
    dtype: torch.dtype,
) -> None:
    """Write `model` as a packed checkpoint; everything that is not packed is in `dtype`."""
    cast(model, dtype)
    state = model.state_dict()
    of_layer = modelopt.layer_state if kind == "modelopt" else layer_state
    quantizes = {}
    for name, parts in names_in_files(model, packed).items():
        del state[f"{name}.weight"]
        bias = state.pop(f"{name}.bias", None)
        for written, rows in parts:
            quantizes[written] = name in inputs
            scale = inputs[name].global_scale if name in inputs else None
            tensors = of_layer(packed[name].part(rows), scale)
            if bias is not None:
                tensors["bias"] = bias[rows].clone()
            state |= {f"{written}.{key}": tensor for key, tensor in tensors.items()}
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    ignored = [name for name in linears if name not in packed]
    experts, routers = kept_experts(model)
    if kind == "modelopt":
        description = modelopt.describe(ignored, quantizes, experts, routers)
        model.config.quantization_config = modelopt.quantization_config(description)
        out.mkdir(parents=True, exist_ok=True)
        (out / MODELOPT_FILE).write_text(json.dumps(description, indent=2) + "\n", "utf-8")
    else:
        model.config.quantization_config = compressed_config(quantizes, ignored, experts, routers)
    model.save_pretrained(out, state_dict=state)


def _round_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round parameters and buffers to the saved dtype and back to fp32, in place."""
    cast(model, dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


@torch.no_grad()
def _with_weights(
    model: PreTrainedModel,
    packed: Mapping[str, CompressedMatrix],
    low: Mapping[str, CompressedFactors],
) -> PreTrainedModel:
    """Set the model's weights in place to what the packed layers and factors represent."""
    for name, weight in packed.items():
        values = weight.dequantize()
        if name in low:
            values += low[name].dense()
        model.get_parameter(f"{name}.weight").copy_(values)
    return model


@torch.no_grad()
def _loss(model: PreTrainedModel, windows: list[Tensor]) -> float:
    """Return the mean cross entropy in nats per predicted token; windows run one at a time."""
    total, count = 0.0, 0
    for ids in windows:
        logits = model(input_ids=ids).logits[0, :-1]
        total += F.cross_entropy(logits.float(), ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count
