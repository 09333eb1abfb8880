"""What `metis-hf eval` refuses, and when."""

from __future__ import annotations

import pytest
import transformers
from conftest import t5
from texts import documents

from lab.evaluate.eval_tools import DATA, run, save
from metis_hf.data.corpus import train_tokenizer


@pytest.mark.slow
def test_refusals(runs, tmp_path):
    def refused(*arguments):
        done = run(runs / "bf16", "--out", tmp_path / "out", *arguments)
        assert isinstance(done.exception, ValueError | OSError), done.output
        assert not (tmp_path / "out" / "results").exists()
        return str(done.exception)

    assert "tasks-dir" in refused("--tasks-dir", tmp_path / "nowhere")
    local = ("--tasks-dir", DATA, "--tasks")
    assert "fixtures/eval/mmlu.yaml is missing" in refused(*local, "mmlu")
    assert "unknown tasks ['piqq'] (names similar to the first: ['piqa'" in refused(
        "--tasks", "piqa,piqq"
    )
    assert "named twice: piqa" in refused(*local, "piqa,piqa")
    for limit in ("0", "-3", "few", "=3", "race="):
        assert f"limit {limit!r}; expected a number of items" in refused(f"--limit={limit}")
    assert "limit for race, which is not" in refused("--limit", "race=2", *local, "piqa")
    assert "--batch 'big'; expected auto" in refused("--batch", "big")
    assert "unknown format png; choose from md, tex, csv" in refused("--format", "png")
    assert "metric 'f1'; expected acc" in refused("--metric", "f1")
    assert "metric for race, which is not" in refused("--metric", "race=acc", *local, "piqa")
    assert "device='warp'" in refused("--device", "warp", *local, "piqa")
    assert "device='cuda:99'" in refused("--device", "cuda:99", *local, "piqa", "--batch", 1)
    assert "nothing to evaluate" in refused("--tasks", "none")


def test_refused_before_the_first_evaluation(runs, tokenizer, tmp_path, monkeypatch):
    def evaluate(*_, **__):
        raise AssertionError("evaluated")

    monkeypatch.setattr("metis_hf.lab.evaluate.jobs.evaluate_model", evaluate)
    out = tmp_path / "out"

    def refused(*arguments, out=out):
        done = run(*arguments, "--tasks-dir", DATA, "--tasks", "piqa", "--out", out)
        assert isinstance(done.exception, ValueError), done.output
        return str(done.exception)

    good = runs / "bf16"
    t5(vocab_size=512).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    assert "t5 model, not a causal language model" in refused(good, tmp_path / "t5")

    dense = save(tmp_path / "dense", None, tokenizer)
    assert "has no row of gpt2-130m for any of the evaluated schemes (dense)" in refused(
        dense, "--paper", "gpt2-130m"
    )
    train_tokenizer(documents()[:40], vocab_size=600).save_pretrained(tmp_path / "other")
    said = refused(good, "--tokenizer", tmp_path / "other")
    assert "other) produces tokens up to 599, but the model's vocabulary has 512" in said
    without = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    without.save_pretrained(tmp_path / "without")
    said = refused(good, "--tokenizer", tmp_path / "without")
    assert "without) has neither a bos_token nor an eos_token" in said
    assert not out.exists()
    out.write_text("a file")
    assert "out cannot be written to (" in refused(good)
    assert "out/below cannot be written to (" in refused(good, out=out / "below")


def test_unusable_text(runs, tmp_path):
    for name, content, message in (
        ("empty.txt", b"  \n", "is empty; give held-out text"),
        ("short.txt", b"Nine words are too few to measure a loss.", "needs at least 100"),
        ("binary.txt", b"\xff\xfe", "is not UTF-8"),
        ("named.txt", b'\xef\xbb\xbf{"text": "x"}\n', "is plain text; rename it to named.jsonl"),
        ("rows.jsonl", b'{"text": "x"}\n{"txt": "x"}\n', 'line 2: field "text" is missing'),
        ("half.jsonl", b'{"text": "x"}\n{"text": "cut \\ud83d"}\n', "line 2: \\ud83d is one half"),
        ("cut.jsonl", b'{"text": "x"}\n{"te', "line 2 is not JSON"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        done = run(runs / "bf16", "--tasks", "none", "--text", file, "--out", tmp_path)
        assert isinstance(done.exception, ValueError)
        assert message in str(done.exception)
        assert name in str(done.exception)
