"""Loads NVFP4 checkpoints with their weights kept packed, as a base for LoRA.

from metis_hf import load_packed
model = load_packed("model-nvfp4")  # compressed-tensors or ModelOpt, W4A16 or W4A4
model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
Trainer(model, ...).train()
model.save_pretrained("adapter")  # vLLM serves it with the packed base
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from metis_hf.deploy.packed_layouts import (
    COMPRESSED,
    MODELOPT_FILE,
    NAMES,
    check_scale_files,
    read_headers,
)
from metis_hf.deploy.packed_loader import AS_CONFIGURED, PackedConfig
from metis_hf.layers.experts import has_fused_experts
from metis_hf.shared.checkpoints import load_complete
from metis_hf.shared.records import read_json

_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")


def packed_config(
    path: str | Path, *, activations: str = AS_CONFIGURED, **options: Any
) -> PreTrainedConfig:
    """Return a config with which any auto class keeps a checkpoint packed.

    For classes other than the one that config.json names:

        config = packed_config("model-nvfp4", num_labels=3)
        AutoModelForSequenceClassification.from_pretrained("model-nvfp4", config=config)

    Args:
        path: a directory or a hub name.
        activations: as in `load_packed`.
        options: for `AutoConfig.from_pretrained`.

    Raises:
        ValueError: the checkpoint is not NVFP4; the message names its format.
    """
    config = AutoConfig.from_pretrained(path, **options)
    source = getattr(config, "quantization_config", None)
    if source is None:
        source = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if source is None:
        hub = {key: options[key] for key in _HUB_OPTIONS if key in options}
        file = cached_file(path, MODELOPT_FILE, _raise_exceptions_for_missing_entries=False, **hub)
        if file is None:
            raise ValueError(
                f"{path} is not quantized: it has neither a quantization_config in config.json nor "
                f"{MODELOPT_FILE}. Load it with from_pretrained, or pack it first (metis-hf "
                "export --format compressed-tensors, llm-compressor, ModelOpt)"
            )
        source = read_json(Path(file))
    source = source if isinstance(source, dict) else source.to_dict()
    request = PackedConfig(source, activations, str(path))
    config.quantization_config = request.as_request()
    return config


def load_packed(
    path: str | Path,
    *,
    activations: str = AS_CONFIGURED,
    dtype: torch.dtype | str = torch.bfloat16,
    device_map: Any = None,
    **options: Any,
) -> PreTrainedModel:
    """Load an NVFP4 checkpoint with its weights kept packed and frozen: 4.5 bits per element.

    Reads compressed-tensors' `nvfp4-pack-quantized` and ModelOpt's NVFP4. Layers that the
    checkpoint stores dense (`ignore`, `exclude_modules`) stay nn.Linear. Fused experts become
    packed layers, one per expert and projection, as in the files. A layer's weight is unpacked for
    each forward and backward pass and freed afterwards; its values in bf16 equal the
    compressed-tensors library's, bit for bit.

        >>> from peft import LoraConfig, get_peft_model  # doctest: +SKIP
        >>> model = load_packed("model-nvfp4")  # doctest: +SKIP
        >>> model = get_peft_model(model, LoraConfig(target_modules="all-linear"))  # doctest: +SKIP

    Trainer trains the adapter, and refuses a model without one. `save_pretrained` writes the same
    packed tensors in the compressed-tensors layout; the model must be in BF16, the dtype that
    readers of this layout compute in: `model.to(torch.bfloat16).save_pretrained(...)`. To deploy,
    serve the adapter with the base, or use `merge_packed`, or `to_dense` and PEFT's
    `merge_and_unload`.

    Packed weights are buffers: every process holds all of them, even under FSDP, and DDP must not
    broadcast them (set TrainingArguments(ddp_broadcast_buffers=False); DDP fails at startup
    otherwise).

    Args:
        path: a directory or a hub name, with safetensors files.
        activations: "as configured" quantizes inputs if the checkpoint says so (W4A4: dynamic
            block scales under the static `input_global_scale`, straight-through in the backward
            pass); "high precision" does not quantize them (W4A16).
        dtype: dtype of everything that is not packed, and of the computation.
        device_map: as in `from_pretrained`.
        options: for `from_pretrained` (`attn_implementation`, `revision`, ...).

    Returns:
        A model of the class that config.json names, in eval mode.

    Raises:
        ValueError: the format is another one (the message names it); files are truncated; tensors
            are missing, have another shape, or are swizzled for a kernel; scales are zero, negative
            or NaN; a layer has only some of its experts packed.
    """
    hub = {k: options[k] for k in (*_HUB_OPTIONS, "trust_remote_code") if k in options}
    config = packed_config(path, activations=activations, **hub)
    name = (config.architectures or [""])[0]
    cls = getattr(transformers, name, AutoModelForCausalLM)
    return load_complete(cls, path, config=config, dtype=dtype, device_map=device_map, **options)


def load_deployed(path: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Load a packed language model for evaluation, with plain transformers where possible.

    Falls back to `load_packed`: transformers delegates packed layers to the compressed-tensors
    library, which computes only in BF16 and cannot unpack every class. `path` is a directory in the
    layout `nvfp4-pack-quantized`.

    Raises:
        ValueError: see `load_packed`.
    """
    if dtype is not torch.bfloat16 or _why_not_late(path) is not None:
        return load_packed(path, dtype=dtype)
    check_scale_files(sorted(path.glob("*.safetensors")))
    return load_complete(AutoModelForCausalLM, path, dtype=dtype)


def _why_not_late(path: Path) -> str | None:
    """Return `why_not_late` for a checkpoint, without reading any tensor."""
    suffix = f".{NAMES[COMPRESSED][0]}"
    owners = (
        key.removesuffix(suffix)
        for key in read_headers(sorted(path.glob("*.safetensors")))
        if key.endswith(suffix)
    )
    packed = {owner.rpartition(".")[2] for owner in owners}  # prefixes may differ in the model
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    if has_fused_experts(model):
        return "transformers does not read packed layers of models with fused experts."
    kinds = {
        name: type(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in packed
    }
    return why_not_late(model, kinds)


def why_not_late(model: PreTrainedModel, packed: Mapping[str, type[nn.Module]]) -> str | None:
    """Return why plain transformers cannot unpack layers at the first forward pass, or None.

    The model is of the class to load; `packed` maps layers to their classes in the plain model.
    """
    for kind in packed.values():
        if kind is not nn.Linear:
            return f"The packed layers are {kind.__name__}, which transformers cannot keep packed."
    reads = {f".{name.rpartition('.')[2]}.weight" for name in packed}
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    for cls in dict.fromkeys(map(type, parts)):
        if any(read in _initializer(cls) for read in reads):
            return f"The initializer of {cls.__name__} reads weights that packed layers lack."
    return None


def _initializer(cls: type[PreTrainedModel]) -> str:
    """Return the source code of `cls._init_weights`, or "" if there is none."""
    try:
        return inspect.getsource(cls._init_weights)
    except (OSError, TypeError):
        return ""
