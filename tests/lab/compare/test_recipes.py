"""recipes/llama3_8b.py as a person launches it, and the files of accelerate beside it."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
import yaml
from data.chunks import write_chunked
from paths import ROOT
from tensors import assert_same
from texts import documents

from metis_hf import MetisTrainer, get_metis_model
from metis_hf.data import corpus
from metis_hf.data.corpus import train_tokenizer
from metis_hf.lab.compare.sizes import SIZES
from metis_hf.lab.cost import meta_model
from metis_hf.lab.step_time import about
from metis_hf.schemes import registry
from metis_hf.shared.locks import hold_directory
from metis_hf.training import cuda_graph

RECIPE = ROOT / "recipes" / "llama3_8b.py"
GPT2 = ("--config", str(ROOT / "recipes" / "gpt2_130m.yaml"))
FILES = {"llama3_8b": (), "gpt2_1b1": ("--config", str(ROOT / "recipes/gpt2_1b1.yaml")),
         "gpt2_130m": GPT2}  # fmt: skip
SIZE = {"llama3_8b": "8b", "gpt2_1b1": "1b1", "gpt2_130m": "130m"}


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Launch the recipe in this process; returns what it prints."""

    def run(*argv):
        monkeypatch.setattr(
            sys, "argv", [str(RECIPE), "--output_dir", str(tmp_path / "out"), *argv]
        )
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setattr(corpus, "stdlib_documents", lambda: list(documents()))  # read once
        runpy.run_path(str(RECIPE), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def trainer(launch, monkeypatch):
    """Launch the recipe up to its training; returns the trainer."""
    made = []

    class Stop(Exception):
        pass

    def train(self, **_):
        made.append(self)
        raise Stop

    def run(*argv):
        monkeypatch.setattr(MetisTrainer, "train", train)
        with pytest.raises(Stop):
            launch("--smoke", *argv)
        return made.pop()

    return run


@pytest.fixture
def refusal(launch, capsys):
    """Launch the recipe, which ends with one line; returns the line."""

    def run(*argv):
        with pytest.raises(SystemExit) as ended:
            launch(*argv)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        (line,) = [each for each in said.splitlines() if "error: " in each]
        return line

    return run


def run(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


@pytest.mark.slow
def test_smoke(tmp_path):
    out = run(
        sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch",
        "--config_file", "recipes/accelerate/cpu.yaml",
        "recipes/llama3_8b.py", "--smoke", "--output_dir", str(tmp_path), "--scheme", "nvidia",
    )  # fmt: skip
    assert "scheme nvidia" in out
    names = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoint-2", "checkpoint-4", "eval_results.json"} <= names
    loss = json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"]
    assert 5 < loss < 6.5  # four steps from ln 512 = 6.24
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    last = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint-4", dtype=torch.float32
    )
    assert saved.config.quantization_config.scheme == "nvidia"
    assert_same(saved, last)


@pytest.mark.slow
def test_smoke_in_two_processes(tmp_path):
    """As docs/distributed.md says; `accelerate launch --cpu --num_processes 2` starts one."""
    run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "recipes/llama3_8b.py", "--smoke", "--output_dir", str(tmp_path), "--max_steps", "2",
    )  # fmt: skip
    record = json.loads((tmp_path / "metis_run.json").read_text())
    assert record["environment"]["processes"] == 2


@pytest.mark.slow
def test_dry_run_of_the_8b_model(launch):
    plan = json.loads(launch("--dry-run", "--world-size", "64", "--json"))
    assert plan["parameters"]["original"] == 8_030_261_248  # as published
    assert (plan["workload"]["world_size"], plan["steps"]) == (64, 190_735)
    # 6 N t with N = 6.98e9 converted weights, over 0.5M tokens.
    assert plan["flops"]["gemm"] == 6 * 6_979_321_856 * 524_288
    # AdamW: 8 bytes a parameter, on 64 ranks.
    assert plan["memory"]["FSDP2"]["moments"] == pytest.approx(8 * 8_030_261_248 / 64, rel=0.005)
    # On one H200, with activation checkpointing and by Python, 715 tokens/s at 2 x 2048.
    day = plan["tokens"] / 64 / 715 / 86_400
    assert plan["seconds"]["h200"]["by Python"] * plan["steps"] / 86_400 < 1.5 * day


