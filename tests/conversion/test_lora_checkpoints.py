"""Adapters on disk: their base is a plain checkpoint that is converted, or a converted one."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import transformers
from conftest import llama
from peft import AutoPeftModel, AutoPeftModelForCausalLM, PeftConfig, PeftModel, get_peft_model
from tensors import logits

from conversion.lora_tools import adapted, lora_config, lora_layers
from metis_hf import (
    MetisConfig,
    calibrate,
    get_metis_model,
    metis_layers,
    set_precision,
    to_dense,
)
from metis_hf.training.gradient_noise import group_of


class TestAdapterOverADenseCheckpoint:
    """The base's name in the adapter's config is that of a plain model, converted after loading."""

    @pytest.fixture
    def base(self, tmp_path):
        llama().save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    @pytest.fixture
    def adapter(self, base, tmp_path):
        """(directory of an adapter trained over FP4, its model)."""
        return self.save(base, tmp_path / "adapter", "CAUSAL_LM")

    @staticmethod
    def save(base, directory, task, **options):
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        get_metis_model(model, MetisConfig(**{"scheme": "metis", "seed": 3} | options))
        model = get_peft_model(model, lora_config(task_type=task))
        model.save_pretrained(directory)
        return directory, model

    @pytest.mark.parametrize(
        ("task", "scheme"), [("CAUSAL_LM", "metis"), ("CAUSAL_LM", "metis-paper"), (None, "nvidia")]
    )
    def test_auto_classes_convert_the_base(self, task, scheme, base, tmp_path, token_ids):
        """With a task and without, where PEFT writes `auto_mapping` itself."""
        directory, model = self.save(base, tmp_path / "adapter", task, scheme=scheme)
        cls = AutoPeftModelForCausalLM if task else AutoPeftModel
        with pytest.warns(UserWarning, match=f"scheme '{scheme}', so this base has been converted"):
            loaded = cls.from_pretrained(directory)
        assert len(lora_layers(loaded)) == len(dict(metis_layers(loaded))) == 14
        assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))
        assert loaded.get_base_model().config.quantization_config == MetisConfig(
            scheme=scheme, seed=3
        )
        assert not any(param.requires_grad for param in loaded.parameters())

    def test_transformers_own_loader(self, adapter, token_ids):
        directory, model = adapter
        with pytest.warns(UserWarning, match="so this base has been converted"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
        assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))

    def test_plain_base_on_request(self, adapter, base, token_ids):
        """The way out that the warning names."""
        directory, model = adapter
        config = PeftConfig.from_pretrained(directory)
        assert config.metis_config["scheme"] == "metis"
        config.metis_config = None
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            loaded = PeftModel.from_pretrained(plain, directory, config=config)
        assert not list(metis_layers(loaded))
        assert not torch.equal(logits(loaded, token_ids), logits(model, token_ids))

    def test_converted_base_is_left_as_it_is(self, adapter, base, token_ids):
        directory, model = adapter
        converted = transformers.AutoModelForCausalLM.from_pretrained(base)
        get_metis_model(converted, MetisConfig(scheme="metis", seed=3))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            loaded = PeftModel.from_pretrained(converted, directory)
        assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))

    def test_other_conversion_is_said(self, adapter, base, tmp_path):
        """An adapter that is only used keeps its origin; one that is trained on gets a new one."""
        directory, _ = adapter
        for trainable, scheme in ((False, "metis"), (True, "nvidia")):
            other = transformers.AutoModelForCausalLM.from_pretrained(base)
            get_metis_model(other, MetisConfig(scheme="nvidia", seed=3))
            with pytest.warns(
                UserWarning, match=r"has scheme='nvidia' \(adapter: 'metis'\)\. The adapter runs"
            ):
                loaded = PeftModel.from_pretrained(other, directory, is_trainable=trainable)
            loaded.save_pretrained(tmp_path / "again")
            saved = json.loads((tmp_path / "again/adapter_config.json").read_text())
            assert saved["metis_config"]["scheme"] == scheme

    def test_second_adapter_over_a_plain_base(self, adapter, base):
        directory, _ = adapter
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        model = get_peft_model(plain, lora_config())
        with pytest.warns(UserWarning, match="this base is not converted and cannot be"):
            model.load_adapter(directory, "second")
        assert not list(metis_layers(model))

    def test_state_of_the_scheme_starts_afresh(self, base, tmp_path):
        directory, _ = self.save(base, tmp_path / "a", None, scheme="smoothquant")
        with pytest.warns(UserWarning, match="keeps from training is reset"):
            AutoPeftModel.from_pretrained(directory)

    def test_fp4_units_of_another_machine_are_not_asked_for(self, adapter, base):
        """As of a checkpoint: the adapter runs here in emulation, and nothing is said of it."""
        path = adapter[0] / "adapter_config.json"
        recorded = json.loads(path.read_text())
        recorded["metis_config"]["backend"] = "native"
        path.write_text(json.dumps(recorded))
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        with pytest.warns(UserWarning, match="so this base has been converted too"):
            PeftModel.from_pretrained(plain, adapter[0])
        assert next(metis_layers(plain))[1].config.backend == "auto"
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the adapter was trained")
            other = get_metis_model(
                transformers.AutoModelForCausalLM.from_pretrained(base),
                MetisConfig(scheme="metis", seed=3),
            )
            PeftModel.from_pretrained(other, adapter[0])

    def test_broken_config_is_refused(self, adapter):
        directory, _ = adapter
        path = directory / "adapter_config.json"
        values = json.loads(path.read_text())
        values["metis_config"]["n_iter"] = 10**9
        path.write_text(json.dumps(values))
        with pytest.raises(ValueError, match="n_iter=1000000000; expected"):
            AutoPeftModelForCausalLM.from_pretrained(directory)

    def test_adapters_of_plain_models_have_pefts_keys_alone(self, base, tmp_path):
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        get_peft_model(plain, lora_config(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "p")
        loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "p")
        assert not list(metis_layers(loaded))
        loaded.save_pretrained(tmp_path / "q")
        for name in "pq":
            saved = json.loads((tmp_path / name / "adapter_config.json").read_text())
            assert "metis_config" not in saved


def test_adapter_over_a_metis_checkpoint(tmp_path, token_ids):
    """The base converts itself; nothing is left to say."""
    get_metis_model(llama(), MetisConfig(split_weight=True)).save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(model, lora_config(task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))


def test_a_change_of_precision_is_recorded_in_the_adapter(tmp_path, token_ids):
    """Its base is converted by that config when the adapter is loaded."""
    model, _ = adapted(llama(1), "nvfp4-rne")
    set_precision(model, high_precision=("forward",))
    found = logits(model, token_ids)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(llama(1), tmp_path)
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again, token_ids), found)


def test_turned_dense_under_adapters_is_refused(token_ids):
    model, _ = adapted(llama(1), "nvfp4-rne")
    before = logits(model, token_ids)
    with pytest.raises(ValueError, match=r"7 converted layers have adapters.*merge_and_unload\(\)"):
        to_dense(model)
    assert torch.equal(logits(model, token_ids), before)
    dense = to_dense(model.merge_and_unload())
    assert not hasattr(dense, "metis_report")


def test_layers_deployed_as_one_are_so_under_adapters():
    model, _ = adapted(llama(1), "w4a4", target_modules=["q_proj", "v_proj", "up_proj"])
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    found = calibrate(model, [ids])
    for name, scale in found.items():
        attention = ".self_attn." in name and "o_proj" not in name
        assert len(scale.group) == (3 if attention else 2 if "down_proj" not in name
                                    and ".mlp." in name else 1)  # fmt: skip
    assert group_of("model.layers.0.mlp.up_proj.base_layer") == "up_proj"
