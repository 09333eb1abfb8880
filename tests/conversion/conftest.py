"""Checkpoints that hold their weights packed."""

from __future__ import annotations

import shutil

import pytest
import torch
from conftest import llama

from conversion.packed_tools import (
    INPUT_SCALE,
    rewrite,
)
from metis_hf import (
    MetisConfig,
    get_metis_model,
)
from metis_hf.deploy import export_checkpoint


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A tiny Llama with one bias-free block set, written by our own export."""
    folder = tmp_path_factory.mktemp("packed")
    torch.manual_seed(5)
    model = get_metis_model(llama(tie_word_embeddings=True), MetisConfig(scheme="nvfp4-rne"))
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder / "metis")
    export_checkpoint(folder / "metis", folder / "nvfp4", format="compressed-tensors")
    return folder / "nvfp4"


@pytest.fixture
def checkpoint(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "nvfp4")


@pytest.fixture
def w4a4(checkpoint):
    def change(tensors):
        for key in [key for key in tensors if key.endswith("weight_packed")]:
            tensors[key.replace("weight_packed", "input_global_scale")] = torch.tensor(
                [INPUT_SCALE]
            )

    def quantization(config):
        group = config["config_groups"]["group_0"]
        group["input_activations"] = {
            **group["weights"], "dynamic": "local", "observer": "static_minmax",
        }  # fmt: skip

    return rewrite(checkpoint, change, quantization)
