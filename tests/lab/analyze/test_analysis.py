"""The analysis of whole checkpoints: streaming, capture, files, page, command line, errors."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
import weakref

import numpy as np
import pytest
import torch
import transformers
from conftest import VOCAB, bert, gpt2, llama, mixtral
from typer.testing import CliRunner

from lab.analyze.analyzed import save_llama
from metis_hf import MetisConfig, get_metis_model, metis_layers
from metis_hf.cli.main import app
from metis_hf.lab.analyze import analyze, capture
from metis_hf.lab.analyze import spectrum_figures as figures
from metis_hf.lab.analyze.analysis import KINDS
from metis_hf.lab.analyze.distortion import Quantizers
from metis_hf.lab.analyze.stored_weights import WeightSource, last_ffn, portrait_layers
from metis_hf.layers.gemm import GemmPlan
from metis_hf.schemes import Role
from metis_hf.schemes.noise_keys import CallKeys


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama with a tokenizer and a text; and the same with weights that Metis stores split."""
    folder = tmp_path_factory.mktemp("models")
    model = save_llama(folder / "plain", folder / "text.py")
    split = MetisConfig(scheme="metis", split_weight=True, rank=16)
    shutil.copytree(folder / "plain", folder / "metis")
    get_metis_model(model, split).save_pretrained(folder / "metis")
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Saving a figure is nine tenths of the time; a slow test looks at real ones."""
    monkeypatch.setattr(figures, "as_png", lambda figure, title: b"")


def analyzed(checkpoint, out):
    result = analyze(
        [checkpoint / "metis", checkpoint / "plain"],
        out,
        text=checkpoint / "text.py",
        control=checkpoint / "plain",
        sequences=24,
        length=16,
        layers="mlp.down",
    )
    return result, out


@pytest.fixture(scope="module")
def analysis(checkpoint):
    """(result, directory) of an analysis whose figures are not drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "as_png", lambda figure, title: b"")
        return analyzed(checkpoint, checkpoint / "out")


@pytest.mark.parametrize(("build", "shard"), [(llama, "5GB"), (gpt2, "100KB")])
def test_streamed_weights_are_the_models(build, shard, tmp_path):
    model = build()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard != "5GB")
    source = WeightSource(tmp_path)
    linears = [
        name for name, layer in metis_layers(get_metis_model(model, MetisConfig(scheme="nvfp4")))
    ]
    assert source.names == linears  # those that conversion takes, in the model's order
    for name, layer in metis_layers(model):
        weight = layer.weight_params()[0]
        assert torch.equal(source.load(name).weight, weight)
        assert source.shape(name) == tuple(weight.shape)


def test_split_weights_are_what_they_represent(tmp_path):
    for scheme in ("metis", "metis-paper", "bf16-split"):
        model = get_metis_model(llama(1), MetisConfig(scheme=scheme, split_weight=True))
        with torch.no_grad():
            for _, layer in metis_layers(model):
                layer.s.mul_(1.5)  # as training would: no longer the plain decomposition
        model.save_pretrained(tmp_path / scheme)
        source = WeightSource(tmp_path / scheme)
        for name, layer in metis_layers(model):
            stored = source.load(name)
            assert torch.equal(stored.weight, layer.weight)
            assert torch.equal(stored.residual, layer.weight_residual)
            assert stored.scheme == scheme


def test_experts_are_read_one_by_one(tmp_path):
    mixtral(3).save_pretrained(tmp_path)
    source = WeightSource(tmp_path)
    experts = [name for name in source.names if "experts" in name]
    assert len(experts) in (6, 9)  # fused, or w1, w2 and w3 apart
    assert not any(name.endswith(("gate", "lm_head", "embed_tokens")) for name in source.names)
    assert all(min(source.load(name).weight.shape) >= 32 for name in experts)


