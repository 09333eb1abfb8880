"""Model cards of checkpoints and exports, and pushing to the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import llama
from huggingface_hub import ModelCard

from deploy.checkpoints import checkpoint, mixtral
from metis_hf import (
    MetisConfig,
    get_metis_model,
    set_precision,
)
from metis_hf.deploy import export_checkpoint
from metis_hf.deploy.model_card import model_card, write_model_card


class TestModelCard:
    @pytest.mark.slow
    def test_of_a_trained_checkpoint(self, tmp_path):
        model = get_metis_model(llama(), MetisConfig(rank=8, seed=5))
        model.save_pretrained(tmp_path / "run")
        results = tmp_path / "results.json"
        results.write_text('{"piqa": {"acc,none": 0.625, "alias": "piqa"}, "loss": 3.25}')
        path = write_model_card(model, tmp_path / "run", results=results)
        card = ModelCard.load(path)
        assert card.data.library_name == "transformers"
        assert card.data.pipeline_tag == "text-generation"
        assert {"metis", "fp4-training", "nvfp4", "scheme:metis"} == set(card.data.tags)
        assert card.data.license is None
        assert "| rank | **`8`** |" in card.text
        assert "| n_iter | `2` |" in card.text
        assert "14 layers converted" in card.text
        assert "| piqa / acc | 0.625 |\n| loss | 3.25 |" in card.text
        code = card.text.split("```python\n")[1].split("```")[0]
        assert code.startswith("import metis_hf")
        out = subprocess.run(
            [sys.executable, "-c", code + "print(type(model.lm_head).__name__)"],
            capture_output=True, text=True, check=True, cwd=tmp_path,
        )  # fmt: skip
        assert out.stdout.strip() == "Linear"

    def test_options_that_configs_leave_out_by_default(self):
        for name, value in (
            ("format", "nvint4"), ("attention", "nvfp4-rne"), ("gradient_rank_frac", 0.5),
            ("backend", "auto"), ("outer_scale", "token"),
        ):  # fmt: skip
            model = get_metis_model(llama(1), MetisConfig(rank=8, **{name: value}))
            line = f"| {name} | **`{json.dumps(value)}`** |"
            assert line in model_card(model, name="run").text

    @pytest.mark.parametrize("kind", ["dense", "compressed-tensors", "side-file"])
    def test_of_an_export(self, kind, tmp_path, monkeypatch):
        """The card's own lines load the directory."""
        if kind == "compressed-tensors":
            pytest.importorskip("compressed_tensors")
        format = "compressed-tensors" if kind == "side-file" else kind
        low_rank = "side-file" if kind == "side-file" else "fold"
        split = ["weight", "activation", "gradient"] if kind == "side-file" else None
        source = checkpoint(tmp_path / "metis", decompose=split)
        report = export_checkpoint(source, tmp_path / "out", format=format, low_rank=low_rank)
        card = ModelCard.load(tmp_path / "out/README.md")
        assert f"{report.rows[0].mean_error:.2e}" in card.text
        code = card.text.split("```python\n")[1].split("```")[0]
        assert ("metis_hf" in code) == (kind == "side-file")
        monkeypatch.chdir(tmp_path)
        scope: dict = {}
        exec(code, scope)
        assert isinstance(scope["model"], transformers.LlamaForCausalLM)

    @pytest.mark.parametrize(
        ("config", "precision", "tags"),
        [
            ({"scheme": "nvfp4"}, "in emulated W4A4G4 (nvfp4).", ["fp4-training", "nvfp4"]),
            ({"scheme": "bf16"}, "in high precision.", []),
            # These may be calibrated alone.
            ({"scheme": "w4a16"}, "in emulated W4A16 (nvfp4).", ["nvfp4"]),
            ({"scheme": "w4a4"}, "in emulated W4A4 (nvfp4).", ["nvfp4"]),
            (
                {"scheme": "nvfp4", "format": "mxfp8-e4m3"},
                "in emulated W8A8G8 (mxfp8-e4m3).",
                ["mxfp8-e4m3"],
            ),
            (
                {"scheme": "nvfp4", "high_precision": ("forward",)},
                "in emulated W16A16G4 (nvfp4).",
                ["fp4-training", "nvfp4"],
            ),
            (
                {"scheme": "nvfp4", "scheme_pattern": {"k_proj": "bf16"}},
                "in emulated W4A4G4 (nvfp4) in 6 layers, high precision in 1 layers.",
                ["fp4-training", "nvfp4"],
            ),
        ],
        ids=str,
    )
    def test_bits_and_formats_are_those_of_the_layers(self, config, precision, tags):
        card = model_card(get_metis_model(llama(1), MetisConfig(**config)))
        assert precision in card.text
        assert set(card.data.tags) == {"metis", f"scheme:{config['scheme']}", *tags}

    @pytest.mark.slow
    def test_dense_weights_load_without_the_import(self, tmp_path):
        model = get_metis_model(llama(1), MetisConfig(scheme="metis"))
        model.save_pretrained(tmp_path)
        words = "without the import, transformers warns, and loads the weights into a plain model"
        assert words in model_card(model).text
        code = (
            "import sys, transformers as t\n"
            f"_, info = t.LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, "
            "output_loading_info=True)\n"
            "print(len(info['missing_keys']), 'metis_hf' in sys.modules)"
        )
        found = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert found.stdout.split() == ["0", "False"]

    @pytest.mark.parametrize(("build", "split"), [(llama, True), (mixtral, False)])
    def test_split_weights_and_experts_do_not(self, build, split):
        model = get_metis_model(build(), MetisConfig(scheme="nvfp4", split_weight=split))
        words = "without the import, transformers reports missing weights"
        assert words in model_card(model).text

    def test_after_a_change_of_schemes(self):
        model = get_metis_model(llama(1), MetisConfig(scheme="nvfp4"))
        set_precision(model, scheme="metis", attention="nvidia")
        changed, expected = model_card(model).text, MetisConfig(scheme="metis", attention="nvidia")
        assert "scheme metis: 7 layers converted" in changed
        assert "scheme nvfp4" not in changed
        # The same block as of a model that was converted so.
        (block, other) = (
            text.split("```text\n")[1].split("```")[0]
            for text in (changed, model_card(get_metis_model(llama(1), expected)).text)
        )
        assert block == other

    def test_tied_weights_count_once(self, tmp_path):
        """Also of a checkpoint, whose layers are converted before its weights are tied."""
        model = llama(tie_word_embeddings=True)
        total = sum(param.numel() for param in model.parameters())
        get_metis_model(model, MetisConfig(split_weight=True)).save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        for each in (model, loaded):
            text = model_card(each).text
            assert f" of {total:,} params" in text
            assert "kept in high precision (weight tied to model.embed_tokens): lm_head" in text
            assert "split reproduces" not in text

    def test_refuses_a_plain_model(self):
        with pytest.raises(ValueError, match="no Metis config"):
            model_card(llama())
        with pytest.raises(ValueError, match="kind='gguf'"):
            model_card(get_metis_model(llama()), kind="gguf")


def test_push_to_hub_up_to_the_network_call(tmp_path, monkeypatch):
    """A converted model uploads what any model does; the card carries its tags."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    uploaded = {}

    def create_repo(self, repo_id, **kwargs):
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self, repo_id, operations, **kwargs):
        for operation in operations:
            uploaded[operation.path_in_repo] = Path(operation.path_or_fileobj).read_bytes()
        uploaded["repo_id"] = repo_id

    def no_card(*args, **kwargs):
        raise EntryNotFoundError("no README.md")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    monkeypatch.setattr(ModelCard, "load", no_card)
    model = get_metis_model(llama(), MetisConfig(rank=8))
    model.push_to_hub("someone/tiny")
    assert uploaded.pop("repo_id") == "someone/tiny"
    assert set(uploaded) == {
        "README.md", "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    assert ModelCard(uploaded["README.md"].decode()).data.tags[:2] == ["metis", "fp4-training"]
    for name, content in uploaded.items():
        (tmp_path / name).write_bytes(content)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
