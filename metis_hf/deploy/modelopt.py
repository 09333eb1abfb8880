"""NVFP4 checkpoints in the layout of NVIDIA's ModelOpt, for vLLM, SGLang and TensorRT-LLM.

For a layer `name` [o i]: `name.weight` uint8 [o i/2] and `name.weight_scale` float8_e4m3fn [o i/16]
as in compressed-tensors; `name.weight_scale_2` and `name.input_scale`, fp32 scalars, are decode
scales: weight = code * weight_scale * weight_scale_2. `config.json` and `hf_quant_config.json` list
the quantized layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from metis_hf.deploy.compressed_tensors import CompressedMatrix
from metis_hf.deploy.packed_layouts import ALGORITHMS, MIXED, MODELOPT
from metis_hf.layers.packed import BLOCK
from metis_hf.shared.records import package_versions

_ALGORITHM = {quantized: name for name, quantized in ALGORITHMS.items()}


def layer_state(weight: CompressedMatrix, input_scale: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of a layer by their layout names.

    `input_scale` is the encode scale of the input, fp32 [1]; None if the input is not quantized.
    """
    state = {
        "weight": weight.packed,
        "weight_scale": weight.scale,
        "weight_scale_2": weight.global_scale.reciprocal().reshape(()),
    }
    if input_scale is not None:
        state["input_scale"] = input_scale.reciprocal().reshape(())
    return state


def describe(
    ignore: Sequence[str],
    inputs: Mapping[str, bool],
    experts: Sequence[str] = (),
    routers: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the contents of `hf_quant_config.json`; arguments as for `compressed_config`."""
    kinds = set(inputs.values())
    quantization: dict[str, Any] = {
        "quant_algo": _ALGORITHM[kinds.pop()] if len(kinds) == 1 else MIXED,
        "kv_cache_quant_algo": None,
        "group_size": BLOCK,
        "exclude_modules": sorted([*ignore, *routers, *(f"{name}*" for name in experts)]),
    }
    if quantization["quant_algo"] == MIXED:
        del quantization["group_size"]
        quantization["quantized_layers"] = {
            name: {"quant_algo": _ALGORITHM[quantized], "group_size": BLOCK}
            for name, quantized in inputs.items()
        }
    producer = {"name": "metis_hf", "version": package_versions()["metis-hf"]}
    return {"producer": producer, "quantization": quantization}


def quantization_config(description: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the result of `describe` to the `quantization_config` of config.json."""
    details = description["quantization"]
    if details["quant_algo"] == MIXED:
        named: dict[str, list[str]] = {}
        for name, layer in details["quantized_layers"].items():
            named.setdefault(layer["quant_algo"], []).append(name)
        groups = [_group(algorithm) | {"targets": sorted(ns)} for algorithm, ns in named.items()]
        more = {"quantized_layers": details["quantized_layers"]}
    else:
        groups, more = [_group(details["quant_algo"]) | {"targets": ["Linear"]}], {}
    return {
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        **more,
        "ignore": details["exclude_modules"],
        "quant_algo": details["quant_algo"],
        "producer": description["producer"],
        "quant_method": MODELOPT,
    }


def _group(algorithm: str) -> dict[str, Any]:
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    group: dict[str, Any] = {"weights": arguments}
    if ALGORITHMS[algorithm]:
        group["input_activations"] = dict(arguments)
    return group
