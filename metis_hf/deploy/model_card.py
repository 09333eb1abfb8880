"""README.md of a checkpoint: what it is, how it was quantized, how to load it.

For directories that `save_pretrained` or `metis-hf export` wrote. The metadata omits facts that the
package cannot know (license, data, language).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from metis_hf.conversion import card as sections
from metis_hf.conversion.convert import metis_layers
from metis_hf.deploy.loading import load_lines
from metis_hf.numerics import NVFP4
from metis_hf.shared.records import read_json

KINDS = ("metis", "dense", "compressed-tensors", "w4a4", "modelopt", "side-file")
_TAGS = {
    "metis": ("metis",),
    "dense": (),
    "compressed-tensors": ("compressed-tensors",),
    "w4a4": ("compressed-tensors",),
    "modelopt": ("modelopt",),
    "side-file": ("metis",),
}
_PACKED = ("compressed-tensors", "w4a4", "modelopt", "side-file")  # to NVFP4, whatever the scheme
# {precision}: text from `card.precision`.
_WHAT = {
    "metis": sections.WHAT,
    "dense": "The dense weights of a model whose converted linear layers compute in {precision}, "
    "as a plain transformers checkpoint.",
    "compressed-tensors": "The weights of a model whose converted linear layers compute in "
    "{precision}, packed to NVFP4 in the compressed-tensors layout `nvfp4-pack-quantized`. "
    "Activations are not quantized.",
    "w4a4": "A model packed to NVFP4 in the compressed-tensors layout `nvfp4-pack-quantized`. The "
    "inputs of its packed layers are quantized too (W4A4), under calibrated tensor scales.",
    "modelopt": "A model packed to NVFP4 in the layout of NVIDIA's ModelOpt. "
    "`hf_quant_config.json` lists the packed layers and says whether their inputs are quantized "
    "too.",
    "side-file": "The weights of a model whose converted linear layers compute in {precision}: "
    "residuals packed to NVFP4 in `residual/`, low-rank factors in `metis_low_rank.safetensors`. "
    "The residuals alone are not a complete model.",
}
_NEEDS_LIBRARY = "Requires transformers and compressed-tensors (`pip install compressed-tensors`)."
_NEEDS = {
    "dense": "Requires only transformers.",
    "compressed-tensors": _NEEDS_LIBRARY,
    "w4a4": _NEEDS_LIBRARY,
    "modelopt": "Requires an inference engine that reads ModelOpt checkpoints; transformers does "
    "not.",
    "side-file": "Requires metis-hf (`pip install metis-hf`), but not the compressed-tensors "
    "library.",
}
_CONVERSION = "## Conversion"
_WHERE = (
    "On GPUs with FP4 units (Blackwell), vLLM quantizes inputs with the calibrated scales; on "
    "other GPUs, only the weights are quantized.\n\n"
)


def model_card(
    model: PreTrainedModel,
    *,
    name: str = "this directory",
    kind: str = "metis",
    results: Mapping[str, Any] | None = None,
    base_model: str | None = None,
) -> ModelCard:
    """Return the card of a converted model, or of an export of it.

    Args:
        model: converted; the card shows its config and conversion report.
        name: the path or hub name to show in the loading code.
        kind: "metis" for the checkpoint itself, otherwise the kind of export: "dense",
            "compressed-tensors", "w4a4" (compressed-tensors with quantized inputs), "modelopt" or
            "side-file".
        results: metrics by name, in nested mappings as an evaluation writes them; values that are
            not numbers are skipped.
        base_model: hub name of the model that this one was made from.

    Raises:
        ValueError: the kind is unknown, or the model was not converted.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; choose one of {', '.join(KINDS)}")
    if (found := sections.converted(model)) is None:
        raise ValueError("the model has no Metis config; call get_metis_model first")
    config, report = found
    layers = [layer for _, layer in metis_layers(model)]
    formats = [NVFP4.name] if kind in _PACKED else []
    if kind == "metis":
        formats = sections.format_tags(layers)
    relation = "quantized" if kind in _PACKED else "finetune"
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=sections.pipeline_tag(model),
        base_model=base_model,
        base_model_relation=None if base_model is None else relation,
        tags=[
            *_TAGS[kind],
            *sections.trained_tags(layers),
            *formats,
            f"scheme:{config.scheme}",
        ],
    )
    parts = [
        f"# {type(model).__name__}, scheme {config.scheme}",
        _WHAT[kind].format(precision=sections.precision(layers)),
    ]
    if kind == "metis":
        parts.append(sections.load_section(model, layers, name))
        parts += sections.use_sections(model, layers, name)
    else:
        lines = load_lines(model, kind, name)
        parts.append(f"## Load\n\n```python\n{lines}\n```\n\n{_NEEDS[kind]}")
    parts += [
        # No split error: it was measured at conversion and is stale after training.
        f"{_CONVERSION}\n\n```text\n{report.text(error=False)}\n```",
        f"## Config\n\n{sections.config_table(config)}",
    ]
    if results:
        rows = "\n".join(f"| {key} | {value:.6g} |" for key, value in _numbers(results))
        parts.append(f"## Results\n\n| Metric | Value |\n| --- | ---: |\n{rows}")
    body = "\n\n".join(parts)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def add_to_card(card: ModelCard, serving: str, report: str, *, inputs: bool) -> None:
    """Add the serving command and the report, in markdown, to the card of an export.

    The command is "" if vLLM cannot serve it; `inputs` says whether inputs are quantized too.
    """
    if serving:
        serve = f"## Serve\n\n```bash\n{serving}\n```\n\n{_WHERE * inputs}"
        card.text = card.text.replace(_CONVERSION, f"{serve}{_CONVERSION}", 1)
    card.text = f"{card.text}\n{report}"


def write_model_card(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    kind: str = "metis",
    results: Mapping[str, Any] | str | Path | None = None,
) -> Path:
    """Write `model_card` to README.md of a directory, and return its path.

    Args:
        results: metrics as in `model_card`, or the path of a JSON file of them.

    Raises:
        ValueError: see `model_card` and `read_metrics`.
    """
    directory = Path(directory)
    metrics = read_metrics(Path(results)) if isinstance(results, str | Path) else results
    card = model_card(model, name=directory.name, kind=kind, results=metrics)
    path = directory / "README.md"
    card.save(path)
    return path


def read_metrics(path: Path) -> dict[str, Any]:
    """Return the metrics of a JSON file.

    Raises:
        ValueError: the file holds no JSON object.
    """
    metrics = read_json(path)
    if not isinstance(metrics, dict):
        raise ValueError(
            f"{path} contains no metrics; expected a JSON object that maps names to numbers"
        )
    return metrics


def _numbers(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in results.items():
        label = f"{prefix}{key}".removesuffix(",none")
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{label} / ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield label, value