@pytest.mark.slow
def test_weights_are_never_all_in_memory(undrawn, checkpoint, tmp_path, monkeypatch):
    """When a layer is read, at most one earlier layer and its control are alive."""
    alive: list[weakref.ref] = []
    peaks = []
    load = WeightSource.load

    def watched(self, name):
        living = [ref() for ref in alive if ref() is not None]
        peaks.append(sum(tensor.numel() for tensor in living))
        stored = load(self, name)
        alive.extend(map(weakref.ref, (stored.weight, *(stored.parts or ()))))
        return stored

    monkeypatch.setattr(WeightSource, "load", watched)
    analyze([checkpoint / "metis"], tmp_path, control=checkpoint / "plain")
    source = WeightSource(checkpoint / "metis")
    sizes = [int(np.prod(source.shape(name))) for name in source.names]
    assert len(peaks) > len(sizes)
    assert max(peaks) <= (1 + 1.5 + 1) * max(sizes)  # with factors and residual; the control
    assert max(peaks) < sum(sizes) / 2


@pytest.mark.parametrize("split", [True, False])
def test_quantized_weight_is_what_the_layer_multiplies(split, checkpoint, tmp_path):
    path = checkpoint / "metis"
    if not split:
        path = tmp_path
        get_metis_model(llama(), MetisConfig()).save_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).train()
    name, layer = next(metis_layers(model))
    stored = WeightSource(path).load(name)
    quantizers = Quantizers(name, tuple(stored.weight.shape))
    quantized = quantizers.weight(stored, "metis")
    found = quantized.values
    params = [param.detach() for param in layer.weight_params()]
    keys = CallKeys(layer.noise_key(), params[-1], params[-1])
    plan = GemmPlan(layer.scheme, layer.weight_form, torch.float32, keys)
    w_hat = plan.weight_operand(Role.FPROP_WEIGHT, params)
    assert torch.equal(found, w_hat.values)
    if not split:
        lost = (w_hat.values == 0) & (params[0] != 0)
        assert quantized.zeroed == pytest.approx(float(lost.sum() / (params[0] != 0).sum()))


def test_captured_rows_are_the_layers_inputs_and_gradients():
    model = llama().eval()
    name = "model.layers.1.mlp.down_proj"
    layer = model.get_submodule(name)
    ids = torch.randint(0, VOCAB, (12, 10), generator=torch.Generator().manual_seed(3))
    expected = []
    for batch in ids.split(capture.MICRO_BATCH):
        seen = {}
        handle = layer.register_forward_hook(
            lambda m, args, out, seen=seen: seen.update(x=args[0], y=out)
        )
        loss = model(input_ids=batch, labels=batch).loss
        handle.remove()
        (grad,) = torch.autograd.grad(loss, seen["y"])
        # Each token counts alike, in the last micro-batch of four sequences too.
        grad = grad * len(batch) / capture.MICRO_BATCH
        expected.append((seen["x"].detach().flatten(0, 1), grad.flatten(0, 1)))
    measured = []
    hooks = capture.Capture({name}, lambda n, kind, x: measured.append((n, kind, len(x))))
    model.requires_grad_(False)
    hooks.run(model, ids, [name, "model.layers.0.mlp.up_proj", "no.such.layer"])
    for kind, part in (("activation", 0), ("gradient", 1)):
        rows = hooks.rows(name, kind)
        assert torch.allclose(rows, torch.cat([pair[part] for pair in expected]), atol=1e-8)
        assert hooks.rows(name, kind) is None  # let go
    # Each layer once per kind, on the first micro-batch.
    assert sorted(measured) == sorted(
        (layer, kind, 80)
        for layer in (name, "model.layers.0.mlp.up_proj")
        for kind in ("activation", "gradient")
    )
    assert not layer._forward_hooks


