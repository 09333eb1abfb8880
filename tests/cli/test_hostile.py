"""The promises of SECURITY.md, of each command that reads what somebody sent."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import VOCAB, llama
from texts import documents

from metis_hf import MetisConfig, get_metis_model
from metis_hf.cli import main as program
from metis_hf.data.corpus import train_tokenizer

COMMANDS = {
    "eval": ("eval", "MODEL", "--tasks", "none", "--text", "TEXT", "--out", "OUT"),
    "export": ("export", "MODEL", "--out", "OUT"),
    "fidelity": ("fidelity", "MODEL", "--text", "TEXT", "--sequence-length", "64", "--out", "OUT"),
    "analyze": ("analyze", "MODEL", "--text", "TEXT", "--sequence-length", "64", "--out", "OUT"),
}


class Harm:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def settings(**changes):
    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def content(name: str, data: str):
    return lambda model: (model / name).write_text(data)


def pickled(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(model.parent / "HARM")))


def own_code(model: Path) -> None:
    settings(model_type="own", auto_map={"AutoConfig": "own.Config"})(model)
    (model / "own.py").write_text(f"import os\nos.mkdir({str(model.parent / 'HARM')!r})\n")


def linked(name: str):
    """Move a file out of the directory, and leave a link to it."""

    def change(model: Path) -> None:
        elsewhere = model.parent / "elsewhere"
        elsewhere.mkdir()
        shutil.move(model / name, elsewhere / name)
        (model / name).symlink_to(elsewhere / name)

    return change


DAMAGE = {
    "a list": (content("config.json", "[1]"), r"config\.json|AttributeError"),
    "deep": (content("config.json", "[" * 100_000), r"nested too deeply|RecursionError"),
    "no JSON": (content("config.json", "{"), r"config\.json"),
    "unknown kind": (settings(model_type="own"), "model type `own`"),
    "other types": (settings(hidden_size="large"), "'hidden_size' expected int"),
    "other shapes": (settings(hidden_size=128), "cannot be read|has shape"),
    "a million layers": (settings(num_hidden_layers=1_000_000), "1,000,000 layers, but the weigh"),
    "quantization": (settings(quantization_config=[1]), r"config\.json|'list' object"),
    "no weights": (content("model.safetensors", "none"), r"model\.safetensors|SafetensorError"),
    "a pickle": (pickled, "contains Python objects|has neither model.safetensors"),
    "own code": (own_code, "contains custom code"),
    "a linked config": (linked("config.json"), r"config\.json is a link to"),
    "linked weights": (linked("model.safetensors"), r"model\.safetensors is a link to"),
    "a linked tokenizer": (linked("tokenizer.json"), r"tokenizer\.json is a link to"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A dense model and a Metis checkpoint, each with a tokenizer."""
    place = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(documents()[:3], vocab_size=VOCAB + 1)
    for name in ("dense", "metis"):
        model = llama()
        model.resize_token_embeddings(VOCAB + 1)
        if name == "metis":
            get_metis_model(model, MetisConfig())
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    (place / "text.txt").write_text("def f(x): return x\n" * 200)
    return place


@pytest.fixture
def refused(monkeypatch, capfd):
    """Run a command that must fail, and return its line."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["metis-hf", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            program.main()
        assert end.value.code == 2
        line = capfd.readouterr().err[: 1 << 20].rpartition("error: ")[2]
        assert line.count("\n") == 1
        assert 10 < len(line) < 1500
        assert line.strip().isprintable()
        return line

    return run


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_is_refused_in_one_line(command, damage, sources, refused, tmp_path):
    source = "metis" if command == "export" else "dense"
    model = shutil.copytree(sources / source, tmp_path / "model")
    change, said = DAMAGE[damage]
    change(model)
    names = {"MODEL": model, "TEXT": sources / "text.txt", "OUT": tmp_path / "out"}
    line = refused(*(names.get(each, each) for each in COMMANDS[command]))
    assert re.search(said, line)
    assert not (tmp_path / "HARM").exists()


@pytest.mark.parametrize("name", ["metis_log.jsonl", "metis_health.jsonl", "metis_run.json"])
def test_a_record_that_is_a_link(name, refused, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metis_log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (run / name).touch()
    linked(name)(run)
    line = refused("report", run, "--out", tmp_path / "page.html")
    assert f"{run / name} is a link to {tmp_path / 'elsewhere' / name}" in line


def test_a_directory_of_results_runs_no_code(refused, tmp_path):
    task = tmp_path / "out" / "runs" / "bf16" / "seed-0"
    task.mkdir(parents=True)
    harm = tmp_path / "harm.py"
    harm.write_text(f"import os\nos.mkdir({str(tmp_path / 'HARM')!r})\n")
    (task / "run.json").write_text(json.dumps({"imports": [str(harm)]}))
    line = refused("compare", "--schemes", "bf16", "--dry-run", "--out", tmp_path / "out")
    assert f"was started with --import {harm}" in line
    assert not (tmp_path / "HARM").exists()


def test_an_adapter(sources, refused, tmp_path):
    base = {"peft_type": "LORA", "base_model_name_or_path": str(sources / "dense")}
    for number, config in enumerate(([1], {}, base | {"peft_type": "OWN"}, base | {"r": "x"})):
        adapter = tmp_path / str(number)
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        shutil.copy(sources / "dense" / "model.safetensors", adapter / "adapter_model.safetensors")
        refused("eval", adapter, "--tasks", "none", "--text", sources / "text.txt",
                "--out", tmp_path / "out")  # fmt: skip
