"""Dense models in a scheme: what `--scheme`, `--config` and `--control` evaluate, in which rows."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from tensors import logits

from lab.evaluate.eval_tools import DATA, make_model, make_tokenizer, results, run, save
from metis_hf import MetisConfig, get_metis_model
from metis_hf.lab import model_source
from metis_hf.lab.evaluate import jobs
from metis_hf.lab.evaluate.models import choose_models, read_conversions

TEXT = "The clock in the hall struck nine, and nobody came down to breakfast. " * 12
CPU = torch.device("cpu")
SIX_DIGITS = 1e-4  # of losses about 10, as the table has them


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense base, a model trained in metis, and another dense one; a text to hold out."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), make_tokenizer()
    save(folder / "base", None, tokenizer)
    save(folder / "run" / "model", "metis", tokenizer, seed=1)
    save(folder / "other", None, tokenizer, seed=2)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def evaluate(folder, tmp_path):
    """Evaluate the loss alone; returns name of row -> (loss, difference or None)."""

    def call(*arguments):
        out = tmp_path / "out"
        done = run(*arguments, "--tasks", "none", "--text", folder / "text.txt", "--out", out)
        assert done.exit_code == 0, done.output
        found: dict[str, list[float | None]] = {}
        with open(out / "table.csv") as file:
            for line in csv.DictReader(file):
                found.setdefault(line["name"], []).append(float(line["Loss"]))
        return {
            row: (values[0], values[1] if len(values) > 1 else None)
            for row, values in found.items()
        }, done.output

    return call


def test_a_dense_model_in_two_schemes(folder, evaluate, tmp_path):
    rows, printed = evaluate(folder / "base", "--scheme", "nvfp4, metis", "--precision", "both")
    assert set(rows) == {"base dense", "base nvfp4", "base metis"}
    dense = rows["base dense"][0]
    for name in ("base nvfp4", "base metis"):
        loss, difference = rows[name]
        assert loss != dense
        assert difference == pytest.approx(loss - dense, abs=SIX_DIGITS)  # the base is the control
    found = results(tmp_path / "out")
    for name in ("nvfp4", "metis"):
        settings = found[f"base {name}"]["held_out_loss"]["metis"]["settings"]
        assert settings["conversion"]["scheme"] == name
    assert "can be evaluated in only one precision" not in printed
    again, printed = evaluate(folder / "base", "--scheme", "nvfp4")
    assert "already finished; using results in" in printed
    assert again["base nvfp4"][0] == rows["base nvfp4"][0]


def test_conversion_is_that_of_get_metis_model(folder):
    config = MetisConfig(scheme="nvfp4", seed=3, exclude_modules=("down_proj",))
    (one,), control = choose_models([folder / "base"], [config])
    assert (one.scheme, control) == ("nvfp4", None)
    assert one.precisions("both") == one.precisions("scheme") == ("scheme",)
    ids = torch.arange(40)[None]
    found = logits(one.load("scheme", "auto", CPU), ids)
    assert torch.equal(found, logits(get_metis_model(make_model(), config), ids))


def test_trained_checkpoints_stay_as_they_are(folder):
    config = MetisConfig(scheme="nvfp4")
    for precision, rows in (
        ("scheme", ["nvfp4", "metis"]),
        ("dense", ["dense", "metis"]),
        ("both", ["dense", "nvfp4", "metis"]),
    ):
        found, _ = choose_models([folder / "base", folder / "run"], [config], precision=precision)
        assert [one.scheme for one in found] == rows
    with pytest.raises(
        ValueError, match=r"convert dense models, but none was given: run \(metis\)"
    ):
        choose_models([folder / "run"], [config])


def test_control_is_another_model(folder, evaluate):
    rows, _ = evaluate(folder / "run", "--control", folder / "base")
    (trained, difference), (dense, _) = rows["run metis"], rows["base dense"]
    assert difference == pytest.approx(trained - dense, abs=SIX_DIGITS)
    rows, _ = evaluate(folder / "run", folder / "base")  # the same without being told
    assert rows["run metis"][1] == pytest.approx(trained - dense, abs=SIX_DIGITS)
    # The control is not converted.
    rows, _ = evaluate(folder / "base", "--scheme", "nvfp4", "--control", folder / "other")
    assert set(rows) == {"base nvfp4", "other dense"}


def test_control_is_a_model_that_is_converted(folder, evaluate):
    rows, _ = evaluate(folder / "base", "--scheme", "nvfp4", "--control", folder / "base")
    (dense, none), (quantized, difference) = rows["base dense"], rows["base nvfp4"]
    assert none is None
    assert difference == pytest.approx(quantized - dense, abs=SIX_DIGITS)
    configs = [MetisConfig(scheme=name) for name in ("nvfp4", "metis")]
    for asked in (str(folder / "base"), "base"):
        found, control = choose_models([folder / "run", folder / "base"], configs, control=asked)
        assert [one.scheme for one in found] == ["dense", "metis", "nvfp4", "metis"]
        assert control == "base"
    found, control = choose_models([folder / "base"], configs, control="base metis")
    assert ([one.scheme for one in found], control) == (["nvfp4", "metis"], "base metis")


def test_control_is_known_before_anything_is_evaluated(folder, monkeypatch):
    monkeypatch.setattr(jobs, "evaluate_model", None)
    paths = [folder / "base", folder / "run"]
    assert choose_models(paths, control=str(folder / "base"))[1] == "base"
    assert choose_models(paths, control="run metis, dense", precision="both")[1]
    done = run(*paths, "--control", "nvfp4", "--tasks", "piqa", "--tasks-dir", DATA)
    assert isinstance(done.exception, ValueError)
    assert "control='nvfp4' is neither a row (base dense, run metis) nor" in str(done.exception)


def test_model_of_the_hub(folder, monkeypatch):
    asked = []

    def snapshot_download(name, **options):
        asked.append(name)
        if name != "maker/model":
            raise OSError("401 Client Error")
        return str(folder / "base")

    monkeypatch.setattr(model_source.huggingface_hub, "snapshot_download", snapshot_download)
    (one, other), control = choose_models([folder / "run", "maker/model"], control="maker/model")
    assert (other.label, other.scheme, other.path) == ("maker/model", "dense", folder / "base")
    assert control == "maker/model"
    (one,), _ = choose_models(["maker/model"], [MetisConfig(scheme="nvfp4")])
    assert (one.label, one.scheme) == ("maker/model", "nvfp4")
    with pytest.raises(FileNotFoundError, match=r"maker/none is not a directory, and the hub.*401"):
        choose_models(["maker/none"])
    asked.clear()
    with pytest.raises(FileNotFoundError, match="is not a directory; name a checkpoint"):
        choose_models([folder / "nowhere"])
    assert not asked  # an absolute path is no name of the hub


def test_config_file(folder, tmp_path):
    config = MetisConfig(scheme="nvidia", exclude_modules=("é",))
    file = tmp_path / "config.json"
    file.write_bytes(json.dumps(config.to_dict(), ensure_ascii=False).encode())
    assert read_conversions([], file) == (config,)
    assert read_conversions(["nvfp4"], file) == (config.replace(scheme="nvfp4"),)
    trained = read_conversions([], folder / "run/model/config.json")
    assert trained == (MetisConfig(scheme="metis"),)
    assert read_conversions([], None) == ()
    for content, message in (
        ('{"scheme": "nvfp4", "rnk": 3}', r"config.json: unknown key 'rnk'.* did you mean"),
        ("[]", "expected a JSON object"),
        ("{", "config.json is not a valid JSON file"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_conversions([], file)


def test_refusals(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="is missing; give a JSON file"):
        read_conversions([], tmp_path / "none.json")
    with pytest.raises(ValueError, match="scheme named twice: metis"):
        read_conversions(["metis", "metis"], None)
    done = run(folder / "base", "--scheme", "nvpf4", "--tasks", "piqa", "--tasks-dir", DATA)
    assert "did you mean 'nvfp4'" in str(done.exception)
