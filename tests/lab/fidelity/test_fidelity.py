"""One measurement of `metis-hf fidelity`: its numbers against plain ones, its files, its reuse."""

from __future__ import annotations

import collections
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import llama, mixtral

from lab.fidelity.measuring import gradients as plain_gradients
from lab.fidelity.measuring import load, settings, token_ids
from metis_hf import MetisConfig, get_metis_model, metis_layers, scheme_names
from metis_hf.lab.fidelity import gradients, layer_errors, predictions
from metis_hf.lab.fidelity.gradients import errors, mean_errors
from metis_hf.lab.fidelity.layer_errors import KINDS, only
from metis_hf.lab.fidelity.measurements import fidelity
from metis_hf.lab.fidelity.scheme_fidelity import narrow_table, table
from metis_hf.lab.fidelity.subject import converted
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.lab.store import DamagedRecord
from metis_hf.schemes import Role, build_scheme


class TestNumbers:
    @pytest.mark.slow
    def test_losses_and_divergence_are_those_of_two_plain_models(self, place, measured):
        exact = load(place).eval()
        scheme = get_metis_model(load(place), MetisConfig(scheme="nvfp4-rne")).eval()
        result = measured[1][0]
        batches = token_ids(place)[:8].split(2)
        assert len(result.batches) == 4
        for ids, found in zip(batches, result.batches):
            with torch.no_grad():
                p, q = (m(input_ids=ids).logits[:, :-1].flatten(0, 1) for m in (exact, scheme))
                loss = scheme(input_ids=ids, labels=ids).loss.item()
            assert found["loss"] == pytest.approx(loss, rel=1e-5)
            assert found["exact"] == pytest.approx(exact(input_ids=ids, labels=ids).loss.item())
            kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean()
            assert found["kl"] == pytest.approx(kl.item(), rel=1e-3)
            assert found["top1"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean())

    @pytest.mark.slow
    def test_divergence_in_training_is_that_of_a_model_that_trains(self, place, measured):
        exact = load(place).eval()
        scheme = get_metis_model(load(place), MetisConfig(scheme="metis-paper")).train()
        result = measured[1][2]
        assert len(result.training) == 4
        for ids, found in zip(token_ids(place)[:8].split(2), result.training):
            with torch.no_grad():
                p, q = (m(input_ids=ids).logits[:, :-1].flatten(0, 1) for m in (exact, scheme))
            kl = F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="batchmean")
            assert found["kl"] == pytest.approx(kl.item(), rel=1e-3)

    def test_gradients_are_those_of_two_plain_models(self, place, measured):
        rows = [plain_gradients(place, scheme) for scheme in ("bf16", "nvfp4-rne")]
        found = measured[1][0].gradients
        for a, b, error, cosine in zip(*rows, found["error"], found["cosine"], strict=True):
            assert error == pytest.approx(((b - a).norm() / a.norm()).item())
            assert cosine == pytest.approx(F.cosine_similarity(a, b, 0).item())
        a, b = (torch.stack(r).mean(0) for r in rows)
        assert found["mean"]["error"] == pytest.approx(((b - a).norm() / a.norm()).item())
        assert found["mean"]["cosine"] == pytest.approx(F.cosine_similarity(a, b, 0).item())

    def test_standard_errors(self):
        generator = np.random.default_rng(0)
        exact = generator.normal(size=(5, 40))
        both = np.concatenate([exact, exact + 0.3 * generator.normal(size=(5, 40))])
        products = both @ both.T

        def error(rows):
            a, b = both[rows].mean(0), both[rows + 5].mean(0)
            return np.linalg.norm(b - a) / np.linalg.norm(a)

        found = mean_errors(products)
        rows = np.arange(5)
        left_out = np.array([error(np.delete(rows, n)) for n in rows])
        assert found["error"] == pytest.approx(error(rows))
        assert found["error_se"] == pytest.approx(2 * left_out.std())  # sqrt((n - 1) var)
        assert errors(products)[0] == pytest.approx([error(rows[n : n + 1]) for n in rows])
        assert math.isnan(mean_errors(products[::5, ::5])["error_se"])

    def test_operands_and_products_of_a_layer(self, place, measured):
        """Of the first layer in the order of the model, from tensors that hooks of torch take."""
        model = load(place)
        name = "model.layers.0.self_attn.q_proj"
        layer, taken = model.get_submodule(name), {}
        layer.register_forward_hook(lambda m, args, y: taken.update(x=args[0], y=y))
        layer.register_full_backward_hook(lambda m, _, grad: taken.update(dy=grad[0]))
        ids = token_ids(place)[8:10]
        model(input_ids=ids, labels=ids).loss.backward()
        x = taken["x"].detach().requires_grad_()
        ours = get_metis_model(load(place), MetisConfig(scheme="nvfp4-rne")).get_submodule(name)
        y = ours.train()(x)
        y.backward(taken["dy"])
        found = measured[1][0].layers[name]

        def relative(a, b):
            return pytest.approx(((a - b).norm() / b.norm()).item(), rel=1e-4)

        order = [n for n, _ in metis_layers(get_metis_model(load(place), MetisConfig()))]
        assert list(measured[1][0].layers) == order
        assert found["y"] == relative(y, taken["y"])
        assert found["dw"] == relative(ours.weight.grad, layer.weight.grad)
        assert found["dx"] == relative(x.grad, taken["dy"] @ layer.weight)
        assert 15 < found["weight"] < 25  # about 20 dB: direct NVFP4 of a normal matrix

    def test_a_split_at_a_higher_rank_is_nearer(self, measured):
        _, (direct, metis, _, low) = measured
        assert low.name == "metis, rank 8"
        for better, worse in ((metis, low), (low, direct)):
            assert better.mean("kl").mean < worse.mean("kl").mean
            assert better.gradient("cosine").mean > worse.gradient("cosine").mean
        assert metis.cost > low.cost > direct.cost == 0

    def test_operands_of_one_kind(self, measured):
        direct = measured[1][0]
        kinds = direct.kinds
        assert list(kinds) == ["all", "input", "weight", "grad_output"]
        assert kinds["all"]["kl"] == direct.batches[0]["kl"]  # one batch of three
        assert kinds["all"]["gradient_error"] == direct.gradients["error"][0]
        for kind in ("input", "weight"):
            assert 0 < kinds[kind]["kl"] < kinds["all"]["kl"]
        assert "kl" not in kinds["grad_output"]
        for kind in KINDS:
            assert 0 < kinds[kind]["gradient_error"] < kinds["all"]["gradient_error"]

    def test_layers_alone(self, place, measured):
        found = measured[1][0].alone
        assert len(found["layers"]) == 7
        model = load(place)
        with converted(model, MetisConfig(scheme="nvfp4-rne")) as layers:
            assert found["layers"].keys() == layers.keys()
        name = "model.layers.0.mlp.down_proj"
        config = MetisConfig(scheme="nvfp4-rne", target_modules=name.replace(".", r"\."))
        ids = token_ids(place)[:2]
        with torch.no_grad():
            exact = load(place).eval()(input_ids=ids, labels=ids).loss.item()
            whole = get_metis_model(load(place), MetisConfig(scheme="nvfp4-rne")).eval()
            whole = whole(input_ids=ids, labels=ids).loss
            alone = get_metis_model(load(place), config).eval()(input_ids=ids, labels=ids).loss
        assert found["layers"][name]["loss"] == pytest.approx(
            100 * (alone.item() / exact - 1), abs=1e-4
        )
        assert found["whole"]["loss"] == pytest.approx(100 * (whole.item() / exact - 1), abs=1e-4)
        assert not measured[1][1].alone


