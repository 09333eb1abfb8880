"""TRL's trainers of preferences and rewards, with models as they are deployed."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import VOCAB, llama
from peft import LoraConfig
from texts import documents

from metis_hf import MetisConfig, calibrate, get_metis_model, metis_layers
from metis_hf.data.corpus import train_tokenizer
from metis_hf.deploy import export_checkpoint
from metis_hf.deploy.packed import load_packed

trl = pytest.importorskip("trl", reason="TRL is not installed")

TOKENS = VOCAB + 64
KINDS = ("w4a4", "adapters over w4a4", "adapters over packed")


@pytest.fixture
def tokenizer():
    found = train_tokenizer(documents()[:5], vocab_size=TOKENS)
    found.padding_side = "left"
    return found


@pytest.fixture
def dense(tmp_path):
    """The directory of a model, which TRL loads references from."""
    torch.manual_seed(0)
    model = llama(1, initializer_range=0.2)
    model.resize_token_embeddings(TOKENS)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def model_of(kind, dense, tmp_path):
    """The model, and the adapters' config if it has some."""
    model = transformers.AutoModelForCausalLM.from_pretrained(dense)
    get_metis_model(model, MetisConfig(scheme="w4a4"))
    calibrate(model, [torch.randint(0, TOKENS, (2, 32)) for _ in range(2)])
    if kind == "w4a4":
        return model, None
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if kind == "adapters over w4a4":
        return model, adapters
    model.save_pretrained(tmp_path / "metis")
    export_checkpoint(tmp_path / "metis", tmp_path / "nvfp4", format="compressed-tensors")
    return load_packed(tmp_path / "nvfp4", dtype=torch.float32), adapters


def train(trainer):
    """Losses of two steps, in which all that is trainable moves, and nothing else does."""
    model = trainer.model
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained
    trainer.train()
    for name, value in model.state_dict().items():
        assert torch.equal(before[name], value) == (name not in trained), name
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def arguments(tmp_path):
    return {
        "output_dir": str(tmp_path / "out"), "max_steps": 2, "per_device_train_batch_size": 2,
        "logging_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none",
        "disable_tqdm": True, "learning_rate": 1e-3, "save_strategy": "no",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_preferences(kind, dense, tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"prompt": "def f(x): ", "chosen": "return x + 1", "rejected": "return 0 import"}
    data = datasets.Dataset.from_dict({name: [text] * 8 for name, text in columns.items()})
    model, adapters = model_of(kind, dense, tmp_path)
    trainer = trl.DPOTrainer(
        model, args=trl.DPOConfig(max_length=32, **arguments(tmp_path)), train_dataset=data,
        processing_class=tokenizer, peft_config=adapters,
    )  # fmt: skip
    if adapters is None:  # loaded from the path of the dense model: the exact one
        assert not list(metis_layers(trainer.ref_model))
    first, second = train(trainer)
    if adapters is not None:  # they begin at zero, so that the reference is the model itself
        assert first["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert second["loss"] < first["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rewards(kind, dense, tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"prompt": ["def f(x): ", "import this"] * 4})
    model, adapters = model_of(kind, dense, tmp_path)
    trainer = trl.GRPOTrainer(
        model, reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=trl.GRPOConfig(
            num_generations=2, max_completion_length=8, beta=0.1, **arguments(tmp_path)
        ),
        train_dataset=data, processing_class=tokenizer, peft_config=adapters,
    )  # fmt: skip
    logs = train(trainer)
    assert len(logs) == 2
    assert logs[1]["kl"] > 0
