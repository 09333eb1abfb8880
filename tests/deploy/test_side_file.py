"""Exports with a side file: factors beside a packed residual, put together again to the bit."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deploy.checkpoints import ALL_SPLIT, checkpoint, w_hat
from metis_hf import MetisLinear, metis_layers
from metis_hf.deploy import export_checkpoint, load_low_rank, load_metis_model
from metis_hf.deploy.compressed_tensors import CompressedFactors, CompressedMatrix

SPLIT = [
    pytest.param(ALL_SPLIT, id="metis"),
    pytest.param({"scheme": "metis-paper"}, id="metis-paper"),
    pytest.param({"scheme": "nvidia", "split_weight": True}, id="nvidia-stored-split"),
    pytest.param({**ALL_SPLIT, "rank": 5, "operand_mode": "contraction"}, id="square-tiles"),
    pytest.param({**ALL_SPLIT, "two_level": False}, id="one-level"),
]


def exported(folder, **options):
    """An export with a side file of "metis" beside it."""
    source = checkpoint(folder / "metis", **ALL_SPLIT, **options)
    export_checkpoint(source, folder / "out", format="compressed-tensors", low_rank="side-file")
    return folder / "out"


class TestSideFile:
    @pytest.mark.parametrize("config", SPLIT)
    @pytest.mark.filterwarnings("ignore:two_level")
    def test_puts_the_operands_together_to_the_bit(self, config, tmp_path):
        source = checkpoint(tmp_path / "metis", **config)
        report = export_checkpoint(
            source, tmp_path / "out", format="compressed-tensors", low_rank="side-file"
        )
        assert report.low_rank == "side-file"
        whole = load_low_rank(tmp_path / "out")
        assert whole.dtype is torch.float32
        assert not list(metis_layers(whole))
        for name, layer in metis_layers(load_metis_model(source)):
            stored = config.get("split_weight", config["scheme"] == "metis-paper")
            assert isinstance(layer, MetisLinear) == stored
            assert torch.equal(whole.get_submodule(name).weight, w_hat(layer)), name

    def test_plain_loading_of_it_fails(self, tmp_path):
        """The residual alone is a plausible model without its dominant subspace."""
        out = exported(tmp_path)
        with pytest.raises((OSError, ValueError)):
            transformers.AutoModelForCausalLM.from_pretrained(out)

    def test_files(self, tmp_path):
        out = exported(tmp_path, tokenizer=True)
        assert {path.name for path in out.iterdir()} == {
            "README.md",
            "metis_export.json",
            "metis_low_rank.json",
            "metis_low_rank.safetensors",
            "residual",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        description = json.loads((out / "metis_low_rank.json").read_text())
        name = "model.layers.0.mlp.up_proj"
        assert description["layers"][name] == {"out_features": 96, "in_features": 64, "rank": 48}
        tensors = load_file(out / "metis_low_rank.safetensors")
        keys = ("u_packed", "u_scale", "u_global_scale", "s", "vh_packed")
        found = {key: tensors[f"{name}.{key}"] for key in keys}
        shapes = {key: (str(tensor.dtype), *tensor.shape) for key, tensor in found.items()}
        assert shapes == {
            "u_packed": ("torch.uint8", 96, 24),
            "u_scale": ("torch.float8_e4m3fn", 96, 3),
            "u_global_scale": ("torch.float32", 1),
            "s": ("torch.float32", 48),
            "vh_packed": ("torch.uint8", 48, 32),
        }

    def test_in_another_dtype_it_is_the_same_rounded(self, tmp_path):
        out = exported(tmp_path)
        exact = load_low_rank(out).state_dict()
        rounded = load_low_rank(out, torch.bfloat16)
        assert rounded.dtype is torch.bfloat16
        for name, value in rounded.state_dict().items():
            assert torch.equal(value, exact[name].bfloat16()), name

    @pytest.mark.parametrize(
        "name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight_scale"]
    )
    def test_missing_residual(self, name, tmp_path):
        """As where one of several files was lost."""
        out = exported(tmp_path)
        path = out / "residual" / "model.safetensors"
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors, path)
        with pytest.raises(ValueError, match=f"residual lacks {name}$"):
            load_low_rank(out)

    def test_missing_factor_and_newer_version(self, tmp_path):
        out = exported(tmp_path)
        path = out / "metis_low_rank.safetensors"
        tensors = load_file(path)
        name = "model.layers.1.self_attn.q_proj.vh_scale"
        save_file({k: v for k, v in tensors.items() if k != name}, path)
        with pytest.raises(ValueError, match=r"lacks model.layers.1.self_attn.q_proj.vh_scale"):
            load_low_rank(out)
        description = json.loads((out / "metis_low_rank.json").read_text())
        (out / "metis_low_rank.json").write_text(json.dumps(description | {"format_version": 2}))
        with pytest.raises(ValueError, match=r"format_version 2.*upgrade"):
            load_low_rank(out)
        with pytest.raises(ValueError, match=r"no metis_low_rank\.json"):
            load_low_rank(tmp_path / "metis")


def test_low_rank_by_hand():
    """(u * s) @ vh with factors that NVFP4 holds exactly: tensor scale 1, block scales 448."""
    from metis_hf.numerics import Quantizer

    u = 448 * torch.tensor([[6.0, -3.0], [0.5, -6.0]])
    vh = 448 * torch.tensor([[1.0, 2.0, 6.0], [-6.0, 1.5, 0.0]])
    s = torch.tensor([2.0, 0.25])
    low = CompressedFactors(
        CompressedMatrix.of(u, Quantizer()), s, CompressedMatrix.of(vh, Quantizer())
    )
    assert torch.equal(low.dense(), (u * s) @ vh)