@pytest.mark.slow
def test_every_figure_and_layer_is_on_the_page(checkpoint, tmp_path):
    result, out = analyzed(checkpoint, tmp_path)
    page = (out / "index.html").read_text()
    pictures = sorted(path.stem for path in (out / "figures").glob("*.png"))
    assert pictures == sorted(path.stem for path in (out / "figures").glob("*.json"))
    per_layer = {f"{name}.{layer}" for name, *_ in figures.PORTRAIT for layer in result.portraits}
    shared = {"risk", "all-spectra", "universality", "residual-spectra"}
    assert set(pictures) == per_layer | shared
    assert page.count("data:image/png;base64,") == len(pictures)
    assert len(result.portraits) == 2
    assert next(iter(result.portraits)) == "model.layers.1.mlp.down_proj"
    for layer, line in result.lines.items():
        assert page.count(f">{layer}</td>") == len(line) == 3
    assert "http://" not in page
    assert "https://" not in page
    for name in pictures:
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        json.loads((out / "figures" / f"{name}.json").read_text())


def test_the_page_begins_with_a_finding_and_opens_one_layer(analysis):
    result, out = analysis
    page = html.unescape((out / "index.html").read_text())
    riskiest = result.by_risk()[0]
    finding = f"may replace {result.risk(riskiest):.0%} of the singular directions of block"
    assert page.index(finding) < page.index('class="card"')
    assert f"the riskiest of {len(result.lines)} layers (median" in page
    folded = re.findall(r'<details id="\w+"><summary><h2>(.*?)</h2></summary>\s*<p>(.*?)</p>', page)
    opened = max(result.portraits, key=result.risk)
    assert {layer for _, layer in folded} == set(result.portraits) - {opened}
    assert page.index(f"<p>{opened}</p>") < page.index("<details")
    assert page.count("</details>") == len(folded)


def test_data_of_figures(analysis):
    result, out = analysis
    name = next(iter(result.portraits))
    data = json.loads((out / "figures" / f"spectra.{name}.json").read_text())
    source = WeightSource(result.model)
    sigma = torch.linalg.svdvals(source.load(name).weight)
    assert np.allclose(data["weight"]["spectrum"]["sigma"], sigma, rtol=1e-4)
    assert set(data) == set(KINDS)
    alignment = json.loads((out / "figures" / f"alignment.{name}.json").read_text())
    assert set(alignment) == {"activation", "gradient"} | {"weight"}
    assert "alignment" not in alignment["weight"]
    curves = json.loads((out / "figures" / "residual-spectra.json").read_text())[name]
    residual = torch.linalg.svdvals(source.load(name).residual)
    assert np.allclose(curves["Metis: residual"]["sigma"], residual, rtol=1e-4, atol=1e-6)
    assert len(curves["control: weight without its top 16"]["sigma"]) == 48


