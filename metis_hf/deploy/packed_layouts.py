"""Parses the `quantization_config` of NVFP4 checkpoints and refuses unsupported ones.

Two layouts of the same numbers, for a layer [o i]:

    compressed-tensors, `nvfp4-pack-quantized`        ModelOpt, `quant_algo` NVFP4
    weight_packed        uint8 [o i/2]                weight          uint8 [o i/2]
    weight_scale         float8_e4m3fn [o i/16]       weight_scale    float8_e4m3fn [o i/16]
    weight_global_scale  fp32 [1], encode             weight_scale_2  fp32, decode: the inverse
    input_global_scale   fp32 [1], encode             input_scale     fp32, decode: the inverse

This module needs neither transformers nor the compressed-tensors library.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from metis_hf.layers.packed import BLOCK

FORMAT = "nvfp4-pack-quantized"
UNPACKED = torch.bfloat16  # the compressed-tensors library always unpacks to this dtype
COMPRESSED, MODELOPT = "compressed-tensors", "modelopt"
MODELOPT_FILE = "hf_quant_config.json"
ALGORITHMS = {"NVFP4": True, "W4A16_NVFP4": False}  # ModelOpt's name -> are inputs quantized
MIXED = "MIXED_PRECISION"  # ModelOpt's name: an algorithm per layer
# A side-file export: the directory of its packed part, and the description of its factors.
RESIDUAL_DIR, SIDE_FILE = "residual", "metis_low_rank.json"
_READS = (
    "load_packed reads compressed-tensors' nvfp4-pack-quantized and ModelOpt's NVFP4 and "
    "W4A16_NVFP4"
)
_BESIDE = ("bias", "q_scale", "k_scale", "v_scale")  # the last three are for the KV cache
_ARGS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": BLOCK,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}


Names = tuple[str, str, str, str]  # names of codes, block scales, tensor scale, input tensor scale
NAMES: dict[str, Names] = {
    COMPRESSED: ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    MODELOPT: ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}


@dataclass(frozen=True)
class PackedScheme:
    """The parts of a checkpoint's quantization config that are needed to read it.

    Attributes:
        layout: "compressed-tensors" or "modelopt".
        quantizes_input: whether activations are quantized too (W4A4); None if layers differ, see
            `quantizes_input_of`.
        kinds: (target of the config, whether the inputs of matching layers are quantized).
        written: the `quantization_config` that `save_pretrained` writes; None if it has to be
            built from the layers (`compressed_config`).
        dropped: settings of the checkpoint that are ignored, for a warning.
    """

    layout: str
    quantizes_input: bool | None
    written: dict[str, Any] | None
    dropped: tuple[str, ...] = ()
    kinds: tuple[tuple[str, bool], ...] = ()

    def quantizes_input_of(self, layer: str) -> bool | None:
        """Return whether a layer's input is quantized; None: quantized if it has an input scale.

        Targets are layer names, regular expressions prefixed "re:", or module classes. A name takes
        precedence over a regular expression; classes are ignored. None if no target matches, since
        the layer may have another name in the checkpoint.
        """
        if self.quantizes_input is not None:
            return self.quantizes_input
        matches: tuple[Callable[[str], bool], ...] = (
            lambda target: target == layer,
            lambda target: target.startswith("re:") and bool(re.match(target[3:], layer)),
        )
        found = (each for matching in matches for t, each in self.kinds if matching(t))
        return next(found, None)

    @property
    def names(self) -> Names:
        """Names of the layer's tensors in the files."""
        return NAMES[self.layout]