@pytest.mark.parametrize("name", FILES)
def test_sizes_are_those_of_compare_and_of_the_page(name, launch, monkeypatch):
    recipe = runpy.run_path(str(RECIPE))
    monkeypatch.setattr(sys, "argv", [str(RECIPE), "--dry-run", *FILES[name]])
    arguments, training, more = recipe["parse_arguments"]()
    size, config = SIZES[SIZE[name]], transformers.AutoConfig.for_model(**more.model)
    assert more.model == {"model_type": size.model_type, **size.config}
    assert {key: getattr(training, key) for key in size.training} == size.training
    assert (arguments.tokens, arguments.scheme, training.seed) == (100e9, "metis", 42)
    assert arguments.sequence_length == size.sequence_length
    assert arguments.global_batch == size.global_batch
    model = meta_model(config)
    original = sum(p.numel() for p in model.parameters())
    converted = get_metis_model(model).metis_report.converted_params
    plan = json.loads(launch("--dry-run", "--json", "--world-size", "8", *FILES[name]))
    ways = plan["seconds"]["h200"]
    days = " / ".join(about(plan["steps"] * ways[way]) for way in ("recorded", "by Python"))
    memory = f"{sum(plan['memory']['FSDP2'].values()) / 2**30:.1f} GiB"
    row = f"| {name} | {original:,} | {converted:,} | 190,735 | {days} | {memory} |"
    assert row in (ROOT / "recipes/README.md").read_text()


def test_own_options_come_first_in_the_help(launch, capsys):
    with pytest.raises(SystemExit):
        launch("--help")
    listed = re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE)
    own = listed[: listed.index("--output_dir")]
    assert {"--config", "--model", "--metis", "--import", "--data", "--scheme", "--device"} <= {
        *own
    }


def test_readme_names_files_that_exist():
    text = (ROOT / "recipes/README.md").read_text()
    for path in set(re.findall(r"recipes/[\w/]+\.(?:py|yaml)", text)):
        assert (ROOT / path).is_file(), path


def test_steps_accumulation_and_model(trainer, tmp_path):
    """Steps follow from the tokens; a file is below --smoke, and both below the command line."""
    path = tmp_path / "x.yaml"
    path.write_text("learning_rate: 1e-3\nlogging_steps: 7\nmetis: {two_level: true}\nseed: 3\n")
    made = trainer("--max_steps", "-1", "--tokens", "1000", "--config", str(path), "--adam_beta2",
                   "0.9")  # fmt: skip
    assert made.args.max_steps == 4  # 1000 / (4 * 64), rounded up
    assert made.args.gradient_accumulation_steps == 2
    args = made.args
    assert (args.learning_rate, args.adam_beta2, args.logging_steps) == (1e-3, 0.9, 1)
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    config = made.model.config.quantization_config
    assert (config.two_level, config.seed) == (True, 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "no data: give --data DIR"),
        (("--data", "/nope"), "/nope has no meta.json"),
        (("--smoke", "--metis", '{"rank": 60}'), "rank=60 keeps"),
        (("--smoke", "--metis", "{"), "argument --metis: invalid"),
        (("--smoke", "--metis", '{"scheme": "bf16"}'), "which --scheme sets"),
        (("--smoke", "--global-batch", "3"), "multiple of 2"),
        (
            ("--smoke", "--resume_from_checkpoint", "x"),
            "use --resume, which continues in output_dir",
        ),
        (("--smoke", "--gradient_accumulation_steps", "3"), "contradicts global_batch=4"),
        (("--smoke", "--sequence-length", "128"), "the model's context of 64 tokens"),
        (("--smoke", "--eval-sequences", "0"), "eval_sequences=0 leaves"),
        (("--smoke", "--learning_rates", "1"), "--learning_rates"),
        (("--smoke", "--tokens", "nan"), "--tokens nan; expected a finite number"),
        (("--smoke", "--json"), "--device apply only to --dry-run"),
        (("--dry-run", "--world-size", "3"), "multiple of 12"),
    ],
)
def test_what_is_wrong_is_one_line(argv, message, refusal):
    assert message in refusal(*argv)


@pytest.mark.parametrize(
    ("values", "message"),
    [("metis: [a\n", "is not YAML"), ("max_steps:\n", "max_steps has no value")],
)
def test_what_is_wrong_in_a_file_is_one_line(values, message, refusal, tmp_path):
    (tmp_path / "x.yaml").write_text(values)
    assert message in refusal("--smoke", "--config", str(tmp_path / "x.yaml"))


def test_an_output_directory_that_is_taken(refusal, tmp_path):
    (tmp_path / "out/checkpoint-10").mkdir(parents=True)
    assert "already has checkpoints (checkpoint-10); continue with --resume" in refusal("--smoke")
    with hold_directory(tmp_path / "out"):
        assert "choose another --output_dir" in refusal("--smoke", "--resume")


def test_a_failure_of_the_training_keeps_its_traceback(launch, monkeypatch):
    def train(self, **_):
        raise ValueError("a fault of the program")

    monkeypatch.setattr(MetisTrainer, "train", train)
    with pytest.raises(ValueError, match="a fault of the program"):
        launch("--smoke")


