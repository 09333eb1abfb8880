"""Packed checkpoints of both layouts for tests, and what they are compared with."""

from __future__ import annotations

import json
import shutil

import torch
from conftest import VOCAB
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from metis_hf.layers.packed import packed_layers

LAYERS = 14  # of the two blocks
INPUT_SCALE = 700.0
FILE = "model.safetensors"


def rewrite(path, change, quantization=None):
    """Apply `change` to a checkpoint's tensors, and to its quantization config another."""
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE, {"format": "pt"})
    if quantization is not None:
        config = json.loads((path / "config.json").read_text())
        quantization(config["quantization_config"])
        (path / "config.json").write_text(json.dumps(config))
    return path


def modelopt(source, target, algorithm="NVFP4", own_file=False):
    """Write a compressed-tensors checkpoint in ModelOpt's layout, as its exporter describes it."""
    shutil.copytree(source, target)
    tensors, out = load_file(source / FILE), {}
    for key, value in tensors.items():
        owner, _, last = key.rpartition(".")
        if last == "weight_packed":
            out[f"{owner}.weight"] = value
        elif last == "weight_global_scale":
            out[f"{owner}.weight_scale_2"] = (1 / value).reshape(())
        elif last == "input_global_scale":
            out[f"{owner}.input_scale"] = (1 / value).reshape(())
        else:
            out[key] = value
    save_file(out, target / FILE, {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    if own_file:
        described = {
            "producer": {"name": "modelopt", "version": "0.40.0"},
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": ["lm_head"],
            },
        }
        (target / "hf_quant_config.json").write_text(json.dumps(described))
    else:
        args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        config["quantization_config"] = {
            "config_groups": {
                "group_0": {"input_activations": args, "weights": args, "targets": ["Linear"]}
            },
            "ignore": ["lm_head"],
            "quant_algo": algorithm,
            "producer": {"name": "modelopt", "version": "0.40.0"},
            "quant_method": "modelopt",
        }
    (target / "config.json").write_text(json.dumps(config))
    return target


def dense_twin(path, dtype):
    """Plain transformers with the weights that compressed-tensors makes of the checkpoint."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=CompressedTensorsConfig(dequantize=True)
    )


def lora(model, **options):
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", **options})
    return get_peft_model(model, config)


def with_adapter(model, size=0.05):
    """Adapters that change something: B starts at zero."""
    model = lora(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(size * torch.randn(param.shape, generator=generator))
    return model


def ids(rows=2):
    return torch.randint(0, VOCAB, (rows, 12), generator=torch.Generator().manual_seed(1))


def base_bytes(model):
    return {
        f"{name}.{key}": value.clone().view(torch.uint8)
        for name, layer in packed_layers(model).items()
        for key, value in layer.state_dict().items()
    }
