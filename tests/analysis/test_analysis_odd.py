"""Checkpoints out of the ordinary: a converted head, layers without a spectrum or a known risk."""

from __future__ import annotations

import math

from conftest import llama

from metis_hf import MetisConfig, get_metis_model
from metis_hf.analysis import figures
from metis_hf.analysis.result import Analysis, write_csv
from metis_hf.analysis.source import WeightSource


def test_a_converted_head_is_analyzed_however_it_is_stored(tmp_path):
    names = {}
    for split in (False, True):
        config = MetisConfig(target_modules=["o_proj", "lm_head"], split_weight=split, rank=16)
        get_metis_model(llama(), config).save_pretrained(tmp_path / str(split))
        names[split] = WeightSource(tmp_path / str(split)).names
    assert names[True] == names[False]
    assert names[True][-1] == "lm_head"
    assert len(names[True]) == 15  # the others are analyzed though they are not converted


def test_a_picture_of_layers_without_a_spectrum():
    """Of a diverged checkpoint."""
    lines = {"model.layers.0.mlp.up_proj": {"weight": {"shape": [8, 8]}}}
    assert figures.risk_map(lines).startswith(b"\x89PNG")


def test_blocks_of_encoders_and_decoders_are_told_apart():
    names = {
        "model.layers.3.self_attn.q_proj": ("3", "q_proj"),
        "encoder.block.0.layer.0.SelfAttention.q": ("encoder 0", "SelfAttention.q"),
        "decoder.block.0.layer.0.SelfAttention.q": ("decoder 0", "SelfAttention.q"),
        "model.decoder.layers.1.fc1": ("decoder 1", "fc1"),
        "lm_head": ("-", "lm_head"),
    }
    assert {name: figures.place(name) for name in names} == names


def test_layers_of_unknown_risk_come_first_in_the_table(tmp_path):
    risks = {"a": 0.5, "b": math.nan, "c": 0.25, "d": math.nan, "e": 0.75}
    lines = {n: {"weight": {"shape": [1, 1], "nvfp4_swamped": r}} for n, r in risks.items()}
    result = Analysis("model", lines=lines)
    assert result.by_risk() == ["b", "d", "e", "a", "c"]
    write_csv(tmp_path / "layers.csv", result)
    rows = (tmp_path / "layers.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["b", "d", "e", "a", "c"]