class TestData:
    LENGTH, COUNT = 16, 20

    def prepared(self, path, first=0, count=COUNT, **changes):
        tokens = np.repeat(np.arange(first, first + count), self.LENGTH)
        return write_chunked(path, [tokens], self.LENGTH, 500, 8, **changes)

    def load(self, trainer, path, *argv):
        made = trainer(
            "--data", str(path), "--sequence-length", "16", "--eval-sequences", "3", *argv
        )
        return made, *(
            [row["input_ids"][0].item() for row in dataset]
            for dataset in (made.train_dataset, made.eval_dataset)
        )

    def test_holds_out_the_last_sequences(self, trainer, tmp_path):
        path = self.prepared(tmp_path / "data")
        made, train, held_out = self.load(trainer, path, "--max_steps", "2")
        assert sorted(train) == list(range(17)) != train  # shuffled
        assert held_out == [17, 18, 19]
        batch = made.data_collator([made.train_dataset[0], made.train_dataset[1]])
        assert batch["input_ids"].shape == (2, self.LENGTH)
        assert torch.equal(batch["input_ids"], batch["labels"])
        # Beyond the first epoch, each step has a whole batch of four.
        assert self.load(trainer, path, "--max_steps", "5")[1] == train[:16]
        orders = [self.load(trainer, path, "--seed", seed)[1] for seed in ("42", "2")]
        assert orders[0] == train != orders[1]

    def test_validation_split_and_tokenizer_beside_the_data_are_used(self, trainer, tmp_path):
        path = self.prepared(tmp_path / "data")
        self.prepared(path / "validation", first=100, count=10)
        train_tokenizer(documents()[:3], vocab_size=500).save_pretrained(path / "tokenizer")
        made, train, held_out = self.load(trainer, path)
        assert sorted(train) == list(range(20))
        assert held_out == [100, 101, 102]  # eval_sequences of them
        assert len(made.processing_class) == 500

    def test_data_that_do_not_fit(self, refusal, tmp_path):
        for changes, message in (
            ({"seq_len": 32}, "--sequence-length 32"),
            ({"vocab_size": 50257}, "50257 tokens, but the model embeds 512"),
        ):
            path = self.prepared(tmp_path / "data", **changes)
            assert message in refusal("--smoke", "--data", str(path), "--sequence-length", "16")


@pytest.mark.parametrize("found", [["no CUDA device"], []])
def test_steps_are_recorded_where_nothing_is_in_the_way(found, trainer, monkeypatch):
    monkeypatch.setattr(cuda_graph, "obstacles", lambda args: found)
    assert trainer().cuda_graphs == (not found)


def test_schemes_of_ones_own(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "SCHEMES", dict(registry.SCHEMES))  # another test sees all
    file = tmp_path / "recipe_scheme.py"
    file.write_text(
        "from metis_hf.schemes.parts import *\n"
        "@register_scheme('of-a-recipe', summary='a test', source='a test')\n"
        "def build(config, rank):\n"
        "    nearest = quantizer(config, rounding='nearest', scale_rounding='nearest')\n"
        "    return Scheme(fprop_input=Operand(nearest), fprop_weight=Operand(nearest))\n"
    )
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"import": [str(file)]}))
    made = trainer("--config", str(tmp_path / "x.yaml"), "--scheme", "of-a-recipe")
    assert made.model.config.quantization_config.scheme == "of-a-recipe"


def test_accelerate_reads_the_files_beside_the_recipes():
    from accelerate.commands.config.config_args import load_config_from_file

    for name, count in (("1gpu", 1), ("8gpu_fsdp2", 8), ("multinode_fsdp2", 32), ("cpu", 1)):
        loaded = load_config_from_file(str(ROOT / f"recipes/accelerate/{name}.yaml"))
        assert (loaded.num_processes, loaded.use_cpu) == (count, name == "cpu")


@pytest.mark.parametrize("name", ["8gpu_fsdp2", "multinode_fsdp2"])
def test_the_launcher_makes_fsdp2_of_them(name, monkeypatch):
    """Through the launcher's own parser and the environment that it hands to processes."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = ROOT / f"recipes/accelerate/{name}.yaml"
    given = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    given, *_ = _validate_launch_command(given)
    for key, value in prepare_multi_gpu_env(given).items():
        if key.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(key, value)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading
    assert "FULL" in str(plugin.state_dict_type)
    options = vars(launch_command_parser().parse_args(["script.py"]))
    assert set(yaml.safe_load(path.read_text())["fsdp_config"]) <= set(options)
