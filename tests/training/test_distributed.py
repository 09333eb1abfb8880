"""Two real processes: DDP, FSDP2 and DeepSpeed against one process, through Trainer and accelerate.

Each engine is launched once (two gloo processes on CPU, about half a minute) and runs all cases of
distributed_cases; the tests look at what the ranks wrote.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import merge_fsdp_weights
from paths import ROOT, TESTS

from metis_hf import MetisConfig, MetisLinear, metis_layers
from metis_hf.training.health import weight_health
from metis_hf.training.run_record import HEALTH_FILE
from training import distributed_cases as cases
from training.distributed_run import RANKS, Rows

pytestmark = pytest.mark.slow

# Losses are about 5.5, where fp32 numbers lie 4.8e-7 apart: four of those steps. They are in fact
# equal here; sums over ranks of another gloo build may come in another order.
LOSS_TOLERANCE = 2e-6
WEIGHT_TOLERANCE = 1e-6  # of entries below 1, after 4 Adam steps of 1e-3
NORM_TOLERANCE = 1e-6  # of norms of about 1; FSDP2 sums squares shard by shard
DRIFT_TOLERANCE = 1e-6  # of a refreshed weight: fp32 products and one SVD; 1e-8 to 1e-7 are usual
LOGITS_TOLERANCE = 1e-6  # of logits below 1 in a GEMM of the same operands
BF16_TOLERANCE = 0.02  # of losses: GEMMs of 8-bit mantissas, 2^-9 each, in two blocks
LAUNCH_TIMEOUT = 600  # s for all cases of an engine; half a minute is usual

# What is launched together, by engine and, where one has several launches, a name after a dash.
CASES = {
    "ddp": "training loop micro_batches noise refreshing saving checkpointing mixed_precision "
    "errors architectures experts distilling",
    "fsdp": "training loop micro_batches refreshing saving sharded checkpointing mixed_precision "
    "errors architectures ram_efficient distilling",
    "fsdp-experts": "experts",
    "zero2": "training saving refused",
    "zero3": "training saving refused",
}
HERE = Path(__file__).parent
ENGINES = ["ddp", "fsdp"]
DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
ZERO = [pytest.param(name, marks=DEEPSPEED) for name in ("zero2", "zero3")]
WRAPPED = {
    "ddp": "DistributedDataParallel",
    "fsdp": "FSDPLlamaForCausalLM",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
}
# Without noise under DeepSpeed: ZeRO-3 multiplies by the output head in another order of summation.
EQUAL = [(engine, config) for engine in ENGINES for config in cases.CONFIGS]
EQUAL += [
    pytest.param(engine, config, marks=DEEPSPEED)
    for engine in ("zero2", "zero3")
    for config in ("metis", "nvidia", "bf16")
]


def launch(name, out, names=None):
    """Runs all cases of an entry of CASES in two processes; fails with their last lines."""
    engine = name.partition("-")[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "distributed_run.py"), engine, str(out)]
    command += (names or CASES[name]).split()
    path = os.pathsep.join([str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"DS_ACCELERATOR": "cpu"} if engine.startswith("zero") else {}
    log = out / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(LAUNCH_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = f"none within {LAUNCH_TIMEOUT} s"
    if code != 0:
        pytest.fail(f"{name}: exit code {code}\n{log.read_text()[-6000:]}", pytrace=False)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(engine, case) -> what each rank saw; and `ranks.out`, where they wrote."""
    out = tmp_path_factory.mktemp("ranks")

    @functools.cache
    def launched(name):
        try:
            launch(name, out)
        except pytest.fail.Exception as error:
            return error
        return None

    def results(engine, case):
        own = f"{engine}-{case}"
        error = launched(own if own in CASES else engine)
        if error is not None:
            raise error
        files = [out / f"{engine}-{case}.{rank}.pt" for rank in range(RANKS)]
        return [torch.load(file, weights_only=False) for file in files]

    results.out = out
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """case -> what one process sees of the same micro-batches, on one thread as the ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    @functools.cache
    def result(case):
        return getattr(cases, case)("one", tmp_path_factory.mktemp("one"))

    yield result
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)


def close(state, other, tolerance):
    """Whether two state dicts have the same names and nearly the same values."""
    assert state.keys() == other.keys()
    worst = {name: (value - other[name]).abs().max().item() for name, value in state.items()}
    assert max(worst.values()) <= tolerance, max(worst.items(), key=lambda item: item[1])


def same(state, other):
    close(state, other, 0.0)


class TestTraining:
    @pytest.mark.parametrize(("engine", "config"), EQUAL)
    def test_equals_one_process(self, ranks, alone, engine, config):
        """Each micro-batch is quantized by itself, so its noise is the only thing to agree on."""
        expected = alone("training")[config]
        results = [result[config] for result in ranks(engine, "training")]
        assert results[0]["wrapped"] == WRAPPED[engine]
        for result in results:
            assert result["loss"] == pytest.approx(expected["loss"], abs=LOSS_TOLERANCE)
            if engine in ENGINES:
                norms = pytest.approx(expected["grad_norm"], abs=NORM_TOLERANCE)
                assert result["grad_norm"] == norms
            close(result["state"], expected["state"], WEIGHT_TOLERANCE)
        same(results[0]["state"], results[1]["state"])

    @pytest.mark.parametrize("engine", ENGINES)
    def test_bf16_scheme_equals_the_joint_batch(self, ranks, tmp_path, engine):
        """Without quantization the micro-batches of both ranks are one batch."""
        model = cases.build(**cases.CONFIGS["bf16"])
        options = {"per_device_train_batch_size": 4 * RANKS, "gradient_accumulation_steps": 1}
        options |= {"max_steps": 2}
        trainer = cases.make_trainer("one", tmp_path, model, **options)
        trainer.train()
        result = ranks(engine, "training")[0]["bf16"]
        assert result["loss"] == pytest.approx(cases.history(trainer), abs=LOSS_TOLERANCE)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_plain_accelerate_loop(self, ranks, alone, engine):
        """With a refresh by hand after step 2."""
        expected = alone("loop")
        for result in ranks(engine, "loop"):
            assert result["loss"] == pytest.approx(expected["loss"], abs=LOSS_TOLERANCE)
            close(result["state"], expected["state"], WEIGHT_TOLERANCE)
            assert 0 < max(result["drifts"].values()) < DRIFT_TOLERANCE

    @pytest.mark.parametrize("teacher", ["copy", "own"])
    @pytest.mark.parametrize("engine", ENGINES)
    def test_distillation_equals_one_process(self, ranks, alone, engine, teacher):
        """Ranks have other numbers of tokens; each token has one weight."""
        expected = alone("distilling")[teacher]
        results = [result[teacher] for result in ranks(engine, "distilling")]
        for result in results:
            for key, tolerance in {
                "loss": LOSS_TOLERANCE, "grad_norm": NORM_TOLERANCE, "kl": LOSS_TOLERANCE
            }.items():  # fmt: skip
                assert result[key] == pytest.approx(expected[key], abs=tolerance)
            close(result["state"], expected["state"], WEIGHT_TOLERANCE)
        same(results[0]["state"], results[1]["state"])

    def test_noise_differs_between_ranks(self, ranks):
        first, second = ranks("ddp", "noise")
        assert torch.equal(first["nearest"], second["nearest"])
        different = (first["stochastic"] != second["stochastic"]).float().mean()
        assert different > 0.99  # each output sums products with 64 rounded inputs

    @pytest.mark.parametrize("engine", ENGINES)
    def test_recomputed_activations_change_nothing(self, ranks, engine):
        """accelerate's kind under FSDP2 does not restore torch's generators; our noise has none."""
        for result in ranks(engine, "checkpointing"):
            stored, recomputed = result["stored"], result["recomputed"]
            by = {"the model" if engine == "ddp" else "a wrapper"}
            assert (stored.pop("by"), recomputed.pop("by")) == (set(), by)
            same(recomputed.pop("state"), stored.pop("state"))
            assert recomputed == stored

    @pytest.mark.parametrize("engine", ENGINES)
    def test_weights_kept_for_micro_batches(self, ranks, engine):
        """DDP keeps what it quantized; FSDP2 does not, since the whole copies come and go."""
        for result in ranks(engine, "micro_batches"):
            kept, again = result["kept"], result["again"]
            assert again["held"] == [(0, count) for _, count in kept["held"]]
            assert [held for held, _ in kept["held"]] == [
                count if engine == "ddp" else 0 for _, count in kept["held"]
            ]
            assert len(kept["held"]) == 2
            assert kept["loss"] == again["loss"]
            assert kept["grad_norm"] == again["grad_norm"]
            same(kept["state"], again["state"])

    @pytest.mark.parametrize("engine", ENGINES)
    def test_bf16_mixed_precision(self, ranks, engine):
        full = ranks(engine, "training")[0]["metis"]["loss"]
        for result in ranks(engine, "mixed_precision"):
            assert result["dtypes"] == {torch.float32}
            assert result["loss"] == pytest.approx(full, abs=BF16_TOLERANCE)
            assert result["loss"] != full

    @pytest.mark.parametrize(
        ("case", "block"),
        [
            ("architectures", "LlamaDecoderLayer"),
            ("architectures", "GPT2Block"),
            ("experts", "MixtralDecoderLayer"),
        ],
    )
    @pytest.mark.parametrize("engine", ENGINES)
    def test_other_architectures(self, ranks, alone, engine, case, block):
        expected = alone(case)[block]
        results = [result[block] for result in ranks(engine, case)]
        for result in results:
            assert result["loss"] == pytest.approx(expected["loss"], abs=LOSS_TOLERANCE)
            close(result["state"], expected["state"], WEIGHT_TOLERANCE)
        same(results[0]["state"], results[1]["state"])


class TestRefresh:
    @pytest.mark.parametrize("engine", ENGINES)
    def test_identical_on_all_ranks_and_equal_to_one_process(self, ranks, alone, engine):
        first, second = ranks(engine, "refreshing")
        expected = alone("refreshing")
        assert first["loss"] == pytest.approx(expected["loss"], abs=LOSS_TOLERANCE)
        for step in (1, 2, 3, 4):
            state = first["after"]["states"][step]
            same(state, second["after"]["states"][step])
            close(state, expected["after"]["states"][step], WEIGHT_TOLERANCE)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_the_function_stays_while_the_factors_change(self, ranks, engine):
        factor = "model.layers.0.self_attn.q_proj.u"
        for result in ranks(engine, "refreshing"):
            before, after = result["before"], result["after"]
            assert set(result["drifts"]) == {2, 4}
            assert all(0 < drift < DRIFT_TOLERANCE for drift in result["drifts"].values())
            for step, refreshed in {1: False, 2: True, 3: False, 4: True}.items():
                loss = pytest.approx(after["losses"][step], abs=LOSS_TOLERANCE)
                assert before["losses"][step] == loss
                moved = (before["states"][step][factor] - after["states"][step][factor]).abs().max()
                assert bool(moved > 1e-4) is refreshed

    @pytest.mark.parametrize("engine", ENGINES)
    def test_moments(self, ranks, engine):
        """Those of the factors start anew, those of the residual are the weight's own and stay."""
        for result in ranks(engine, "refreshing"):
            for step, cleared in {1: False, 2: True, 3: False, 4: True}.items():
                before, after = (result[when]["moments"][step] for when in ("before", "after"))
                for name in ("u", "s", "vh"):
                    assert min(before[name]) > 0
                    assert (sum(after[name]) == 0) is cleared, (step, name)
                assert after["weight_residual"] == before["weight_residual"]
                assert min(after["weight_residual"]) > 0


