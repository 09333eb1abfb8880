"""The comparison with vLLM: its record, its bound, and its end where vLLM is not installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import engine
import pytest
import report
import torch
import writers
from conftest import VOCAB, llama
from forked import python
from paths import ROOT
from safetensors.torch import load_file, save_file

from metis_hf import MetisConfig, calibrate, get_metis_model
from metis_hf.deploy import export_checkpoint

BENCHMARKS = Path(engine.__file__).parent
RECORD = json.loads((BENCHMARKS / "results/engine.json").read_text())
RAN = [row for row in RECORD["rows"] if "refused" not in row]
WRITTEN = RECORD["llm-compressor"]["models"]


def test_every_case_is_in_the_record():
    assert [row["model"] for row in RECORD["rows"]] == [*engine.MODELS, engine.SMOLLM2]
    assert {row["model"] for row in RECORD["rows"] if "refused" in row} <= {"Qwen3-MoE"}
    dense = [row["model"] for row in RECORD["rows"] if "MoE" not in row["model"]]
    assert [row["model"] for row in WRITTEN] == dense


@pytest.mark.parametrize("row", RAN, ids=lambda row: row["model"])
def test_vllm_is_within_the_bound_and_an_engine_that_leaves_inputs_alone_is_not(row):
    found = row["w4a4"]
    assert engine.holds(found["vllm"], found["ours_bf16"])
    assert not engine.holds(found["inputs_dense"], found["ours_bf16"])
    assert engine.holds(row["dense"]["vllm"], row["dense"]["transformers_bf16"])
    # vLLM's greedy token can only win where its errors outweigh what our model prefers.
    assert row["greedy"]["most_given_up"] <= 2 * found["vllm"]["largest"]
    assert row["modelopt_equal"]  # it answers the same, to the bit, for ModelOpt's layout


def test_an_adapter_is_served_and_counts():
    found = RECORD["adapter"]["w4a4"]
    assert engine.holds(found["vllm"], found["ours_bf16"])
    assert not engine.holds(found["without"], found["ours_bf16"])


def test_vllm_stops_on_a_cpu_where_the_guide_says_so():
    page = (ROOT / "docs/finetuning.md").read_text()
    assert "stops at packed experts | stops: it asks for Marlin |" in page
    (experts,) = (row["refused"] for row in RECORD["rows"] if "refused" in row)
    assert "MoE backend" in experts
    assert "Marlin" in RECORD["w4a16"]


@pytest.mark.parametrize("found", WRITTEN, ids=lambda row: row["model"])
def test_llm_compressor_writes_the_same_tensors(found):
    """Its config has the names of its observers too; its scales of weights use all of E4M3."""
    assert found["tensors"] > 0
    assert not found["other_keys"]
    assert not found["other_types"]
    notes = ("observer", "observer_kwargs", "sparsity_config", "transform_config", "version")
    assert {path.rpartition(".")[2] for path in found["other_config"]} <= set(notes)
    low, high = found["ours_over_theirs"]["weight_global_scale"]
    bf16 = 2**-8  # it divides in BF16
    assert 4 / 7 * (1 - 2 * bf16) <= low <= high <= 4 / 7 * (1 + 2 * bf16)


def test_tensors_are_exchanged_by_kind(tmp_path):
    """Of two checkpoints that differ in the scales of inputs alone."""
    prompts = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))
    model = llama()
    dense = {key: value.clone() for key, value in model.state_dict().items()}
    calibrate(get_metis_model(model, MetisConfig(scheme="w4a4")), [prompts])
    model.save_pretrained(tmp_path / "metis")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    export_checkpoint(tmp_path / "metis", ours, format="compressed-tensors")
    shutil.copytree(ours, theirs)
    changed = {
        key: value / 8 if key.endswith("input_global_scale") else value
        for key, value in load_file(ours / writers.FILE).items()
    }
    save_file(changed, theirs / writers.FILE, {"format": "pt"})
    found = writers.exchanged(ours, theirs, dense, {"text": prompts})
    losses, errors = found["losses"]["text"], found["weight_error"]
    assert losses.keys() == {"ours", "inputs", "all"}  # no other tensor differs
    assert losses["inputs"] == losses["all"]
    assert losses["inputs"]["rms"] > 0
    assert errors["ours"] == errors["llm_compressor"]
    assert 0.07 < errors["ours"] ** 0.5 < 0.1  # of normal weights


def test_a_bound_that_nothing_else_passes():
    exact = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) - 5
    noise = torch.randn(2, 4, 100, generator=torch.Generator().manual_seed(1)) / 100
    own, other = (engine.beside(exact + each, exact) for each in noise)
    assert engine.holds(other, own)
    assert not engine.holds(engine.beside(exact + noise[1] - 0.01, exact), own)  # a larger loss
    assert not engine.holds(engine.beside(exact + 2 * noise[1], exact), own)  # other tokens
    shifted = engine.beside(exact - 0.25, exact)
    assert shifted["difference"] == pytest.approx(0.25)
    assert shifted["loss"] == pytest.approx(0.25 - exact.mean().item())


def test_the_table_has_every_case_and_says_what_was_refused():
    lines = engine.markdown(RECORD).splitlines()[2:]
    for row, line in zip(RECORD["rows"], lines, strict=True):
        assert line.startswith(f"| {row['model']} |")
        assert ("not run" in line) == ("refused" in row)
    assert engine.markdown(RECORD) == report.tables()["engine"]


def test_numbers_of_the_docs_are_the_record_s():
    page = re.sub(r"\s+", " ", (ROOT / "docs/formats.md").read_text())
    big = RAN[-1]
    layers = big["layers"]
    computed = [big["w4a4"][name] for name in ("vllm", "compressed_tensors", "ours_bf16")]
    apart = [each["rms"] for each in computed]
    for said in (
        f"{min(apart):.2f} to {max(apart):.2f} nats a token",
        f"differ by {max(apart) / 350**0.5:.2f}".replace(" 0.", " ."),
        f"Over {big['tokens']:,} tokens all three losses are within "
        f"{max(abs(each['difference']) for each in computed):.3f} of it",
        f"moves {100 * layers['scales_moved']:.1f} % of the block scales",
        f"{100 * layers['compressed_tensors']:.1f} % from exact arithmetic",
        f"vLLM's and ours by {100 * layers['vllm']:.2f} %",
        f"{layers['ours_equal_vllm']} of {layers['count']} layers",
    ):
        assert said in page, said


def test_numbers_beside_the_table_are_the_record_s():
    page = re.sub(r"\s+", " ", (BENCHMARKS / "README.md").read_text())
    right = RECORD["lm-eval"]["right"]
    llama, tied = (row["losses"]["prose"]["all"]["difference"] for row in WRITTEN[:2])
    tiny, (big,) = RECORD["llm-compressor"]["over_tiny"], WRITTEN[-1:]
    squared = [e["llm_compressor"] / e["ours"] for e in (row["weight_error"] for row in WRITTEN)]

    def pair(kind):
        cells = (tiny[text][kind] for text in ("prose", "code"))
        return [f"{cell['mean']:+.4f} ± {cell['error']:.4f}" for cell in cells]

    both = [big["losses"][text]["all"] for text in ("prose", "code")]
    for said in (
        f"{right['vllm']} right through vLLM, {right['ours_fp32']} through our own model in fp32 "
        f"and {right['ours_bf16']} in BF16",
        (
            f"the loss of Llama is {-llama:.3f} lower and the loss of tied Llama {tied:.3f} higher"
        ).replace("0.", "."),
        "{} on the Python reference and {} on code".format(*pair("all")),
        "only its weights, {} and {}".format(*pair("weights")),
        "only its input scales, {} and {}".format(*pair("inputs")),
        "{} and {}".format(*(f"{each['difference']:+.3f} ± {each['error']:.3f}" for each in both)),
        f"{min(squared):.2f} to {max(squared):.2f} times our squared error",
    ):
        assert said in page, said


def test_one_line_says_what_to_do_where_vllm_is_not(monkeypatch, capsys):
    monkeypatch.setattr(engine, "ENGINE", Path("not/there"))
    monkeypatch.setattr(sys, "argv", ["engine.py"])
    with pytest.raises(SystemExit, match=r"run `make engine` to install it$"):
        engine.main()


def test_what_runs_in_the_other_environment_imports_nothing_of_this_one(tmp_path):
    """Without arguments it waits for its request: an empty one is an error of the request."""
    script = BENCHMARKS / "in_engine.py"
    program = f"import runpy; runpy.run_path({str(script)!r}); import sys; print(*sys.modules)"
    imported = python("-I", "-S", "-c", program).split()
    assert not {"metis_hf", "torch", "vllm"} & set(imported)


def test_make_engine_runs_the_script_in_the_project_s_environment(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "ran $*"\n')
    python.chmod(0o755)
    ready = [tmp_path / ".installed", tmp_path / "engine/.installed"]
    ready[1].parent.mkdir()
    command = ["make", "-s", "-C", ROOT, "engine", f"VENV={tmp_path}", f"BIN={tmp_path}"]
    command += [f"ENGINE={tmp_path / 'engine'}", "ARGS=--quick"]
    for file in ready:
        file.touch()
        command += ["-o", file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "ran benchmarks/engine.py --quick\n"
