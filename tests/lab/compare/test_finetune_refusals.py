"""Fine-tuning for deployment: what it refuses, before time is spent."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from lab.compare.finetune_tools import finetuning
from metis_hf.lab.finetune.run import Finetuning
from metis_hf.shared.locks import hold_directory


def test_training_arguments_that_decide_the_result_are_kept_to(source, tmp_path):
    finetuning(source, tmp_path)._claim()
    shown = finetuning(source, tmp_path)
    shown.training.logging_steps = 3  # decides nothing
    shown._claim()
    other = finetuning(source, tmp_path)
    other.training.weight_decay = 0.5
    with pytest.raises(ValueError, match=r"weight_decay: 0\.0 there, 0\.5 now"):
        other.run()


def test_other_data_under_the_same_name_are_refused(source, tmp_path):
    model, data = source
    own = tmp_path / "data.jsonl"
    own.write_bytes(Path(data).read_bytes())
    finetuning((model, str(own)), tmp_path / "out")._claim()
    own.write_bytes(b"".join(reversed(Path(data).read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=r"data\.jsonl changed after .*another --output_dir"):
        finetuning((model, str(own)), tmp_path / "out")._claim()


def test_one_process_at_a_time(source, tmp_path):
    run = finetuning(source, tmp_path)
    with (
        hold_directory(tmp_path),
        pytest.raises(ValueError, match=r"is in use by .* another --output_dir"),
    ):
        run.run()


def test_a_tokenizer_larger_than_the_model(source, tmp_path):
    model = shutil.copytree(source[0], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(ValueError, match=r"gives token \d+, and the model knows 300: they do not"):
        finetuning((str(model), source[1]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharded_models_are_refused(name, source, tmp_path, monkeypatch):
    run = finetuning(source, tmp_path)
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=r"FSDP and DeepSpeed have cut.*under DDP"):
        Finetuning(run.arguments, run.training)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gptq"}, "--method 'gptq'; choose of ptq, qat, qad, lora"),
        ({"scheme": "metis"}, "--scheme 'metis'; choose of w4a4, w4a16"),
        ({"layout": "gguf"}, "--layout 'gguf'; choose of compressed-tensors, modelopt"),
        ({"eval_sequences": 0}, "--eval_sequences 0; expected at least 1"),
        ({"lora_rank": 0}, "--lora_rank 0; expected at least 1"),
        ({"sequence_length": 1}, "--sequence_length 1; expected at least 2"),
        ({"tokens": -5.0}, r"--tokens -5\.0; expected a finite number above 0"),
        ({"tokens": math.inf}, "--tokens inf; expected a finite number above 0"),
        ({"lora_learning_rate": math.nan}, "--lora_learning_rate nan; expected a finite number"),
        ({"temperature": 0.0}, r"--temperature 0\.0; expected a finite number above 0"),
        ({"cross_entropy_share": 3.0}, r"--cross_entropy_share 3\.0; expected a share from 0"),
        ({"global_batch": 3}, "--global_batch 3 is no multiple of 2"),
        ({"data": None}, "no data: give --data FILE"),
        ({"compare": "nvfp5"}, "scheme 'nvfp5' is not registered"),
        ({"held_out": "a/x.jsonl,b/x.jsonl"}, "two files of one name"),
        ({"model": ""}, "no model: give a directory or hub name, or try --smoke"),
        ({"eval_sequences": 10**6}, "1000000 held-out sequences of 64"),
        ({"sequence_length": 2049}, "2049 does not fit the model's context of 2048 tokens"),
    ],
)
def test_bad_input(options, message, source, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetuning(source, tmp_path, **options)


def test_a_model_that_cannot_be_packed_is_refused_before_anything_is_read(source, tmp_path):
    config = transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=1, n_head=2)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "gpt2")  # neither weights nor a tokenizer
    with pytest.raises(ValueError, match=r"c_attn: a Conv1D"):
        finetuning((str(tmp_path / "gpt2"), source[1]), tmp_path / "out")


def test_a_model_that_lacks_weights_is_refused(source, tmp_path):
    model = shutil.copytree(source[0], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.embed_tokens\.weight"):
        finetuning((str(model), source[1]), tmp_path / "out").load()


def test_what_is_trained_on_is_not_held_out(source, tmp_path):
    with pytest.raises(ValueError, match=r"is what --data trains on; leave --held_out out"):
        finetuning(source, tmp_path, held_out=str(source[1]))
