"""The model that is exported, and the files beside its weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import metis_layers
from metis_hf.export.compressed_tensors import static_scales, unsupported, weight_quantizer
from metis_hf.layers.experts import converted_names, layers_of
from metis_hf.layers.linear import MetisLayer

# What a checkpoint holds besides weights, config and trainer state; copied as it is.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.spm",
    "bpe.codes",
    "normalizer.json",
    "tekken.json",
    "additional_chat_templates",
    "chat_template*",
    "*processor_config.json",
)


def load_metis_model(checkpoint: str | Path) -> PreTrainedModel:
    """Return a Metis checkpoint in fp32 and eval mode, as the class that its config names.

    Raises:
        ValueError: no directory, no Metis checkpoint, or a class that transformers does not have.
    """
    path = Path(checkpoint)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; give a directory that save_pretrained wrote")
    method = quantization_of(AutoConfig.from_pretrained(path))
    if method is None:
        raise ValueError(
            f"{path} is no Metis checkpoint but a plain checkpoint; there is nothing to export. To "
            "quantize it: metis-hf export --calibrate TEXT --format compressed-tensors (W4A4), or "
            "--scheme w4a16 in place of a text"
        )
    if method != MetisConfig.quant_method:
        kind = f"quantized by {method!r}"
        raise ValueError(f"{path} is no Metis checkpoint but {kind}; there is nothing to export")
    return load_model(path)


def load_model(checkpoint: str | Path) -> PreTrainedModel:
    """Return a dense or Metis checkpoint in fp32 and eval mode, as the class its config names.

    Args:
        checkpoint: a directory or a name on the hub.

    Raises:
        ValueError: a class that transformers does not have.
    """
    name = (AutoConfig.from_pretrained(checkpoint).architectures or ["none"])[0]
    if not hasattr(transformers, name):
        raise ValueError(
            f"{checkpoint}: transformers has no class {name!r}, which its config names"
        )
    return getattr(transformers, name).from_pretrained(checkpoint, dtype=torch.float32)


def quantization_of(config: Any) -> str | None:
    """Return the method that a checkpoint's config says it is quantized by; None: it is dense."""
    return (getattr(config, "quantization_config", None) or {}).get("quant_method")


def copy_companions(checkpoint: str | Path, out: Path) -> None:
    """Copy the files beside the weights, such as the tokenizer's, of a directory or hub name."""
    if not Path(checkpoint).is_dir():
        checkpoint = snapshot_download(
            str(checkpoint), allow_patterns=[*_COMPANIONS, "additional_chat_templates/*"]
        )
    for path in _companions(Path(checkpoint)):
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, out / path.name)


def _companions(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in _COMPANIONS):
            yield path


_INSTEAD = (
    "Leave it out when the model is converted (modules_to_not_convert; --exclude where the export "
    "quantizes it), or convert it and use format='dense'"
)


def check_packable(model: nn.Module) -> None:
    """Refuse what the packed layouts cannot hold, with the layer's name.

    Raises:
        ValueError: fused experts, a layer that the layout cannot hold, or none to pack.
    """
    for name, module in model.named_modules():
        for key in converted_names(module):
            experts = [cast(MetisLayer, layer) for layer in layers_of(module, key)]
            if any(weight_quantizer(layer) is not None for layer in experts):
                raise ValueError(
                    f"{name}.{key}: fused experts, which transformers does not read "
                    f"from the nvfp4-pack-quantized layout. {_INSTEAD}"
                )
    packable = 0
    for name, layer in metis_layers(model):
        if reason := unsupported(layer):
            raise ValueError(
                f"{name}: {reason}; the nvfp4-pack-quantized layout cannot hold it. {_INSTEAD}"
            )
        packable += weight_quantizer(layer) is not None
    if not packable:
        _, layer = next(metis_layers(model))
        passes = layer.config.high_precision
        why = f"high_precision={list(passes)}" if passes else f"scheme {layer.config.scheme!r}"
        raise ValueError(
            f"no layer of this checkpoint has quantized weights in its forward pass ({why}), so "
            "there is nothing to pack. Use format='dense'"
        )


def check_calibrated(model: nn.Module) -> None:
    """Refuse static tensor scales that nobody fixed, with the layer's name.

    Raises:
        ValueError: such a layer.
    """
    for name, layer in metis_layers(model):
        if static_scales(layer) is not None and not layer.get_buffer("scales_frozen").item():
            raise ValueError(
                f"{name}: its tensor scales are not calibrated. Export with --calibrate TEXT "
                "(metis-hf export), or load the checkpoint, call metis_hf.calibrate(model, "
                "batches) (or freeze_scales(model) after training), save it and export that"
            )