def read_scheme(config: Mapping[str, Any], where: str) -> PackedScheme:
    """Read a `quantization_config`, or the contents of hf_quant_config.json.

    `where` is the checkpoint's path or name, for messages.

    Raises:
        ValueError: the method or format is another one (the message names it), or scales are
            swizzled for a kernel.
    """
    if "swizzl" in json.dumps(config, default=str).lower():
        raise ValueError(
            f"{where}: its quantization config says that block scales are swizzled for a kernel, "
            "but load_packed reads only scales in row order, [o, i/16]. Export the checkpoint "
            "again without swizzling"
        )
    method = config.get("quant_method")
    if (
        method == MODELOPT
        or "quantization" in config
        or (method is None and "quant_algo" in config)
    ):
        return _modelopt(config, where)
    if method != COMPRESSED:
        raise ValueError(f"{where} is quantized by {method!r}; {_READS}")
    return _compressed(config, where)


def _compressed(config: Mapping[str, Any], where: str) -> PackedScheme:
    groups = config.get("config_groups") or {}
    if config.get("transform_config"):
        raise ValueError(
            f"{where} has a transform_config: its weights are rotated, and its inputs would have "
            f"to be rotated in every forward pass, which is not supported; {_READS}"
        )
    inputs: set[bool] = set()
    kinds: list[tuple[str, bool]] = []
    for name, group in groups.items():
        form = group.get("format") or config.get("format")
        weights, activations = group.get("weights") or {}, group.get("input_activations")
        if form != FORMAT:
            raise ValueError(f"{where}: {name} is in the format {form!r}; {_READS}")
        if not _is_nvfp4(weights):
            raise ValueError(f"{where}: the weights of {name} are {_said(weights)}; {_READS}")
        if activations is not None and not (
            _is_nvfp4(activations) and activations.get("dynamic") in ("local", False)
        ):
            raise ValueError(
                f"{where}: the input activations of {name} are {_said(activations)}; {_READS}, "
                "with unquantized inputs, or NVFP4 inputs with a static tensor scale (local)"
            )
        inputs.add(activations is not None)
        kinds += [(target, activations is not None) for target in group.get("targets") or ()]
    if not inputs:
        raise ValueError(f"{where}: its quantization config has no config group; {_READS}")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise ValueError(
            f"{where} has quantization_status={status!r}: its weights are not packed. Save it "
            "compressed first (llm-compressor: save_pretrained(..., save_compressed=True))"
        )
    written = copy.deepcopy(dict(config))
    dropped: tuple[str, ...] = ()
    if cache := config.get("kv_cache_scheme"):
        written["kv_cache_scheme"] = None
        dropped = (f"kv_cache_scheme={cache!r}",)
    return PackedScheme(COMPRESSED, _common(inputs), written, dropped, tuple(kinds))


def _modelopt(config: Mapping[str, Any], where: str) -> PackedScheme:
    details = config.get("quantization", config)
    algorithms = {details.get("quant_algo")}
    layers: dict[str, Any] = {}
    if algorithms == {MIXED}:
        layers = details.get("quantized_layers") or {}
        algorithms |= {layer.get("quant_algo") for layer in layers.values()}
        algorithms -= {MIXED} if layers else set()
    if other := algorithms - ALGORITHMS.keys():
        named = ", ".join(sorted(map(repr, other)))
        raise ValueError(f"{where} is a ModelOpt checkpoint with quant_algo {named}; {_READS}")
    sizes = {details.get("group_size", BLOCK)}
    sizes |= {
        group["weights"].get("group_size", BLOCK)
        for group in (config.get("config_groups") or {}).values()
        if group.get("weights")
    }
    if sizes != {BLOCK}:
        raise ValueError(f"{where} has group_size {sorted(sizes)}, but NVFP4 has blocks of {BLOCK}")
    dropped = tuple(
        f"{key}={details[key]!r}"
        for key in ("kv_cache_quant_algo", "kv_cache_scheme")
        if details.get(key)
    )
    kinds = tuple((name, ALGORITHMS[each.get("quant_algo")]) for name, each in layers.items())
    inputs = _common({ALGORITHMS[each] for each in algorithms})
    return PackedScheme(MODELOPT, inputs, None, dropped, kinds)


