"""The conversion report as data."""

from __future__ import annotations

import json

import torch
from conftest import gpt2, llama

from conversion.architectures import ARCHITECTURES
from metis_hf import MetisConfig, get_metis_model


def test_is_data_for_programs():
    config = MetisConfig(rank=4, scheme_pattern={"down_proj": "bf16"}, keep_last_blocks=1)
    model = llama()
    total = sum(param.numel() for param in model.parameters())
    report = get_metis_model(model, config).metis_report
    data = json.loads(json.dumps(report.to_dict()))
    assert data["scheme"] == "metis"
    assert data["total_params"] == total
    assert len(data["layers"]) == len(report.layers) == 7
    down = next(layer for layer in data["layers"] if layer["name"].endswith("down_proj"))
    assert down["kind"] == "Linear"
    assert (down["in_features"], down["out_features"], down["params"]) == (96, 64, 96 * 64)
    assert (down["scheme"], down["rank"]) == ("bf16", None)
    query = next(layer for layer in data["layers"] if layer["name"].endswith("q_proj"))
    assert (query["scheme"], query["rank"]) == ("metis", 4)
    assert data["converted_params"] == sum(layer["params"] for layer in data["layers"])
    reasons = {item["name"]: item["reason"] for item in data["skipped"]}
    assert reasons == report.skipped
    assert reasons["model.layers.1.mlp.up_proj"] == "keep_last_blocks=1"
    assert 0 < data["flops_share"] < 1
    assert report.ranks == {4: 6}
    assert report.other_schemes == {"bf16": 1}
    assert report.skipped_by_reason()["output head"] == ["lm_head"]


def test_kinds():
    (kind,) = {layer.kind for layer in get_metis_model(gpt2()).metis_report.layers}
    assert kind == "Conv1D"
    model = get_metis_model(ARCHITECTURES["mixtral"].build())
    kinds = {layer.kind for layer in model.metis_report.layers if ".experts." in layer.name}
    assert kinds == {"expert"}


def test_text_without_what_was_true_at_conversion_alone():
    report = get_metis_model(llama(), MetisConfig(split_weight=True)).metis_report
    assert report.max_error > 0
    assert "split reproduces" in str(report)
    assert "split reproduces" not in report.text(error=False)
    assert "rank 32 (14 layers)" in report.text(error=False)


def test_tied_parameters_count_once_on_every_device():
    model = llama(tie_word_embeddings=True)
    total = sum(param.numel() for param in model.parameters())
    with torch.device("meta"):
        empty = llama(tie_word_embeddings=True)
    for each in (model, empty):
        assert get_metis_model(each).metis_report.total_params == total