def represented(path):
    """A checkpoint in this process: the model and the logits of two rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        return model, model(input_ids=Rows()[range(2)]["input_ids"]).logits


class TestSaving:
    @pytest.mark.parametrize(
        ("engine", "case"), [("ddp", "saving"), ("fsdp", "saving"), ("fsdp", "sharded")]
    )
    def test_resume_is_exact(self, ranks, engine, case):
        """2 + 2 steps equal 4, bit for bit, with noise, a refresh before the save and one after."""
        for result in ranks(engine, case):
            assert result["resumed"]["loss"] == result["whole"]["loss"]
            same(result["resumed"]["state"], result["whole"]["state"])
            assert torch.equal(result["resumed"]["logits"], result["whole"]["logits"])

    @pytest.mark.parametrize("path", ["whole/checkpoint-4", "resumed/checkpoint-4", "final"])
    @pytest.mark.parametrize("engine", ENGINES)
    def test_reload_in_one_process(self, ranks, engine, path):
        result = ranks(engine, "saving")[0]["whole"]
        model, logits = represented(ranks.out / f"{engine}-saving" / path)
        same(dict(model.named_parameters()), result["state"])
        # Each rank draws noise of its own for the sketches of activations; rank 0 has ours.
        assert (logits - result["logits"]).abs().max() <= LOGITS_TOLERANCE

    def test_merge_a_sharded_checkpoint(self, ranks, tmp_path):
        result = ranks("fsdp", "sharded")[0]["whole"]
        saved = ranks.out / "fsdp-sharded"
        merge_fsdp_weights(str(saved / "whole/checkpoint-4/pytorch_model_fsdp_0"), str(tmp_path))
        (tmp_path / "config.json").write_text((saved / "config.json").read_text())
        model, logits = represented(tmp_path)
        same(dict(model.named_parameters()), result["state"])
        assert (logits - result["logits"]).abs().max() <= LOGITS_TOLERANCE

    @pytest.mark.parametrize("source", ["metis", "dense"])
    def test_only_the_first_rank_reads_a_checkpoint(self, ranks, source):
        """cpu_ram_efficient_loading: the other ranks' weights are empty until they are sharded."""
        path = ranks.out / "fsdp-ram_efficient" / source
        split = {"quantization_config": MetisConfig(split_weight=True)}
        options = {} if source == "metis" else split
        for result in ranks("fsdp", "ram_efficient"):
            model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
            same(dict(model.named_parameters()), result[source])


