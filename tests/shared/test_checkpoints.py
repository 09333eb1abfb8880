"""Which checkpoint is whole: every file of a real one cut short or removed, and the fallback."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from conversion.run_tools import converted, trainer
from safetensors.torch import save_file

from metis_hf.deploy import export_checkpoint
from metis_hf.lab.model_source import open_checkpoint
from metis_hf.shared.checkpoints import (
    checkpoint_damage,
    file_damage,
    last_checkpoint,
    model_damage,
    refuse_links,
)
from metis_hf.training import resume

CUT = ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json", "config.json"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    trainer(directory, converted(), max_steps=4).train()  # saves every second step
    return directory


@pytest.fixture
def copied(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "run"))


def cut(path, left=0.5):
    os.truncate(path, int(left * path.stat().st_size))


def test_the_newest_by_its_step(run, copied):
    assert last_checkpoint(run) == resume.last_checkpoint(run) == str(run / "checkpoint-4")
    shutil.copytree(copied / "checkpoint-4", copied / "checkpoint-10")
    (copied / "checkpoint-11").write_text("a file")
    (copied / "checkpoint-last").mkdir()
    assert last_checkpoint(copied) == str(copied / "checkpoint-10")
    assert last_checkpoint(copied / "nowhere") is None
    assert last_checkpoint(copied / "checkpoint-last") is None


@pytest.mark.parametrize("name", CUT)
def test_a_file_cut_short(name, copied, caplog):
    """The checkpoint before is taken, and a warning says why."""
    for left in (0.99, 0.5, 0):
        cut(copied / "checkpoint-4" / name, left)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert last_checkpoint(copied) == str(copied / "checkpoint-2")
        (record,) = caplog.records
        assert record.getMessage() == (
            f"{copied}/checkpoint-4 is incomplete ({name} is truncated); "
            "checkpoint-2 is used instead"
        )


def test_a_missing_file(copied, tmp_path):
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        path = copied / "checkpoint-4" / name
        path.rename(tmp_path / name)
        assert checkpoint_damage(copied / "checkpoint-4") in (f"no {name}", "no weights")
        assert last_checkpoint(copied) == str(copied / "checkpoint-2")
        (tmp_path / name).rename(path)


def test_no_older_one(copied, caplog):
    cut(copied / "checkpoint-4/optimizer.pt")
    shutil.rmtree(copied / "checkpoint-2")
    assert last_checkpoint(copied) is None
    assert caplog.records[0].getMessage().endswith("; there is no older one")


def test_a_shard_is_missing(copied):
    checkpoint = copied / "checkpoint-4"
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    assert checkpoint_damage(checkpoint) == "no index of its weights"
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", '
        '"b": "model-00002-of-00002.safetensors"}}'
    )
    assert checkpoint_damage(checkpoint) == "no model-00002-of-00002.safetensors"


def test_what_else_lies_beside_the_weights_is_not_missed(copied):
    """Repositories of the hub have indices of weights that transformers does not load from them."""
    checkpoint = copied / "checkpoint-4"
    for other in ("pytorch_model.bin.index.json", "tf_model.h5.index.json"):
        (checkpoint / other).write_text('{"weight_map": {"a": "gone-00001-of-00002.bin"}}')
    shutil.copy(checkpoint / "optimizer.pt", checkpoint / "pytorch_model-00001-of-00002.bin")
    assert checkpoint_damage(checkpoint) is None


def test_a_shard_of_torch_files_is_missing(copied):
    checkpoint = copied / "checkpoint-4"
    (checkpoint / "model.safetensors").unlink()
    shutil.copy(checkpoint / "optimizer.pt", checkpoint / "pytorch_model-00001-of-00002.bin")
    assert checkpoint_damage(checkpoint) == "no index of its weights"
    index = '{"weight_map": {"a": "pytorch_model-00002-of-00002.bin"}}'
    (checkpoint / "pytorch_model.bin.index.json").write_text(index)
    assert checkpoint_damage(checkpoint) == "no pytorch_model-00002-of-00002.bin"


@pytest.fixture(params=["whole", "sharded", "zero"])
def of_several_processes(request, copied):
    """The newest checkpoint laid out as accelerate and Trainer write it under FSDP, or ZeRO-2."""
    checkpoint = copied / "checkpoint-4"
    optimizer = checkpoint / "optimizer.pt"
    if request.param == "whole":  # FULL_STATE_DICT
        shutil.copy(optimizer, checkpoint / "pytorch_model_fsdp.bin")
        optimizer.rename(checkpoint / "optimizer.bin")
    elif request.param == "sharded":
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            (checkpoint / name).mkdir()
            shutil.copy(optimizer, checkpoint / name / "__0_0.distcp")
        (checkpoint / "model.safetensors").unlink()
        optimizer.unlink()
    else:
        (checkpoint / "global_step4").mkdir()
        optimizer.rename(checkpoint / "global_step4" / "zero_pp_rank_0_optim_states.pt")
    return checkpoint


def test_checkpoints_of_several_processes_are_whole(of_several_processes):
    assert last_checkpoint(of_several_processes.parent) == str(of_several_processes)


@pytest.mark.parametrize("of_several_processes", ["whole", "sharded"], indirect=True)
@pytest.mark.parametrize("what", ["optimizer", "model"])
def test_fsdp_left_its_optimizer_or_its_model_out(what, of_several_processes):
    """The directory or the file of the one does not pass for the other."""
    for path in of_several_processes.iterdir():
        if what in path.name:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    wanted = {"optimizer": "no optimizer.pt", "model": "no weights"}[what]
    assert checkpoint_damage(of_several_processes) == wanted


def test_json_is_utf8_wherever_it_is_read(copied, monkeypatch):
    """Also where the locale's encoding is another: Windows, LANG=C."""
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, encoding="ascii": read(path, encoding))
    (copied / "checkpoint-4" / "tokenizer.json").write_text('{"é": 1}', encoding="utf-8")
    index = '{"weight_map": {"é": "model.safetensors"}}'
    (copied / "checkpoint-4" / "m.safetensors.index.json").write_text(index, encoding="utf-8")
    assert checkpoint_damage(copied / "checkpoint-4") is None


