"""Evaluation of packed exports, and of checkpoints that other software has quantized."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import falcon
from peft import LoraConfig, get_peft_model
from tensors import logits

from lab.evaluate.eval_tools import make_model, save
from metis_hf import MetisConfig, calibrate, get_metis_model, load_packed
from metis_hf.deploy import export_checkpoint
from metis_hf.deploy.packed import load_deployed
from metis_hf.lab.evaluate.models import read_conversions
from metis_hf.lab.model_source import open_checkpoint
from metis_hf.layers.packed import packed_layers

CPU = torch.device("cpu")


@pytest.fixture
def ids():
    return torch.arange(40)[None]


def test_what_others_quantized_has_no_dense_weights(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path / "one", None))
    checkpoint = replace(checkpoint, quantization={"quant_method": "gptq"})
    assert checkpoint.precisions("both") == checkpoint.precisions("scheme") == ("scheme",)
    checkpoint.check("scheme")
    with pytest.raises(ValueError, match="contains gptq weights only, no dense ones"):
        checkpoint.check("dense")


def test_an_export_with_a_side_file_is_named(tmp_path):
    """Whole, and its residuals alone, which would load as another model."""
    source = save(tmp_path / "run", "metis", split_weight=True)
    out = tmp_path / "out"
    export_checkpoint(source, out, format="compressed-tensors", low_rank="side-file")
    for place in (out, out / "residual"):
        with pytest.raises(ValueError, match=r"side file: .*load_low_rank\('.*out'\)\.save_pre"):
            open_checkpoint(place)


def test_layers_that_transformers_cannot_unpack_late(tmp_path, ids):
    """Falcon's are a class of their own; inputs are quantized as in the model that was exported."""
    pytest.importorskip("compressed_tensors")
    model = falcon(num_hidden_layers=1).bfloat16().float()  # as the rest is stored
    get_metis_model(model, MetisConfig(scheme="w4a4"))
    calibrate(model, [ids])
    model.save_pretrained(tmp_path / "run")
    report = export_checkpoint(tmp_path / "run", tmp_path / "out", format="compressed-tensors")
    assert any("does not quantize inputs, or with metis_hf.load_packed" in n for n in report.notes)
    checkpoint = open_checkpoint(tmp_path / "out")
    expected = logits(model, ids)
    for dtype, bound in (("auto", 0.1), ("float32", 0.001)):
        found = checkpoint.load("scheme", dtype, CPU)
        assert len(packed_layers(found)) == 4
        assert (logits(found, ids) - expected).norm() < bound * expected.norm()
    assert packed_layers(load_deployed(tmp_path / "out")).keys() == packed_layers(found).keys()


def test_others_are_left_to_the_library(tmp_path):
    pytest.importorskip("compressed_tensors")
    source = save(tmp_path / "run", "metis")
    export_checkpoint(source, tmp_path / "out", format="compressed-tensors")
    assert not packed_layers(load_deployed(tmp_path / "out"))
    assert packed_layers(load_deployed(tmp_path / "out", torch.float32))
    assert packed_layers(load_packed(tmp_path / "out"))


def test_units_of_another_machine_are_not_asked_for(tmp_path):
    """By an adapter that was trained on it, a checkpoint, or a file for --config."""
    recorded = MetisConfig(scheme="nvfp4").replace(backend="native").to_dict()
    model = get_peft_model(make_model(), LoraConfig(target_modules="all-linear"))
    model.base_model.model.name_or_path = str(save(tmp_path / "base", None))
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metis_config": recorded}))
    adapter = open_checkpoint(tmp_path / "adapter").conversion
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    (asked,) = read_conversions([], tmp_path / "config.json")
    trained = replace(open_checkpoint(tmp_path / "base"), quantization=recorded).metis
    for config in (adapter, asked, trained):
        assert config is not None
        assert (config.scheme, config.backend) == ("nvfp4", "auto")