def _common(inputs: set[bool]) -> bool | None:
    return next(iter(inputs)) if len(inputs) == 1 else None


def compressed_config(
    inputs: Mapping[str, bool],
    ignore: Iterable[str],
    experts: Iterable[str] = (),
    routers: Iterable[str] = (),
) -> dict[str, Any]:
    """Return compressed-tensors' `quantization_config` as llm-compressor writes it.

    Args:
        inputs: name of each packed layer -> whether its input is quantized.
        ignore: names of the nn.Linear modules that are not packed.
        experts: names in files of fused experts, which are not packed.
        routers: names in files of their routers that are not nn.Linear.
    """
    groups: list[dict[str, Any]] = []
    kinds = sorted(set(inputs.values()), reverse=True)
    for quantizes in kinds:
        named = sorted(name for name, each in inputs.items() if each is quantizes)
        group: dict[str, Any] = {"targets": named if len(kinds) > 1 else ["Linear"]}
        group["weights"] = dict(_ARGS)
        if quantizes:
            group["input_activations"] = {**_ARGS, "dynamic": "local", "observer": "static_minmax"}
        groups.append(group | {"format": FORMAT})
    return {
        "quant_method": COMPRESSED,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "ignore": sorted([*ignore, *routers, *(f"re:{re.escape(name)}.*" for name in experts)]),
    }


def _is_nvfp4(args: Mapping[str, Any]) -> bool:
    return (args.get("num_bits"), args.get("type"), args.get("group_size")) == (4, "float", BLOCK)


def _said(args: Mapping[str, Any]) -> str:
    keys = ("type", "num_bits", "strategy", "group_size", "dynamic")
    return ", ".join(f"{key}={args.get(key)}" for key in keys)