class TestOnly:
    @pytest.mark.parametrize("kind", KINDS)
    def test_other_operands_are_exact(self, kind):
        """A split weight that is exact has no factors of its own to correct another along."""
        configs = [MetisConfig(scheme=scheme, rank=8) for scheme in scheme_names()]
        for config in (*configs, MetisConfig(scheme="metis", split_weight=True, rank=8)):
            model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False))
            layer = get_metis_model(model, config)[0].train()
            whole, part = layer.scheme, only(layer.scheme, kind)
            assert part.corrected <= whole.corrected, config.scheme
            layer.scheme, layer.eval_scheme = part, part.deterministic()
            x = torch.randn(48, 64, requires_grad=True)
            y = layer(x)
            exact = F.linear(x, layer.weight_form.dense(layer.weight_params()))
            error = ((y - exact).norm() / exact.norm()).item()
            rounds = part.resolve(Role.FPROP_INPUT)[1], part.resolve(Role.FPROP_WEIGHT)[1]
            quantized = kind != "grad_output" and any(r.quantizer for r in rounds)
            rounded = error > (1e-5 if config.scheme == "bf16-split" else 1e-3)
            assert rounded == quantized, config.scheme
            y.square().sum().backward()
            assert x.grad.isfinite().all(), config.scheme

    def test_corrections_follow_the_split_of_the_exact_operand(self):
        """Of metis: an input that alone is quantized is corrected along the exact weight."""
        config = MetisConfig(rank=16, decompose=("weight", "activation", "gradient"))
        scheme = build_scheme(config, 128, 96)
        torch.manual_seed(0)
        x = torch.randn(64, 128)
        w = torch.randn(96, 4) @ torch.randn(4, 128)  # of rank 4: all of it is corrected
        model = get_metis_model(torch.nn.Sequential(torch.nn.Linear(128, 96)), config)
        layer = model[0]
        layer.weight.data.copy_(w)
        layer.bias.data.zero_()
        errors_ = []
        for corrected in (frozenset(), scheme.corrected):
            part = only(scheme, "input")
            layer.scheme = replace(part, corrected=part.corrected & corrected)
            y = layer.train()(x)
            errors_.append(((y - x @ w.T).norm() / (x @ w.T).norm()).item())
        assert errors_[1] < 0.2 * errors_[0]


