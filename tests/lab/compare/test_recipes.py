"""The recipes as a person launches them, and the parts they are made of.

The smoke runs take 10 to 20 s each; the rest about half a minute together.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from design import full_only, named, thinned
from layers.layer_tools import of_each_kind
from paths import ROOT
from texts import documents

from lab.compare.recipe_tools import NAMES, arguments, config_of
from metis_hf import MetisConfig, get_metis_model
from metis_hf.data.chunked import write_shards
from metis_hf.data.corpus import train_tokenizer
from metis_hf.lab.cost import meta_model
from metis_hf.lab.planning.plan import parameter_counts
from metis_hf.lab.recipe import (
    build_model,
    build_trainer,
    causal_batch,
    dry_run,
    load_data,
)
from metis_hf.schemes import scheme_names

# A dense weight, stored factors, a state, and what quantizes each GEMM on its own.
SHORT = ("metis", "metis-paper", "smoothquant", "quartet2")


def run(*command, seconds=900):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=environment
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


def accelerate(*options):
    return (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *options)


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(NAMES, lambda name: name != "gpt2_1b1"))
def test_smoke(tmp_path, name):
    out = run(
        *accelerate("--cpu", "--num_processes", "1"),
        f"recipes/{name}.py", "--smoke", "--output_dir", str(tmp_path),
    )  # fmt: skip
    assert "reloaded: equal to the bit" in out
    assert {"checkpoint-2", "checkpoint-4", "model.safetensors", "eval_results.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["quantization_config"]["scheme"] == "metis"
    loss = json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"]
    assert 5 < loss < 6.5  # four steps from ln 512 = 6.24


@pytest.mark.slow
def test_smoke_in_two_processes(tmp_path):
    """As docs/distributed.md says; `accelerate launch --cpu --num_processes 2` starts one."""
    out = run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "recipes/gpt2_130m.py", "--smoke", "--output_dir", str(tmp_path), "--max_steps", "2",
    )  # fmt: skip
    assert "reloaded: equal to the bit" in out
    record = json.loads((tmp_path / "metis_run.json").read_text())
    assert record["environment"]["processes"] == 2


@full_only
@pytest.mark.slow
def test_smoke_with_the_config_file(tmp_path):
    out = run(
        *accelerate("--config_file", "recipes/accelerate/cpu.yaml"),
        "recipes/llama3_8b.py", "--smoke", "--output_dir", str(tmp_path), "--scheme", "nvidia",
    )  # fmt: skip
    assert "scheme nvidia" in out
    assert "reloaded: equal to the bit" in out


@pytest.mark.slow
def test_dry_run_of_the_8b_model():
    out = run(
        sys.executable, "-c",
        "import resource, runpy, sys\n"
        "sys.argv = ['llama3_8b', '--dry-run', '--world-size', '64', '--json']\n"
        "runpy.run_path('recipes/llama3_8b.py', run_name='__main__')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)",
    )  # fmt: skip
    text, peak = out.rstrip().rsplit("\n", 1)
    plan = json.loads(text)
    assert plan["parameters"]["original"] == 8_030_261_248  # as published
    assert plan["workload"]["world_size"] == 64
    assert plan["steps"] == 190_735
    # 6 N t with N = 6.98e9 converted weights, over 0.5M tokens.
    assert plan["flops"]["gemm"] == 6 * 6_979_321_856 * 524_288
    # Ranks of 64 of 4,096, gradients a quarter of it: directions are found for each forward pass.
    assert 0.03 < plan["flops_added_share"] < 0.05
    # AdamW: 8 bytes a parameter, on 64 ranks.
    assert plan["memory"]["FSDP2"]["moments"] == pytest.approx(8 * 8_030_261_248 / 64, rel=0.005)
    assert int(peak) < 2 * 2**20  # KiB: one copy of the weights alone would be 30 GiB


@pytest.mark.parametrize("name", NAMES)
def test_readme_has_the_plans(name):
    metis = MetisConfig()
    meta = meta_model(config_of(name))
    original = sum(p.numel() for p in meta.parameters())
    counts = parameter_counts(get_metis_model(meta, metis), original)
    load = arguments(name, "--dry-run")[0].workload(arguments(name, "--dry-run")[1], 8)
    row = (
        f"| {name} | {counts['original']:,} | {counts['converted']:,} | "
        f"{load.tokens_per_step:,} | {load.steps:,} |"
    )
    assert counts["added"] == 0  # weights are stored as one matrix
    assert row in (ROOT / "recipes/README.md").read_text()


def test_readme_names_files_that_exist():
    text = (ROOT / "recipes/README.md").read_text()
    for path in set(re.findall(r"recipes/[\w/]+\.(?:py|yaml)", text)):
        assert (ROOT / path).is_file(), path


@pytest.mark.slow
@pytest.mark.parametrize("scheme", named(of_each_kind(scheme_names()), SHORT))
def test_dry_run_of_each_kind_of_scheme(capsys, scheme):
    given, training = arguments("gpt2_130m", "--smoke", "--dry-run", "--scheme", scheme)
    plan = dry_run(config_of("gpt2_130m", smoke=True), given, training)
    assert plan.scheme == scheme
    assert plan.workload.steps == 4
    assert "FLOPs per step" in capsys.readouterr().out


class TestData:
    LENGTH, COUNT = 16, 20

    def prepared(self, path, first=0, count=COUNT, **changes):
        path.mkdir(exist_ok=True, parents=True)
        tokens = np.repeat(np.arange(first, first + count, dtype=np.int32), self.LENGTH)
        write_shards(path, lambda _: tokens, [len(tokens)], self.LENGTH, 8, lambda _: None)
        meta = {"tokenizer": "t", "seq_len": self.LENGTH, "num_sequences": count,
                "num_tokens": len(tokens), "vocab_size": 500, "eos_token_id": 0}  # fmt: skip
        (path / "meta.json").write_text(json.dumps(meta | changes))
        return path

    def load(self, path, *argv):
        given, training = arguments(
            "llama3_8b", "--smoke", "--data", str(path), "--sequence_length", "16",
            "--eval_sequences", "3", *argv,
        )  # fmt: skip
        return load_data(given, training, config_of("llama3_8b", smoke=True))

    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    @staticmethod
    def firsts(dataset):
        return [row["input_ids"][0].item() for row in dataset]

    def test_holds_out_the_last_sequences(self, tmp_path):
        train, held_out, _ = self.load(self.prepared(tmp_path / "data"))
        assert sorted(self.firsts(train)) == list(range(17))
        assert self.firsts(train) != list(range(17))  # shuffled
        assert self.firsts(held_out) == [17, 18, 19]
        batch = causal_batch([train[0], train[1]])
        assert batch["input_ids"].shape == (2, self.LENGTH)
        assert batch["input_ids"].dtype is torch.int64
        assert torch.equal(batch["input_ids"], batch["labels"])

    def test_a_validation_split_is_used(self, tmp_path):
        path = self.prepared(tmp_path / "data")
        self.prepared(path / "validation", first=100, count=10)
        train, held_out, _ = self.load(path)
        assert sorted(self.firsts(train)) == list(range(20))
        assert self.firsts(held_out) == [100, 101, 102]  # eval_sequences of them
        with pytest.raises(ValueError, match="eval_sequences=0: nothing would be evaluated"):
            self.load(path, "--eval_sequences", "0")

    def test_the_tokenizer_beside_the_data_is_loaded(self, tmp_path):
        path = self.prepared(tmp_path / "data")
        assert self.load(path)[2] is None
        train_tokenizer(documents()[:3], vocab_size=500).save_pretrained(path / "tokenizer")
        tokenizer = self.load(path)[2]
        assert len(tokenizer) == 500

    def test_order_follows_the_seed(self, tmp_path):
        path = self.prepared(tmp_path / "data")
        orders = [self.firsts(self.load(path, "--seed", seed)[0]) for seed in ("1", "1", "2")]
        assert orders[0] == orders[1] != orders[2]

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"seq_len": 32}, "--sequence_length 32"),
            ({"vocab_size": 50257}, "50257 tokens, but the model embeds 512"),
            ({"num_sequences": 21}, "21"),
        ],
    )
    def test_data_that_do_not_fit(self, tmp_path, changes, match):
        with pytest.raises(ValueError, match=match):
            self.load(self.prepared(tmp_path / "data", **changes))

    def test_missing(self, tmp_path):
        """Said before TrainingArguments, which may refuse the machine."""
        with pytest.raises(FileNotFoundError, match=r"no meta.json.*prepare_data"):
            arguments("llama3_8b", "--bf16", "--data", str(tmp_path / "none"))
        with pytest.raises(ValueError, match=r"--data DIR.*prepare_data"):
            arguments("llama3_8b", "--bf16")

    def test_nothing_left_to_train_on(self, tmp_path):
        with pytest.raises(ValueError, match="eval_sequences=20 of 20"):
            self.load(self.prepared(tmp_path / "data"), "--eval_sequences", "20")


def trainer(directory, *argv):
    given, training = arguments("gpt2_130m", "--smoke", "--output_dir", str(directory), *argv)
    config = config_of("gpt2_130m", smoke=True)
    train, held_out, tokenizer = load_data(given, training, config)
    model = build_model(config, given, training)
    return build_trainer(model, given, training, train, held_out, tokenizer), given


def test_build(tmp_path, capsys):
    """Steps and accumulation follow from tokens and batch; master weights are fp32."""
    made, _ = trainer(tmp_path, "--max_steps", "-1", "--tokens", "1000", "--resume")
    assert made.args.gradient_accumulation_steps == 2
    assert made.args.max_steps == 4  # 1000 / (4 * 64), rounded up
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    assert "scheme metis: 8 layers converted" in capsys.readouterr().out
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3 contradicts"):
        trainer(tmp_path, "--gradient_accumulation_steps", "3")


def test_a_step_beyond_the_first_epoch_has_a_whole_batch(tmp_path):
    """Its tokens are counted in full."""
    rows = datasets.Dataset.from_dict({"input_ids": [[n] for n in range(10)]})
    model = torch.nn.Linear(16, 16)
    for steps, count in (("2", 10), ("3", 8)):
        given, training = arguments(
            "gpt2_130m", "--smoke", "--output_dir", str(tmp_path), "--max_steps", steps
        )
        made = build_trainer(model, given, training, rows, rows)
        assert (given.global_batch, len(made.train_dataset)) == (4, count)


def test_same_seed_same_model():
    states = []
    for seed in ("1", "1", "2"):
        given, training = arguments("llama3_8b", "--smoke", "--seed", seed)
        model = build_model(config_of("llama3_8b", smoke=True), given, training)
        states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