def test_layers_are_sorted_by_risk(analysis):
    result, out = analysis
    with (out / "layers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(result.lines)
    risks = [float(row["risk"]) for row in rows]
    assert risks == sorted(risks, reverse=True)
    assert max(risks) > 0
    by_layer = {name: [r for r in rows if r["layer"] == name] for name in result.lines}
    for name, lines in by_layer.items():
        worst = max(float(line["nvfp4_swamped"]) for line in lines)
        assert result.risk(name) == pytest.approx(worst)


@pytest.mark.slow
def test_it_repeats_itself(undrawn, checkpoint, analysis, tmp_path):
    result, _ = analysis
    again = analyze(
        [checkpoint / "metis"], tmp_path, text=checkpoint / "text.py", sequences=24, length=16,
        layers="1.mlp.down",
    )  # fmt: skip
    assert set(again.lines) == {"model.layers.1.mlp.down_proj"}
    for name, line in again.lines.items():
        assert line == result.lines[name]


def test_zero_and_broken_weights_are_flagged(undrawn, checkpoint, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint / "plain")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
        model.model.layers[0].mlp.up_proj.weight.zero_()
    model.save_pretrained(tmp_path / "model")
    result = analyze([tmp_path / "model"], tmp_path / "out", layers="1.mlp.down|0.mlp.up")
    assert result.lines["model.layers.1.mlp.down_proj"]["weight"]["note"].startswith("NaN")
    assert result.lines["model.layers.0.mlp.up_proj"]["weight"]["note"] == "all zero"
    page = (tmp_path / "out" / "index.html").read_text()
    assert "NaN or infinite elements" in page
    assert "all zero" in page


def test_portraits_of_known_architectures():
    llamas = [
        f"model.layers.{i}.{m}" for i in range(3) for m in ("self_attn.k_proj", "mlp.down_proj")
    ]
    assert portrait_layers(llamas) == [
        "model.layers.2.mlp.down_proj", "model.layers.0.mlp.down_proj",
        "model.layers.2.self_attn.k_proj", "model.layers.0.self_attn.k_proj",
    ]  # fmt: skip
    bert = [f"encoder.layer.{i}.{m}" for i in range(2)
            for m in ("attention.self.key", "attention.output.dense", "output.dense")]  # fmt: skip
    assert last_ffn(bert) == "encoder.layer.1.output.dense"
    gpt = [
        f"transformer.h.{i}.{m}"
        for i in range(2)
        for m in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")
    ]
    assert last_ffn(gpt) == "transformer.h.1.mlp.c_proj"
    assert portrait_layers(["a", "b"]) == ["b", "a"]


def _fails(kind, message, checkpoint, out, **kwargs):
    with pytest.raises(kind, match=message):
        analyze([checkpoint], out, **kwargs)
    assert not (out / "index.html").exists()


def test_errors_say_what_is_needed(checkpoint, tmp_path):
    plain, out = checkpoint / "plain", tmp_path / "out"
    text = checkpoint / "text.py"
    (tmp_path / "short.txt").write_text("def f(x):")
    _fails(ValueError, r"has \d tokens, but at least 128", plain, out,
           text=tmp_path / "short.txt")  # fmt: skip
    _fails(ValueError, "matches none of the 14 layers", plain, out, layers="nothing")
    _fails(ValueError, "not a valid regular expression", plain, out, layers="(")
    _fails(ValueError, "choose at least 1", plain, out, rank=0)
    _fails(FileNotFoundError, "missing.txt", plain, out, text=tmp_path / "missing.txt")
    _fails(FileNotFoundError, "no config.json", tmp_path, out)
    _fails(FileNotFoundError, "is not a directory, and config.json", "nobody/nothing", out)
    gpt2().save_pretrained(tmp_path / "gpt2")
    _fails(FileNotFoundError, "no tokenizer .*omit the text", tmp_path / "gpt2", out, text=text)
    _fails(ValueError, "the control .* has no layer", plain, out, control=tmp_path / "gpt2")
    shutil.copytree(plain, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    _fails(FileNotFoundError, "neither model.safetensors nor", tmp_path / "bare", out)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    _fails(ValueError, "quantized by 'gptq'", tmp_path / "bare", out)


def test_missing_shard_is_named(tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=lost.name):
        WeightSource(tmp_path)


def test_a_model_without_loss_gives_activations_only(undrawn, checkpoint, tmp_path):
    bert(vocab_size=300).save_pretrained(tmp_path / "bert")
    for path in (checkpoint / "plain").glob("tokenizer*"):
        shutil.copy(path, tmp_path / "bert")
    result = analyze([tmp_path / "bert"], tmp_path / "out", text=checkpoint / "text.py",
                     sequences=8, length=16, layers="output.dense")  # fmt: skip
    assert any("no gradients" in note for note in result.notes)
    kinds = {kind for line in result.lines.values() for kind in line}
    assert kinds == {"weight", "activation"}


def test_command_line(undrawn, checkpoint, tmp_path):
    arguments = [str(checkpoint / "plain"), "--out", str(tmp_path / "out"), "--layers", "down"]
    found = CliRunner().invoke(app, ["analyze", *arguments])
    assert found.exit_code == 0, found.output
    assert str(tmp_path / "out" / "index.html") in found.output
    page = (tmp_path / "out" / "index.html").read_text()
    assert "no text was given" in page
    failed = CliRunner().invoke(app, ["analyze", *arguments, "--text", str(tmp_path / "none")])
    assert isinstance(failed.exception, FileNotFoundError)
