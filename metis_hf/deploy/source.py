"""Loads and checks the model to export, and copies the companion files of its checkpoint."""

from __future__ import annotations

import re
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import metis_layers
from metis_hf.data.chat import check_vocabulary, read_tokens
from metis_hf.deploy.compressed_tensors import static_scales, unsupported, weight_quantizer
from metis_hf.deploy.packed_experts import converted_experts, expert_matrices
from metis_hf.layers.experts import fused_weights
from metis_hf.layers.linear import MetisLayer
from metis_hf.shared.checkpoints import check_sizes, load_complete, refuse_links
from metis_hf.shared.messages import reading, shown
from metis_hf.shared.records import read_json

_WINDOW = 512  # tokens per window of held-out text; the model's context if that is shorter

_BASE_MODEL = re.compile(r"^base_model: ([\w./-]+)$", re.MULTILINE)
_CARD_BEGINNING = 65536  # characters of the card to search; its metadata comes first
# Files of a checkpoint besides weights, config and trainer state; copied unchanged.
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
    """Load a Metis checkpoint in fp32 and eval mode, as the class that its config names.

    Raises:
        ValueError: `checkpoint` is not a directory or not a Metis checkpoint, or transformers lacks
            its class.
    """
    path = Path(checkpoint)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; give a directory that save_pretrained wrote")
    method = quantization_of(model_config(path))
    if method is None:
        raise ValueError(
            f"{path} is a plain checkpoint, not a Metis checkpoint; there is nothing to export. To "
            "quantize it, run metis-hf export --format compressed-tensors with --calibrate TEXT "
            "(W4A4) or --scheme w4a16"
        )
    if method != MetisConfig.quant_method:
        kind = f"quantized by {method!r}"
        raise ValueError(f"{path} is {kind}, not a Metis checkpoint; there is nothing to export")
    return load_model(path)


def load_model(checkpoint: str | Path) -> PreTrainedModel:
    """Load a dense or Metis checkpoint, a directory or a hub name, in fp32 and eval mode.

    The model is of the class that its config names.

    Raises:
        ValueError: transformers lacks the class, or the checkpoint is incomplete.
    """
    config = model_config(checkpoint)
    with reading(checkpoint):
        return load_complete(model_class(config, checkpoint), checkpoint, dtype=torch.float32)


def model_config(checkpoint: str | Path) -> PreTrainedConfig:
    """Return the config of a checkpoint, a directory or a hub name.

    Raises:
        ValueError: the config is damaged, or transformers does not know its model type.
    """
    file = Path(checkpoint, "config.json")
    if file.is_file():
        if not isinstance(written := read_json(file), dict):
            raise ValueError(f"{file} does not contain a JSON object as save_pretrained writes it")
        check_sizes(written, file)
    if Path(checkpoint).is_dir():
        refuse_links(checkpoint)
    with reading(checkpoint):
        return AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)


def model_class(config: Any, checkpoint: str | Path) -> type[PreTrainedModel]:
    """Return the class that the config of a checkpoint names.

    Raises:
        ValueError: transformers has no such class.
    """
    names = config.architectures or ["none"]
    name = names[0] if isinstance(names, list) else names
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(
            f"{checkpoint}: its config names the class {shown(name)}, which transformers lacks"
        )
    return found


def read_tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint, a directory or a hub name.

    Raises:
        ValueError: the tokenizer is damaged.
    """
    with reading(checkpoint):
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)


def held_out_windows(checkpoint: str | Path, text: Path) -> list[Tensor]:
    """Split a text into windows of token ids [1, length] without overlap; no model is loaded.

    The checkpoint, a directory or a hub name, has config and tokenizer; the text is a file as in
    `data.chat`.

    Raises:
        FileNotFoundError: there is no such text.
        ValueError: the model is not a causal language model; the text cannot be read, is too short,
            or has tokens outside the model's vocabulary.
    """
    config = model_config(checkpoint)
    cls = model_class(config, checkpoint)
    if not cls.can_generate() or config.is_encoder_decoder:
        raise ValueError(
            f"{cls.__name__} is not a causal language model, so its held-out loss cannot be "
            "measured; omit the text"
        )
    tokenizer = read_tokenizer(checkpoint)
    tokens = [token for document in read_tokens(text, tokenizer) for token in document]
    ids = torch.tensor([tokens])
    if ids.shape[1] < 2:
        raise ValueError(f"{text} has fewer than two tokens; give a longer text")
    of_text = config.get_text_config(decoder=True)
    check_vocabulary(ids, of_text.vocab_size, checkpoint)
    context = getattr(of_text, "max_position_embeddings", None) or _WINDOW
    return [part for part in ids.split(min(context, _WINDOW), dim=1) if part.shape[1] > 1]


def represented(layer: MetisLayer) -> Tensor:
    """Return the weight [o i] that a layer represents, fp32."""
    return layer.weight_form.dense(layer.weight_params()).detach().float()


def quantization_of(config: Any) -> str | None:
    """Return the `quant_method` in a checkpoint's config, or None if it is dense."""
    return (getattr(config, "quantization_config", None) or {}).get("quant_method")


