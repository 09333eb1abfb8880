"""A preparation that is stopped, killed, repeated or changed.

Half a minute of one core, most of it the test that kills real processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from data.preparation.sources import contents, json_line, write_source
from metis_hf.data import load_chunked, prepare
from metis_hf.shared import records

preparation = sys.modules[prepare.__module__]  # the function hides the module of its name


class Killed(BaseException):
    """Nothing in the package catches it."""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_stopped_before_and_in_the_middle_of_any_write(
    kind, tmp_path, raw, arguments, filtered, monkeypatch
):
    """Parquet up to `max_tokens`, which are there in the middle of the fourth part."""
    wanted, changes = filtered, {}
    if kind == "parquet":
        files = write_source(kind, tmp_path / "files", raw)
        changes = {"files": files, "max_tokens": 5000, "perplexity_filter": False}
        changes |= {"documents_per_part": 7}
        assert 21 < prepare(arguments(**changes))["read"]["documents"] < 28
        wanted = contents(tmp_path / "out")
    complete = os.replace
    renames: list[str] = []

    def counted(old, new):
        renames.append(str(new))
        complete(old, new)

    output = tmp_path / "again"
    monkeypatch.setattr(records.os, "replace", counted)
    prepare(arguments(output_dir=str(output), **changes))
    writes = len(renames)
    assert writes > 10
    shutil.rmtree(output)
    renames.clear()

    def stop_once(old, new):
        if str(new) in renames:
            return complete(old, new)
        renames.append(str(new))
        Path(old).write_bytes(Path(old).read_bytes()[:10])  # half written, never renamed
        raise Killed

    monkeypatch.setattr(records.os, "replace", stop_once)
    stops = 0
    for _ in range(writes + 1):
        try:
            prepare(arguments(output_dir=str(output), **changes))
            break
        except Killed:
            stops += 1
    assert stops == writes
    assert contents(output) == wanted


KILLED_AT = """
import os, runpy, signal, sys
recipe, mark = sys.argv[1:3]
del sys.argv[1:3]
replace = os.replace
def replace_or_die(old, new):
    if str(new).endswith(mark):
        os.killpg(0, signal.SIGKILL)  # this process and its workers
    replace(old, new)
os.replace = replace_or_die
runpy.run_path(recipe, run_name="__main__")
"""


@pytest.mark.slow
def test_killed_processes_leave_nothing_wrong(tmp_path, arguments, source, filtered):
    """SIGKILL in each stage; the next run with the same command goes on."""
    output = tmp_path / "killed"
    options = ["--files", *source, "--output-dir", str(output), "--num-proc", "2"]
    for name, value in arguments().in_result().items():
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            options += [f"--{name.replace('_', '-')}", str(value)]
    recipe = str(ROOT / "recipes" / "prepare_data.py")
    for mark in ("documents/part-00001.json", "perplexity/part-00001.npy", "shard-00002.parquet"):
        command = [sys.executable, "-c", KILLED_AT, recipe, mark, *options]
        process = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        assert process.returncode == -signal.SIGKILL, process.stderr
        with pytest.raises(FileNotFoundError, match="not finished"):
            load_chunked(output)
    command = [sys.executable, recipe, *options]
    assert "perplexity   dropped" in subprocess.check_output(command, text=True)
    assert contents(output) == filtered
    report = prepare(arguments(output_dir=str(output)))  # finished: nothing happens any more
    assert report == json.loads(filtered["report.json"])
    assert contents(output) == filtered


def test_processes_change_no_byte(tmp_path, arguments, filtered):
    prepare(arguments(num_proc=2))
    assert contents(tmp_path / "out") == filtered


def test_other_arguments_are_refused_by_name(tmp_path, arguments, source):
    prepare(arguments(perplexity_filter=False))
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=r"seq_len was 64, now 32\. Run it with those"):
        prepare(arguments(perplexity_filter=False, seq_len=32))
    prepare(arguments(perplexity_filter=False, num_proc=2))  # not part of the result
    assert contents(tmp_path / "out") == before


def test_another_device_of_the_reference_model_is_refused(tmp_path, arguments, monkeypatch):
    """Perplexities differ from device to device, and with them the documents."""

    def killed(*args):
        raise Killed

    monkeypatch.setattr(preparation, "_read_stage", killed)  # the directory is claimed before
    with pytest.raises(Killed):
        prepare(arguments())
    monkeypatch.setattr("metis_hf.data.ownership.device_type", lambda: "tpu")
    with pytest.raises(ValueError, match=r"reference_device was '.*', now 'tpu'"):
        prepare(arguments())


@pytest.mark.parametrize("what", ["tokenizer", "reference_model"])
def test_a_changed_model_is_refused(what, tmp_path, reference, arguments, monkeypatch):
    """Half of the parts would have the ids of another tokenizer, or other outliers."""
    own = shutil.copytree(reference, tmp_path / "own")
    changes = {what: str(own)}

    def killed(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_write_stage", killed)
        with pytest.raises(Killed):
            prepare(arguments(**changes))
    name = "tokenizer.json" if what == "tokenizer" else "config.json"
    text = (own / name).read_text()
    (own / name).write_text(f"{text}\n")
    with pytest.raises(ValueError, match=rf"what lies at {own} has changed"):
        prepare(arguments(**changes))
    (own / name).write_text(text)
    prepare(arguments(**changes))


def test_a_changed_source_is_refused(tmp_path, raw, arguments, monkeypatch):
    files = write_source("jsonl", tmp_path / "files", raw)
    prepare(arguments(files=files, perplexity_filter=False))
    with open(files[1], "ab") as file:
        file.write(json_line(b"one more document"))
    with pytest.raises(ValueError, match=r"what lies at .*b\.jsonl has changed"):
        prepare(arguments(files=files, perplexity_filter=False))
