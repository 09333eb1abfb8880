"""Experiments whose processes are killed: run again, they end like one that nobody disturbed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import psutil
import pytest
from conftest import hear_interrupts
from safetensors.torch import load_file
from tensors import assert_same

from lab.compare import kills
from lab.compare.comparing import CONFIG, METIS_HF, write_config
from metis_hf.cli.main import main
from metis_hf.data import corpus
from metis_hf.lab.compare.command import compare_schemes
from metis_hf.lab.compare.data import embed
from metis_hf.lab.compare.results import load_result

pytestmark = pytest.mark.slow

PRELOADED = ["metis_hf.lab.training_plan", "datasets"]
IN_SAVE, IN_EVALUATION = "kill_in_save", "kill_in_evaluation"
SECONDS = 600  # until a process of a busy machine has come where it is waited for


def killed(target, *args):
    """Run a function in a process of its own, which it does not survive."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=args)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGKILL


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(pid):
    """Whether a process is gone; one that its parent did not wait for is a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def numbers(result):
    losses = [entry["loss"] for entry in result.history]
    return losses, result.loss, result.tasks


class TestRecipe:
    def test_resumes(self, tmp_path, capsys):
        whole, out = tmp_path / "whole", tmp_path / "killed"
        kills.small_recipe(str(whole))
        killed(kills.recipe, str(out), IN_SAVE, "state")
        assert (out / "checkpoint-4").is_dir()
        with pytest.raises(SystemExit):
            kills.small_recipe(str(out))
        assert (
            "already has checkpoints (checkpoint-4); continue with --resume"
            in capsys.readouterr().err
        )
        kills.small_recipe(str(out), "--resume")
        losses = [json.loads((each / "eval_results.json").read_text()) for each in (whole, out)]
        assert losses[0]["eval_loss"] == losses[1]["eval_loss"]
        assert_same(*(load_file(each / "model.safetensors") for each in (whole, out)))
        state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())
        steps = [entry["step"] for entry in state["log_history"] if "loss" in entry]
        assert steps == [1, 2, 3, 4]  # the first two from the checkpoint


def launcher(hook, argument=""):
    """The command that starts a worker with a hook in it."""
    return shlex.join([sys.executable, kills.__file__, hook, str(argument or "-")])


def trained(out, **given):
    """(numbers of the run, or None; the errors) of a comparison of one run."""
    errors = compare_schemes(CONFIG | {"schemes": ["nvfp4"], "seeds": [0]}, out, **given)
    result = load_result(out / "runs/nvfp4/seed-0")
    return None if result is None else numbers(result), errors


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Chunks of a small part of the standard library, as a comparison holds them."""
    folder = tmp_path_factory.mktemp("data") / "data"
    documents = corpus.stdlib_documents()[:100]
    with mock.patch.object(corpus, "stdlib_documents", return_value=documents):
        embed(folder, vocab_size=CONFIG["model"]["vocab_size"], sequence_length=32)
    return folder


@pytest.fixture(scope="module")
def whole_comparison(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare")
    shutil.copytree(data, out / "data")
    return trained(out)


@pytest.fixture
def out(data, tmp_path):
    """The directory of a comparison that has its data."""
    shutil.copytree(data, tmp_path / "out/data")
    return tmp_path / "out"


class TestWorker:
    @pytest.mark.parametrize(("hook", "argument"), [(IN_SAVE, "optimizer"), (IN_EVALUATION, "")])
    def test_goes_on(self, hook, argument, whole_comparison, out, capsys):
        result, (error,) = trained(out, launcher=launcher(hook, argument))
        assert result is None
        assert "exit code -9" in error
        capsys.readouterr()
        assert trained(out) == whole_comparison
        log = (out / "runs/nvfp4/seed-0/worker.log").read_text()
        for text in (log, capsys.readouterr().out):
            assert ("checkpoint-2 is used instead" in text) == (hook == IN_SAVE)


class TestParent:
    @pytest.fixture
    def at_work(self, request, out, tmp_path):
        """(the process of a comparison, the id of its worker, which stays where it is)."""
        file = tmp_path / "pid"
        config = write_config(tmp_path, schemes=["nvfp4"], seeds=[0])
        command = [*METIS_HF, "compare", "--config", str(config), "--out", str(out)]
        command += ["--launcher", launcher(request.param, file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, preexec_fn=hear_interrupts
        ) as process:
            try:
                wait_for(lambda: file.exists() or process.poll() is not None)
                assert process.poll() is None
                yield process, int(file.read_text())
            finally:
                process.kill()

    @pytest.mark.parametrize("at_work", ["stay_in_evaluation"], indirect=True)
    def test_a_second_comparison_is_refused_and_sigterm_ends_the_first(
        self, at_work, out, tmp_path, monkeypatch, capsys
    ):
        process, worker = at_work
        command = ["metis-hf", "compare", "--config", str(tmp_path / "compare.yaml")]
        monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
        run = out / "runs/nvfp4/seed-0"
        before = (run / "run.json").stat().st_mtime_ns
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code == 2
        error = capsys.readouterr().err
        assert f"{out} is in use by process {process.pid} on {socket.gethostname()}" in error
        assert before == (run / "run.json").stat().st_mtime_ns
        assert not ended(worker)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        wait_for(lambda: ended(worker))
        assert not (run / "result.json").exists()

    @pytest.mark.parametrize("at_work", ["stay_in_save"], indirect=True)
    def test_an_interrupted_one_goes_on_to_the_same_numbers(self, at_work, whole_comparison, out):
        process, worker = at_work
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        wait_for(lambda: ended(worker))
        assert trained(out) == whole_comparison

    @pytest.mark.parametrize("at_work", ["stay_in_save"], indirect=True)
    def test_a_worker_does_not_outlive_a_killed_comparison(self, at_work):
        process, worker = at_work
        process.kill()
        wait_for(lambda: ended(worker))