def base_model(checkpoint: str | Path) -> str | None:
    """Return the hub name of the model that a checkpoint was made from, or None if unknown.

    A hub name is its own base. For a directory, the card that Trainer wrote names the base.
    """
    card = Path(checkpoint) / "README.md"
    name = str(checkpoint)
    if Path(checkpoint).is_dir():
        if not card.is_file():
            return None
        with card.open(encoding="utf-8", errors="replace") as file:
            found = _BASE_MODEL.search(file.read(_CARD_BEGINNING))
        name = found[1] if found else ""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def copy_companions(checkpoint: str | Path, out: Path) -> None:
    """Copy the companion files (tokenizer, chat template, ...) of a directory or hub name."""
    if not Path(checkpoint).is_dir():
        checkpoint = snapshot_download(
            str(checkpoint), allow_patterns=[*_COMPANIONS, "additional_chat_templates/*"]
        )
    for path in Path(checkpoint).iterdir():
        if any(fnmatch(path.name, pattern) for pattern in _COMPANIONS):
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, out / path.name)


_SOME_EXPERTS = (
    "not quantized, while other weights of these experts are; engines fuse all experts of a layer. "
    "Exclude all of them when converting the model (modules_to_not_convert, --exclude), or none"
)


def check_packable(model: PreTrainedModel) -> None:
    """Refuse models that the packed layouts cannot hold; the message names the layer.

    Raises:
        ValueError: the layout cannot hold a layer, only some experts of a layer are quantized, or
            no layer can be packed.
    """
    packed: dict[str, dict[str, bool]] = {}
    experts: set[nn.Module] = set()
    for name, key, layers in converted_experts(model):
        experts |= {*layers}
        kinds = {weight_quantizer(layer) is not None for layer in layers}
        packed.setdefault(name, {})[key] = kinds == {True}
        if kinds == {True}:
            expert_matrices(model, name, key, len(layers))  # raises if it cannot name them
        elif True in kinds:
            raise ValueError(f"{name}.{key}: {_SOME_EXPERTS}")
    for name, keys in packed.items():
        dense = [*fused_weights(model.get_submodule(name)), *(k for k in keys if not keys[k])]
        if dense and any(keys.values()):
            raise ValueError(f"{name}.{dense[0]}: {_SOME_EXPERTS}")
    packable = 0
    for name, layer in metis_layers(model):
        if reason := unsupported(layer, layer in experts):
            raise ValueError(
                f"{name}: {reason}; the nvfp4-pack-quantized layout cannot hold it. Exclude it "
                "when converting the model (modules_to_not_convert, or --exclude if the export "
                "quantizes it), or use format='dense'"
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


def check_weights(model: nn.Module) -> None:
    """Refuse weights that are not finite and scales that are not calibrated.

    Raises:
        ValueError: a layer to pack has a weight with NaN or inf, or is not calibrated; the message
            names the layer.
    """
    for name, layer in metis_layers(model):
        if static_scales(layer) is not None and not layer.get_buffer("scales_frozen").item():
            raise ValueError(
                f"{name}: its tensor scales are not calibrated. Export with --calibrate TEXT "
                "(metis-hf export), or load the checkpoint, call metis_hf.calibrate(model, "
                "batches) (or freeze_scales(model) after training), save it and export the result"
            )
        if weight_quantizer(layer) is not None and not represented(layer).isfinite().all():
            raise ValueError(
                f"{name}: its weight has NaN or inf, which cannot be packed; training "
                "diverged, or the checkpoint is damaged. Export an earlier checkpoint"
            )