class TestConverted:
    def test_the_model_has_its_own_weights_again(self, place):
        model, before = load(place), dict(load(place).named_parameters())
        for scheme in ("metis", "metis-paper", "omniquant", "smoothquant"):
            with converted(model, MetisConfig(scheme=scheme)) as layers:
                assert len(layers) == 7
            after = dict(model.named_parameters())
            assert after.keys() == before.keys()
            for name, parameter in before.items():
                assert torch.equal(after[name], parameter), (scheme, name)
                assert after[name].requires_grad
            assert not hasattr(model.config, "quantization_config")

    def test_experts(self):
        model = mixtral(2)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        with converted(model, MetisConfig(scheme="metis-paper")):
            pass
        assert all(torch.equal(before[n], p) for n, p in model.named_parameters())

    def test_a_converted_model_is_refused_and_stays_as_it_is(self, place):
        model = get_metis_model(load(place), MetisConfig(rank=8, split_weight=True))
        before = dict(metis_layers(model))
        with (
            pytest.raises(ValueError, match=r"already converted.*call to_dense\(model\) first"),
            converted(model, MetisConfig(scheme="nvfp4")),
        ):
            pass
        assert dict(metis_layers(model)) == before
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_layer_that_the_model_only_reads_is_named(caplog):
    class ReadsHead(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels):
            hidden = self.model(input_ids).last_hidden_state
            logits = F.linear(hidden, self.lm_head.weight)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return transformers.modeling_outputs.CausalLMOutput(loss=loss)

    model = get_metis_model(
        ReadsHead(llama(1).config),
        MetisConfig(scheme="nvfp4", target_modules=["lm_head", "q_proj"]),
    )
    layers = dict(metis_layers(model))
    weights = {name: layer.weight for name, layer in layers.items()}
    found = layer_errors.layer_errors(model, layers, weights, torch.arange(32)[None])
    assert set(layers) - set(found) == {"lm_head"}
    assert "fidelity has no errors of lm_head: no token reached them." in caplog.text


@pytest.mark.slow
def test_divergence_in_training_is_shown_where_it_differs(measured):
    """It differs where the forward pass rounds with noise."""
    direct, _, random, _ = measured[1]
    assert random.training
    assert not direct.training
    header, (row, other) = table([random, direct])
    place = header.index("KL in training")
    assert row[place] == random.kl_in_training.text(".4f") != row[place - 1]
    assert header[place - 1] == "KL (nats)"
    assert other[place] == other[place - 1]
    assert "KL in training" not in table([direct])[0]
    assert "KL in training" in narrow_table([random])[0]


