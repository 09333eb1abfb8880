"""Comparisons on a folder of plain text: what is tokenized, what is held out, what is refused."""

from __future__ import annotations

import json
import lzma
import sys

import pytest
from transformers import AutoTokenizer

from lab.compare.comparing import run, write_config
from metis_hf.cli.main import main
from metis_hf.data.corpus import END_OF_TEXT
from metis_hf.lab.compare.data import embed, load_data
from metis_hf.lab.compare.plan import make_plan
from metis_hf.lab.compare.variants import Experiment

FIRST = [f"the first document, line {number * number}\n" * 3 for number in range(200)]
SECOND, HELD_OUT = "a second shard, packed\n" * 60, "held out words\n" * 60
LENGTH, VOCAB = 16, 320


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text(f"\n{END_OF_TEXT}\n".join(FIRST))
    (folder / "b.txt.xz").write_bytes(lzma.compress(SECOND.encode()))
    (folder / "val.txt").write_text(HELD_OUT)
    return folder


def opened(directory):
    """(training sequences in a seed's order, held-out sequences, tokenizer)"""
    model = {"vocab_size": VOCAB}
    experiment = Experiment(
        model=model, training={}, sequence_length=LENGTH, health_interval=0, seed=0
    )
    return load_data(directory, None, experiment, 1000)


def text_of(rows, tokenizer):
    return [tokenizer.decode(row) for row in rows["input_ids"]]


def test_every_document_is_trained_on(folder, tmp_path):
    embed(tmp_path / "data", vocab_size=VOCAB, sequence_length=LENGTH, text=folder)
    train, held_out, tokenizer = opened(tmp_path / "data")
    assert "".join(text_of(held_out, tokenizer)) in HELD_OUT.strip() + END_OF_TEXT
    texts = [text.strip("\n") for text in (*FIRST, SECOND)]
    whole = END_OF_TEXT.join(texts) + END_OF_TEXT
    assert all(text in whole for text in text_of(train, tokenizer))
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in texts)
    assert len(train) == tokens // LENGTH


def test_no_more_is_kept_than_asked(folder, tmp_path):
    embed(tmp_path / "data", vocab_size=VOCAB, sequence_length=LENGTH, text=folder,
          tokens=40 * LENGTH, held_out_tokens=3 * LENGTH)  # fmt: skip
    train, held_out, _ = opened(tmp_path / "data")
    assert (len(train), len(held_out)) == (40, 3)


def test_a_tokenizer_of_the_model_is_kept(folder, tmp_path):
    """As where runs continue a checkpoint: its tokens, not those of another vocabulary."""
    embed(tmp_path / "small", vocab_size=300, sequence_length=LENGTH, text=folder)
    own = AutoTokenizer.from_pretrained(tmp_path / "small" / "tokenizer")
    embed(tmp_path / "data", vocab_size=VOCAB, sequence_length=LENGTH, text=folder, tokenizer=own)
    _, _, tokenizer = opened(tmp_path / "data")
    assert tokenizer.get_vocab() == own.get_vocab()


def test_a_plan_knows_text_from_tokens(folder, tmp_path):
    assert make_plan(data=str(folder)).text == folder
    embed(tmp_path / "data", vocab_size=VOCAB, sequence_length=LENGTH, text=folder)
    assert make_plan(data=str(tmp_path / "data")).text is None
    with pytest.raises(ValueError, match=r"with text data: .* has its own held-out files"):
        make_plan(data=str(folder), validation=str(tmp_path / "data"))


def test_text_without_held_out_files_is_refused_before_anything_is_written(
    folder, tmp_path, monkeypatch, capsys
):
    (folder / "val.txt").unlink()
    out = str(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["metis-hf", "compare", "--data", str(folder), "--out", out])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no file whose name begins with 'val'" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_comparison_trains_on_text(folder, tmp_path):
    config = write_config(tmp_path, schemes=["bf16"], seeds=[0], training={"max_steps": 2})
    done = run("--config", config, "--data", folder, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [each["scheme"] for each in record["runs"]] == ["bf16"]