@dataclass(frozen=True)
class StoredTensor:
    """The safetensors dtype name and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


def read_headers(files: Iterable[str | Path]) -> dict[str, StoredTensor]:
    """List the tensors in safetensors files by name, reading only the headers."""
    found = {}
    for path in files:
        with safe_open(path, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118, no dict
                part = tensors.get_slice(key)
                found[key] = StoredTensor(part.get_dtype(), tuple(part.get_shape()))
    return found


def check_layer(
    name: str,
    tensors: Mapping[str, StoredTensor],
    names: Names,
    shape: tuple[int, int],
    quantizes_input: bool | None,
) -> None:
    """Refuse a layer whose tensors in the files do not fit its layout.

    Args:
        name: layer name, for messages.
        tensors: the layer's tensors in the files, by the last part of their names.
        names: the layout's tensor names.
        shape: (out_features, in_features) of the model's layer.
        quantizes_input: True requires the input scale; otherwise it may be missing.

    Raises:
        ValueError: tensors are missing, unknown, of another dtype or shape, or swizzled.
    """
    codes, scale, global_scale, input_scale = names
    needed = names[: 4 if quantizes_input else 3]
    if missing := [f"{name}.{key}" for key in needed if key not in tensors]:
        raise ValueError(
            f"the checkpoint lacks {', '.join(missing)}, which its quantization config "
            "requires; restore the files, or correct the quantization config"
        )
    if other := sorted(tensors.keys() - {*names, *_BESIDE}):
        raise ValueError(
            f"{name} has {', '.join(other)} in addition to its packed weight, which load_packed "
            "does not support. Export the checkpoint without it (asymmetric weights, AWQ and "
            "low-rank corrections are other formats)"
        )
    rows, columns = shape
    blocks = columns // BLOCK
    expected: dict[str, tuple[str, list[tuple[int, ...]]]] = {
        codes: ("U8", [(rows, columns // 2)]),
        scale: ("F8_E4M3", [(rows, blocks)]),
        global_scale: ("F32", [(1,), ()]),
        input_scale: ("F32", [(1,), ()]),
    }
    for key, stored in tensors.items():
        if key not in expected:
            continue
        dtype, shapes = expected[key]
        if key == scale and stored.shape not in shapes and _is_swizzled(stored.shape, rows, blocks):
            raise ValueError(
                f"{name}.{key} has shape {list(stored.shape)} for a weight of {rows} x {columns}: "
                f"the block scales are padded or swizzled for a kernel, but load_packed reads only "
                f"scales in row order, {[rows, blocks]}. Export the checkpoint again without "
                "swizzling"
            )
        if stored.dtype != dtype or stored.shape not in shapes:
            raise ValueError(
                f"{name}.{key} is {stored.dtype} {list(stored.shape)}; NVFP4 for a weight of "
                f"{rows} x {columns} requires {dtype} {list(shapes[0])}"
            )


def _is_swizzled(shape: tuple[int, ...], rows: int, blocks: int) -> bool:
    padded = math.ceil(rows / 128) * 128 * math.ceil(blocks / 4) * 4
    return math.prod(shape) in (padded, rows * blocks)


def check_scales(
    name: str, codes: Tensor, scale: Tensor, tensor_scales: Mapping[str, Tensor]
) -> None:
    """Refuse scales that no quantizer writes.

    A block scale of zero is valid for a block of zeros, or one 2^-20 as large as the largest. Codes
    are uint8 [o i/2], block scales float8_e4m3fn [o i/16], tensor scales by their names in files.

    Raises:
        ValueError: a tensor scale, or its inverse, is not positive and finite; a block scale is
            negative or NaN; all block scales are zero but not all codes are.
    """
    for key, value in tensor_scales.items():
        _check_tensor_scale(f"{name}.{key}", value)
    _check_block_scales(f"{name}.weight_scale", scale, lambda: codes)


def check_scale_files(files: Iterable[str | Path]) -> None:
    """Apply `check_scales` to files in the compressed-tensors layout.

    Reads the scales, a ninth of the packed weights; codes only if all block scales are zero.

    Raises:
        ValueError: see `check_scales`.
    """
    codes, scale, *tensor_scales = NAMES[COMPRESSED]
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, "pt")) for path in files]
        places = {key: tensors for tensors in opened for key in tensors.keys()}  # noqa: SIM118
        for owner in [key.removesuffix(f".{codes}") for key in places if key.endswith(f".{codes}")]:
            for key in (f"{owner}.{each}" for each in tensor_scales):
                if key in places:
                    _check_tensor_scale(key, places[key].get_tensor(key))
            key, beside = f"{owner}.{scale}", f"{owner}.{codes}"
            if key in places:
                _check_block_scales(
                    key,
                    places[key].get_tensor(key),
                    lambda beside=beside: places[beside].get_tensor(beside),  # type: ignore[misc]
                )


def _check_tensor_scale(name: str, scale: Tensor) -> None:
    for number in scale.reshape(-1).tolist():
        if number > 0 and math.isfinite(number) and math.isfinite(1 / number):
            continue
        raise ValueError(
            f"{name} is {number}, but a tensor scale must be positive and finite. The checkpoint "
            "is damaged, or was exported before it was calibrated; export it again"
        )


def _check_block_scales(name: str, scale: Tensor, codes: Callable[[], Tensor]) -> None:
    bits = scale.view(torch.uint8)
    if bad := int((bits >= 0x7F).sum()):  # 0x7f is NaN; 0x80 and above are negative
        raise ValueError(
            f"{name}: {bad} of {scale.numel()} block scales are NaN or negative. The checkpoint is "
            "damaged, or was exported from weights with NaN or inf; export it again"
        )
    if not bool(bits.any()) and bool((codes() & 0x77).any()):
        raise ValueError(
            f"{name}: all {scale.numel()} block scales are zero but the codes are not, so the "
            "weight would be zero. The checkpoint is damaged or incomplete; restore the files or "
            "export it again"
        )
