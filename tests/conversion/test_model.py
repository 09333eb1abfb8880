"""Conversion of real transformers models: what is converted, saved, loaded and turned back."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import llama
from forked import python
from tensors import logits

from metis_hf import (
    MetisConfig,
    QuantLinear,
    get_metis_model,
    metis_layers,
    to_dense,
)
from metis_hf.training.refresh import refresh_layer


@pytest.mark.slow
def test_a_plain_install_cannot_mistake_a_split_checkpoint(tmp_path):
    """Without metis_hf, loading reports missing weights instead of a plausible wrong model."""
    get_metis_model(llama(), MetisConfig(split_weight=True)).save_pretrained(tmp_path)
    code = (
        "import transformers, sys\n"
        f"_, info = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, "
        "output_loading_info=True)\n"
        "assert 'metis_hf' not in sys.modules\n"
        "print(len(info['missing_keys']))\n"
    )
    assert int(python("-c", code).split()[-1]) == 14


def test_dense_checkpoint_with_quantization_config(token_ids, tmp_path):
    """from_pretrained(dense, quantization_config=...) equals converting after loading."""
    model = llama()
    model.save_pretrained(tmp_path)
    config = MetisConfig(seed=3)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert torch.equal(logits(loaded, token_ids), logits(get_metis_model(model, config), token_ids))
    assert not any(module.training for module in loaded.modules())


def test_padding_is_never_sampled(monkeypatch):
    """The attention mask reaches the layers: what stands in masked rows cannot matter to v."""
    from metis_hf.operands.conditioners import spectral

    seen, weights = [], []
    original = spectral.find_basis

    def spy(x, rank, *, row_mask=None, **options):
        (seen if len(x) == 2 * 40 else weights).append(row_mask)
        return original(x, rank, row_mask=row_mask, **options)

    config = MetisConfig(decompose=("weight", "activation", "gradient"))
    model = get_metis_model(llama(), config)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 25:] = 0
    ids = torch.randint(0, 256, (2, 40))
    monkeypatch.setattr(spectral, "find_basis", spy)
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert seen
    assert weights
    assert all(m is None for m in weights)
    assert all(torch.equal(m, mask.reshape(-1).bool()) for m in seen)


def test_refresh_keeps_the_represented_weight():
    model = get_metis_model(llama(), MetisConfig(split_weight=True))
    layer = next(layer for _, layer in metis_layers(model))
    with torch.no_grad():
        layer.u.mul_(1 + 0.1 * torch.randn_like(layer.u))
    before, pointers = layer.weight.clone(), [p.data_ptr() for p in layer.weight_params()]
    assert refresh_layer(layer) < 1e-6
    torch.testing.assert_close(layer.weight, before, rtol=0, atol=1e-6)
    for basis in layer.weight_form.orthonormal(layer.weight_params()):
        gram = basis @ basis.T if basis.shape[0] == layer.rank else basis.T @ basis
        torch.testing.assert_close(gram, torch.eye(layer.rank), rtol=0, atol=1e-5)
    assert pointers == [p.data_ptr() for p in layer.weight_params()]


class TestErrors:
    def test_tied_inner_layers(self):
        model = llama()
        a, b = (model.model.layers[i].mlp.up_proj for i in (0, 1))
        b.weight = a.weight
        get_metis_model(model, MetisConfig())
        assert "weight tied to" in model.metis_report.skipped["model.layers.0.mlp.up_proj"]

    def test_to_dense_of_a_plain_model(self):
        with pytest.raises(ValueError, match="no Metis layer"):
            to_dense(llama())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"scheme": "house-scheme"}, "'house-scheme' is not registered"),
            ({"rank_fraction": 1}, "unknown key 'rank_fraction'"),
        ],
    )
    def test_checkpoint_of_another_config(self, changes, message, tmp_path):
        get_metis_model(llama(1), MetisConfig()).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"].update(changes)
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_two_configs_in_one_process(token_ids):
    """No process-global numerics: converting one model changes nothing of another."""
    first = get_metis_model(llama(), MetisConfig(scheme="nvfp4"))
    expected = logits(first, token_ids)
    second = get_metis_model(llama(), MetisConfig(scheme="metis", seed=9))
    logits(second, token_ids)
    assert torch.equal(logits(first, token_ids), expected)
    assert isinstance(next(metis_layers(first))[1], QuantLinear)
    assert next(metis_layers(second))[1].scheme.splits


def test_frozen_split_weights_are_frozen_dense_ones():
    model = get_metis_model(llama(), MetisConfig(split_weight=True))
    layers = dict(metis_layers(model))
    frozen = next(name for name in layers if name.endswith("up_proj"))
    layers[frozen].requires_grad_(False)
    to_dense(model)
    for name in layers:
        assert model.get_submodule(name).weight.requires_grad == (name != frozen), name