def test_files_of_other_kinds_are_taken_as_they_are(tmp_path):
    """A pickle of old PyTorch has no length to compare with."""
    for name, content in (("merges.txt", b""), ("old.bin", b"\x80\x02legacy"), ("a.json", b"{}")):
        (tmp_path / name).write_bytes(content)
        assert file_damage(tmp_path / name) is None


class TestEvaluation:
    """`open_checkpoint` asks for weights and config alone, and falls back as resuming does."""

    def test_falls_back(self, copied, caplog):
        cut(copied / "checkpoint-4/model.safetensors")
        assert open_checkpoint(copied).path == copied / "checkpoint-2"
        assert "checkpoint-2 is used instead" in caplog.text

    def test_needs_no_optimizer(self, copied):
        (copied / "checkpoint-4/optimizer.pt").unlink()
        assert open_checkpoint(copied).path == copied / "checkpoint-4"

    @pytest.mark.parametrize("place", [".", "model"])
    def test_a_final_model_cut_short(self, place, copied, caplog):
        """As a process leaves it that ends while it saves the trained model."""
        shutil.copytree(copied / "checkpoint-4", copied / place, dirs_exist_ok=True)
        assert open_checkpoint(copied).path == copied / place
        cut(copied / place / "model.safetensors")
        assert open_checkpoint(copied).path == copied / "checkpoint-4"
        assert "model.safetensors is truncated" in caplog.text

    def test_a_named_checkpoint_cut_short_is_refused(self, copied):
        cut(copied / "checkpoint-4/model.safetensors")
        with pytest.raises(ValueError, match=r"checkpoint-4: model.safetensors is truncated"):
            open_checkpoint(copied / "checkpoint-4")


class TestLinks:
    """Of a model's files; what they point to would be read in its name."""

    def test_out_of_the_directory(self, tmp_path):
        (tmp_path / "secret.json").touch()
        (tmp_path / "run" / "model").mkdir(parents=True)
        link = tmp_path / "run" / "model" / "tokenizer.json"
        link.symlink_to("../../secret.json")
        with pytest.raises(ValueError, match=rf"{link} is a link to .*secret\.json, outside of"):
            refuse_links(link.parent)
        link.unlink()
        (tmp_path / "run" / "linked").symlink_to(tmp_path)
        with pytest.raises(ValueError, match=r"run/linked is a link to"):
            refuse_links(tmp_path / "run" / "linked", tmp_path / "run")

    def test_within_it_and_by_its_user(self, tmp_path):
        (tmp_path / "run" / "model").mkdir(parents=True)
        (tmp_path / "run" / "tokenizer.json").touch()
        (tmp_path / "run" / "model" / "tokenizer.json").symlink_to("../tokenizer.json")
        (tmp_path / "run" / "train.log").symlink_to("/dev/null")
        (tmp_path / "latest").symlink_to("run")
        refuse_links(tmp_path / "run" / "model", tmp_path / "run")
        refuse_links(tmp_path / "latest")

    def test_of_the_hub_s_cache(self, tmp_path):
        snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
        snapshot.mkdir(parents=True)
        (tmp_path / "models--a--b" / "blobs").mkdir()
        (tmp_path / "models--a--b" / "blobs" / "1").touch()
        (snapshot / "config.json").symlink_to("../../blobs/1")
        refuse_links(snapshot)
        (snapshot / "vocab.json").symlink_to("../../../secret.json")
        with pytest.raises(ValueError, match=r"vocab\.json is a link"):
            refuse_links(snapshot)


def test_a_config_of_more_layers_than_its_weights(tmp_path):
    """Building a million takes minutes and gigabytes before the first weight is read."""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for config, said in (
        (
            {"num_hidden_layers": 1_000_000},
            "config.json has 1,000,000 layers, but the weights have only 1 ",
        ),
        ({"text_config": {"n_layer": 10**30}}, "config.json has 1,000,000,000,000"),
        ({"num_hidden_layers": 1000}, None),
        ({"layers": "many"}, None),
        ([1], None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        damage = model_damage(tmp_path)
        assert damage is None if said is None else said in damage


@pytest.mark.parametrize(
    ("name", "size"),
    [("hidden_size", -64), ("num_attention_heads", 0), ("vocab_size", 0), ("head_dim", -1),
     ("max_position_embeddings", -5)],
)  # fmt: skip
def test_sizes_that_no_model_has(name, size, run, tmp_path):
    """By the commands that read a model: `eval` and `export`."""
    place = shutil.copytree(run / "checkpoint-4", tmp_path / "model")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {name: size}))
    match = rf"config\.json has {name}={size}, an impossible size"
    with pytest.raises(ValueError, match=match):
        open_checkpoint(place)
    with pytest.raises(ValueError, match=match):
        export_checkpoint(place, tmp_path / "out")