@pytest.mark.usefixtures("no_pictures")
class TestFiles:
    def test_what_is_written(self, measured):
        out, results = measured
        assert sorted(path.name for path in out.iterdir() if path.name != ".lock") == [
            "cost.png", "index.html", "measured", "results.json", "table.md"
        ]  # fmt: skip
        record = json.loads((out / "results.json").read_text())
        assert [scheme["name"] for scheme in record["schemes"]] == [r.name for r in results]
        assert record["missing"] == 0
        table = (out / "table.md").read_text()
        for result in results:
            assert f"| {result.name} | {result.mean('kl').text('.4f')} |" in table
        page = (out / "index.html").read_text()
        assert "Layers under metis" in page
        assert "Not complete" not in page

    def test_nothing_is_measured_twice(self, place, measured, monkeypatch):
        """And progress counts it as done."""
        out, results = measured
        counts = collections.Counter()

        def fail(*args, **kwargs):
            raise AssertionError("measured again")

        def advance(_bars, name, *, reused=False):
            counts[name, reused] += 1

        monkeypatch.setattr(TaskProgress, "advance", advance)
        monkeypatch.setattr(predictions, "predictions", fail)
        monkeypatch.setattr(gradients, "run_batches", fail)
        monkeypatch.setattr(layer_errors, "layer_errors", fail)
        chosen = ("nvfp4-rne", "metis", "metis-paper")
        again = fidelity(settings(place, schemes=chosen, ranks=(8,)), out)
        assert [r.rise.mean for r in again] == [r.rise.mean for r in results]
        assert counts == {
            ("loss", True): len(results) * (4 + 2),  # four batches, two kinds on one of them
            ("gradients", True): len(results) * (2 + 3),
            ("operands", True): len(results),
            ("each layer", True): 7 + 1,
        }

    def test_other_settings_cost_no_measurement(self, place, measured, tmp_path, monkeypatch):
        """Those before are there again when their command is."""
        out, results = measured
        shutil.copytree(out, tmp_path / "out")
        options = settings(place, schemes=("nvfp4-rne",), alone=(), batch=3)
        (other,) = fidelity(options, tmp_path / "out")
        assert other.batches != results[0].batches
        self.test_nothing_is_measured_twice(place, (tmp_path / "out", results), monkeypatch)

    def test_a_damaged_part_is_named_with_a_way_out(self, place, measured, tmp_path):
        shutil.copytree(measured[0], tmp_path / "out")
        (part,) = (tmp_path / "out" / "measured" / "nvfp4-rne").glob("loss*")
        part.write_text(part.read_text()[:-20])
        with pytest.raises(DamagedRecord, match=rf"{part} is not a valid JSON file.*; delete it"):
            fidelity(settings(place, schemes=("nvfp4-rne",), alone=()), tmp_path / "out")
        part.unlink()
        (again,) = fidelity(settings(place, schemes=("nvfp4-rne",), alone=()), tmp_path / "out")
        assert again.batches == measured[1][0].batches

    def test_another_step_has_another_cost(self, place, measured, tmp_path):
        out, (_, metis, *_) = measured
        shutil.copytree(out, tmp_path / "out")
        options = settings(place, schemes=("metis",), alone=(), tokens_per_step=512)
        (again,) = fidelity(options, tmp_path / "out")
        assert again.batches == metis.batches
        assert again.cost > metis.cost

    @pytest.mark.slow
    def test_an_interrupted_measurement_goes_on(self, place, measured, tmp_path, monkeypatch):
        chosen, calls = ("nvfp4-rne", "metis"), []
        real = layer_errors.layer_errors

        def interrupted(*args):
            calls.append(args)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(layer_errors, "layer_errors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fidelity(settings(place, schemes=chosen, alone=()), tmp_path)
        assert "Not complete: 1 schemes" in (tmp_path / "index.html").read_text()
        assert not (tmp_path / "gradients").exists()
        results = fidelity(settings(place, schemes=chosen, alone=()), tmp_path)
        assert len(calls) == 3
        for mine, whole in zip(results, measured[1]):
            assert mine.batches == whole.batches
            assert mine.gradients == whole.gradients

    def test_a_converted_checkpoint_counts_in_its_dense_weights(self, place, measured, tmp_path):
        get_metis_model(load(place), MetisConfig(scheme="nvidia")).save_pretrained(tmp_path / "m")
        tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
        tokenizer.save_pretrained(tmp_path / "m")
        options = replace(
            settings(place, schemes=("nvfp4-rne",), alone=()), model=str(tmp_path / "m")
        )
        (result,) = fidelity(options, tmp_path / "out")
        assert result.batches == measured[1][0].batches
