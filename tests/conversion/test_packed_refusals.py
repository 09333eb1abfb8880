"""Checkpoints and requests that a packed base refuses, by name and with what to do."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from conftest import VOCAB, llama, mixtral
from tensors import logits

from conversion.packed_tools import (
    FILE,
    modelopt,
    rewrite,
)
from metis_hf import load_packed
from metis_hf.deploy.packed import load_deployed
from metis_hf.layers.packed import PackedWeight

UP = "model.layers.0.mlp.up_proj"  # 96 x 64


def setting(key, value):
    def change(tensors):
        tensors[f"{UP}.{key}"] = value(tensors[f"{UP}.{key}"])

    return change


def fp8(byte, index=slice(0, 1)):
    def value(scale):
        scale = scale.clone()
        scale.view(torch.uint8)[index] = byte
        return scale

    return value


NVFP4_ARGS = {"num_bits": 4, "type": "float", "group_size": 16}


def changed(**changes):
    return lambda config: config.update(changes)


def group(**changes):
    return lambda config: config["config_groups"]["group_0"].update(changes)


BAD_TENSORS = {
    "nan": (setting("weight_global_scale", lambda t: t * math.nan), "weight_global_scale is nan"),
    "negative": (setting("weight_global_scale", lambda t: -t), "weight_global_scale is -"),
    "zero": (setting("weight_global_scale", lambda t: 0 * t), r"weight_global_scale is 0\.0"),
    "block-nan": (setting("weight_scale", fp8(0x7F)), "4 of 384 block scales are NaN or negative"),
    "block-negative": (setting("weight_scale", fp8(0xB0)), "4 of 384 block scales are NaN or neg"),
    "block-zero": (setting("weight_scale", fp8(0, slice(None))), "all 384 block scales are zero"),
    "swizzled": (
        setting("weight_scale", lambda t: torch.zeros(128, 4).to(t.dtype)),
        r"weight_scale has shape \[128, 4\] for a weight of 96 x 64: .* padded or swizzled",
    ),
    "shape": (
        setting("weight_packed", lambda t: t[:, :16].contiguous()),
        r"weight_packed is U8 \[96, 16\]; NVFP4 for a weight of 96 x 64 requires U8 \[96, 32\]",
    ),
    "dtype": (setting("weight_scale", lambda t: t.float()), r"weight_scale is F32 \[96, 4\]"),
    "missing": (
        lambda tensors: tensors.pop(f"{UP}.weight_global_scale"),
        rf"the checkpoint lacks {UP}.weight_global_scale, which its quantization config requires",
    ),
    "zero-point": (
        lambda tensors: tensors.update({f"{UP}.weight_zero_point": torch.zeros(96, 4)}),
        "has weight_zero_point in addition to its packed weight",
    ),
}
BAD_CONFIGS = {
    "mxfp4": (
        group(format="mxfp4-pack-quantized"),
        "in the format 'mxfp4-pack-quantized'; load_packed reads",
    ),
    "int4": (
        group(weights={"num_bits": 4, "type": "int", "group_size": 16}),
        "weights of group_0 are type=int, num_bits=4",
    ),
    "inputs": (
        group(input_activations={"num_bits": 8, "type": "float", "dynamic": True}),
        "input activations of group_0 are type=float, num_bits=8",
    ),
    "no-scale": (
        group(input_activations={**NVFP4_ARGS, "dynamic": False}),
        "lacks .*input_global_scale",
    ),
    "not-packed": (changed(quantization_status="frozen"), "its weights are not packed"),
    "marked": (changed(scale_layout="swizzled"), "block scales are swizzled for a kernel"),
    "method": (changed(quant_method="mxfp4"), "is quantized by 'mxfp4'; load_packed reads"),
    "rotated": (
        changed(transform_config={"config_groups": {"R4": {"type": "hadamard"}}}),
        "has a transform_config: its weights are rotated",
    ),
    "no-groups": (changed(config_groups={}), "has no config group"),
}


class TestBadInput:
    @pytest.mark.parametrize("case", [*BAD_TENSORS][:6])
    def test_scales_that_the_library_would_compute_with(self, checkpoint, case):
        """Which loads what is deployed; a row of NaN is not the only harm."""
        change, message = BAD_TENSORS[case]
        with pytest.raises(ValueError, match=rf"{UP}\.weight.*{message}|{UP}\.{message}"):
            load_deployed(rewrite(checkpoint, change))

    def test_scales_of_zero_for_zeros(self, checkpoint, token_ids):
        def change(tensors):
            for key in ("weight_packed", "weight_scale"):
                tensors[f"{UP}.{key}"].view(torch.uint8).zero_()

        assert not logits(load_deployed(rewrite(checkpoint, change)), token_ids).isnan().any()

    @pytest.mark.parametrize("case", BAD_TENSORS)
    def test_tensors(self, checkpoint, case):
        change, message = BAD_TENSORS[case]
        with pytest.raises(ValueError, match=message) as info:
            load_packed(rewrite(checkpoint, change))
        assert UP in str(info.value)

    @pytest.mark.parametrize("case", BAD_CONFIGS)
    def test_configs(self, checkpoint, case):
        change, message = BAD_CONFIGS[case]
        with pytest.raises(ValueError, match=message):
            load_packed(rewrite(checkpoint, lambda tensors: None, change))

    def test_other_algorithms_of_modelopt(self, exported, tmp_path):
        """transformers gives the config of a checkpoint, and not where it is."""
        path = modelopt(exported, tmp_path / "modelopt", "NVFP4_AWQ")
        with pytest.raises(ValueError, match="quant_algo 'NVFP4_AWQ'; load_packed reads"):
            load_packed(path)
        with pytest.raises(ValueError, match=rf"{path} is a ModelOpt checkpoint"):
            transformers.AutoModelForCausalLM.from_pretrained(path)

    def test_decode_scales_of_modelopt(self, exported, tmp_path):
        path = modelopt(exported, tmp_path / "modelopt", "W4A16_NVFP4")
        rewrite(path, setting("weight_scale_2", torch.zeros_like))
        with pytest.raises(ValueError, match=rf"{UP}.weight_scale_2 is 0.0"):
            load_packed(path)

    @pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
    def test_one_number_has_either_shape(self, layout, exported, checkpoint, tmp_path, token_ids):
        if layout == "modelopt":
            checkpoint = modelopt(exported, tmp_path / "modelopt", "W4A16_NVFP4")
        expected = logits(load_packed(checkpoint), token_ids)

        def other_shape(tensors):
            for key, value in tensors.items():
                if value.numel() == 1 and "scale" in key:
                    tensors[key] = value.reshape(() if value.dim() else (1,))

        found = logits(load_packed(rewrite(checkpoint, other_shape)), token_ids)
        assert torch.equal(found, expected)

    def test_a_checkpoint_that_is_not_whole(self, checkpoint):
        """Nothing is made up for what is not there."""
        whole = (checkpoint / FILE).read_bytes()
        rewrite(checkpoint, lambda tensors: tensors.pop("model.embed_tokens.weight"))
        with pytest.raises(ValueError, match=r"lacks model\.embed_tokens\.weight, which .* random"):
            load_packed(checkpoint)
        (checkpoint / FILE).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=r"is incomplete: model\.safetensors is truncated"):
            load_packed(checkpoint)

    def test_saving_what_others_could_not_compute_with(self, exported, tmp_path, token_ids):
        """The layout's readers unpack to BF16, beside whatever the rest is in."""
        model = load_packed(exported, dtype=torch.float32)
        with pytest.raises(
            ValueError, match=r"in torch\.float32, .* Save model\.to\(torch\.bfloat"
        ):
            model.save_pretrained(tmp_path / "out")
        model.to(torch.bfloat16).save_pretrained(tmp_path / "out")
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.equal(logits(plain, token_ids), logits(load_packed(exported), token_ids))

    def test_a_dense_checkpoint(self, tmp_path):
        llama().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="is not quantized"):
            load_packed(tmp_path)

    def test_a_zero_block_is_no_damage(self, checkpoint):
        name = f"{UP}.weight_scale"
        model = load_packed(rewrite(checkpoint, setting("weight_scale", fp8(0))))
        assert name in model.state_dict()
        assert not model.get_submodule(UP).weight[0].any()

    def test_a_packed_head_that_is_tied(self, checkpoint):
        def change(tensors):
            packed = PackedWeight.of(torch.randn(VOCAB, 64))
            for part, tensor in zip(("packed", "scale", "global_scale"), packed):
                tensors[f"lm_head.weight_{part}"] = tensor

        with pytest.raises(ValueError, match="lm_head is packed, but the config ties"):
            load_packed(rewrite(checkpoint, change))

    def test_kv_cache_scheme_is_left_out_with_a_warning(self, checkpoint, tmp_path):
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        rewrite(checkpoint, lambda tensors: None, lambda c: c.update(kv_cache_scheme=scheme))
        with pytest.warns(UserWarning, match="kv_cache_scheme=.* is not emulated"):
            model = load_packed(checkpoint)
        model.save_pretrained(tmp_path / "out")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["quantization_config"]["kv_cache_scheme"] is None

    def test_fused_experts(self, tmp_path):
        mixtral().save_pretrained(tmp_path)

        def change(tensors):
            name = "model.layers.0.block_sparse_moe.experts.0.w1"
            packed = PackedWeight.of(tensors.pop(f"{name}.weight").float())
            for part, tensor in zip(("packed", "scale", "global_scale"), packed):
                tensors[f"{name}.weight_{part}"] = tensor

        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4_ARGS}},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        rewrite(tmp_path, change)
        with pytest.raises(ValueError, match=r"lacks gate_proj of expert 1"):
            load_packed(tmp_path)
