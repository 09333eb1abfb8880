"""Model cards of checkpoints and exports, and pushing to the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import llama
from forked import python
from huggingface_hub import ModelCard, metadata_load, metadata_save
from huggingface_hub.utils import validate_repo_id
from peft import LoraConfig, get_peft_model
from tensors import assert_same
from training.trainer_tools import trainer

from deploy.checkpoints import checkpoint, mixtral
from metis_hf import (
    MetisConfig,
    MetisTrainer,
    calibrate,
    get_metis_model,
    set_precision,
)
from metis_hf.deploy import export_checkpoint
from metis_hf.deploy.model_card import model_card, write_model_card


def valid(path):
    """The card of a file whose metadata the hub's own library reads and writes as they are."""
    card = ModelCard.load(path)
    metadata_save(path.with_name("again.md"), card.data.to_dict())
    found = metadata_load(path)
    assert found == metadata_load(path.with_name("again.md")) == card.data.to_dict()
    assert not any(value is None for value in found.values())
    assert all(isinstance(tag, str) and tag for tag in found["tags"])
    assert len(set(found["tags"])) == len(found["tags"])
    if "base_model" in found:
        validate_repo_id(found["base_model"])
    return card


def trained(tmp_path, model):
    """A trainer after two steps and an evaluation."""
    made = trainer(tmp_path / "my run", model, cls=MetisTrainer, max_steps=2)
    made.train()
    made.evaluate()
    return made


class TestTrainersCard:
    """`create_model_card` of MetisTrainer: Trainer's own card, and what a reader needs of ours."""

    def test_says_how_the_model_computes_loads_and_serves(self, tmp_path):
        model = llama(1)
        model.config.name_or_path = "org/small-1B"
        trainer = trained(tmp_path, get_metis_model(model, MetisConfig(scheme="metis", rank=4)))
        trainer.save_model()
        for _ in range(2):  # as at each push
            trainer.create_model_card(tags="mine")
        card = valid(tmp_path / "my run/README.md")
        expected = {"mine", "generated_from_trainer", "metis", "fp4-training", "nvfp4"}
        assert set(card.data.tags) == {*expected, "scheme:metis"}
        assert card.data.base_model == "org/small-1B"
        assert card.data.pipeline_tag == "text-generation"
        assert card.data.library_name == "transformers"
        for once in (
            "fine-tuned version of [org/small-1B]", "emulated W4A4G4 (nvfp4)", "| rank | **`4`** |",
            "7 layers converted", "learning_rate: ", "## What it costs",
            "metis-hf export 'my run' --format compressed-tensors --out nvfp4\nvllm serve nvfp4",
        ):  # fmt: skip
            assert card.text.count(once) == 1, once
        code = card.text.split("```python\n")[1].split("```")[0]
        assert 'from_pretrained("my run")' in code

    @pytest.mark.parametrize(
        ("config", "words", "missing"),
        [
            ({"scheme": "w4a4"}, "vLLM\nquantizes inputs on GPUs with FP4 units", "no inputs"),
            ({"scheme": "w4a16"}, "vLLM\nquantizes no inputs", "Blackwell"),
            ({"scheme": "nvfp4", "format": "mxfp8-e4m3"}, "## What it costs", "vllm"),
            ({"scheme": "bf16"}, "in high precision", "## What it costs"),
        ],
        ids=str,
    )
    def test_promises_no_more_than_an_export_can_hold(self, config, words, missing):
        text = model_card(get_metis_model(llama(1), MetisConfig(**config))).text
        assert words in text
        assert missing not in text

    def test_from_scratch(self, tmp_path):
        trainer = trained(tmp_path, get_metis_model(llama(1), MetisConfig(scheme="nvfp4")))
        trainer.create_model_card()
        card = valid(tmp_path / "my run/README.md")
        assert "This model was trained from scratch on" in card.text
        assert card.data.base_model is None

    def test_of_adapters(self, tmp_path):
        adapters = LoraConfig(r=2, target_modules="all-linear")
        base = get_metis_model(llama(1), MetisConfig(scheme="nvfp4"))
        trainer = trained(tmp_path, get_peft_model(base, adapters))
        trainer.save_model()
        trainer.create_model_card()
        card = valid(tmp_path / "my run/README.md")
        assert "from peft import AutoPeftModelForCausalLM" in card.text
        assert "vllm" not in card.text
        assert "scheme:nvfp4" in card.data.tags


class TestModelCard:
    @pytest.mark.slow
    def test_of_a_trained_checkpoint(self, tmp_path):
        model = get_metis_model(llama(), MetisConfig(rank=8, seed=5))
        model.save_pretrained(tmp_path / "run")
        results = tmp_path / "results.json"
        results.write_text('{"piqa": {"acc,none": 0.625, "alias": "piqa"}, "loss": 3.25}')
        path = write_model_card(model, tmp_path / "run", results=results)
        card = valid(path)
        assert card.data.library_name == "transformers"
        assert card.data.pipeline_tag == "text-generation"
        assert {"metis", "fp4-training", "nvfp4", "scheme:metis"} == set(card.data.tags)
        assert card.data.license is None
        assert "| rank | **`8`** |" in card.text
        assert "| n_iter | `2` |" in card.text
        assert "14 layers converted" in card.text
        assert "metis-hf export run --format compressed-tensors --out nvfp4" in card.text
        assert "| piqa / acc | 0.625 |\n| loss | 3.25 |" in card.text
        code = card.text.split("```python\n")[1].split("```")[0]
        assert code.startswith("import metis_hf")
        code += "print(type(model.lm_head).__name__)"
        assert python("-c", code, cwd=tmp_path).strip() == "Linear"

    def test_card_of_an_export_names_its_base_and_how_to_serve(self, tmp_path):
        """The base as Trainer's card in the checkpoint has it; all that the hub reads is valid."""
        model = get_metis_model(llama(1), MetisConfig(scheme="w4a4"))
        calibrate(model, [torch.arange(8)[None]])
        model.save_pretrained(tmp_path / "run")
        (tmp_path / "run/README.md").write_text("---\nbase_model: org/small-1B\n---\n# mine\n")
        report = export_checkpoint(
            tmp_path / "run", tmp_path / "my model", format="compressed-tensors"
        )
        card = valid(tmp_path / "my model/README.md")
        assert card.data.base_model == "org/small-1B"
        assert card.data.to_dict()["base_model_relation"] == "quantized"
        assert set(card.data.tags) == {"compressed-tensors", "nvfp4", "scheme:w4a4"}
        assert "```bash\nvllm serve 'my model'\n```" in card.text
        assert "On GPUs with FP4 units (Blackwell), vLLM quantizes inputs" in card.text
        assert f"{report.bytes:,} bytes of weights: 7 layers are packed" in card.text

    @pytest.mark.parametrize(
        "written", [None, "# no metadata\n", "---\nbase_model: ../../etc\n---\n"], ids=str
    )
    def test_a_base_that_is_not_known_is_left_out(self, written, tmp_path):
        source = checkpoint(tmp_path / "metis")
        if written is not None:
            (source / "README.md").write_text(written)
        export_checkpoint(source, tmp_path / "out")
        data = valid(tmp_path / "out/README.md").data.to_dict()
        assert not {"base_model", "base_model_relation"} & {*data}

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
        card = valid(tmp_path / "out/README.md")
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
        assert python("-c", code).split() == ["0", "False"]

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
    assert_same(loaded, model)