class TestHealth:
    @pytest.mark.parametrize("engine", [*ENGINES, *ZERO])
    def test_written_once_and_of_the_whole_weights(self, ranks, engine):
        ranks(engine, "saving")
        run = ranks.out / f"{engine}-saving" / "whole"
        records = [json.loads(line) for line in (run / HEALTH_FILE).read_text().splitlines()]
        assert [record["step"] for record in records] == [1, 2, 4]
        model, _ = represented(run / "checkpoint-2")
        model.train()
        for name, layer in metis_layers(model):
            assert isinstance(layer, MetisLinear)
            measured = records[1]["layers"][name]
            assert set(measured) == {"weight", "activation", "gradient"}
            assert measured["weight"] == pytest.approx(weight_health(layer), rel=1e-5)
            values = [value for stats in measured.values() for value in stats.values()]
            assert all(math.isfinite(value) for value in values)


class TestErrors:
    def test_mixed_dtypes_under_fsdp2(self, ranks):
        for result in ranks("fsdp", "errors"):
            assert re.search(
                r"ValueError: FSDP2 needs one dtype .* of model\.layers\.1, but .*q_proj\.u is "
                r"torch\.float32, .*up_proj\.u is torch\.bfloat16\. Load .*dtype=torch\.float32",
                result["mixed dtypes"],
            )

    @pytest.mark.parametrize("engine", ENGINES)
    def test_converted_after_prepare(self, ranks, engine):
        for result in ranks(engine, "errors"):
            assert re.search(
                r"ValueError: .* already wrapped \((FSDP|DistributedDataParallel).*convert",
                result["converted too late"],
            )


class TestDeepSpeed:
    @pytest.mark.parametrize("engine", ZERO)
    def test_resume_and_reload(self, ranks, engine):
        results = ranks(engine, "saving")
        for result in results:
            assert result["resumed"]["loss"] == result["whole"]["loss"]
            same(result["resumed"]["state"], result["whole"]["state"])
        model, logits = represented(ranks.out / f"{engine}-saving" / "whole" / "checkpoint-4")
        same(dict(model.named_parameters()), results[0]["whole"]["state"])
        assert (logits - results[0]["whole"]["logits"]).abs().max() <= LOGITS_TOLERANCE

    @pytest.mark.parametrize("engine", ZERO)
    def test_refused(self, ranks, engine):
        for result in ranks(engine, "refused"):
            for asked in ("refresh_interval", "refresh"):
                pattern = rf"NotImplementedError: {asked}.* does not work under DeepSpeed, whose"
                assert re.search(pattern, result[asked])
            late = {"converted too late"} | ({"zero.Init"} if engine == "zero3" else set())
            for when in late:
                assert re.search(r"ValueError: DeepSpeed manages .* before", result[when])
