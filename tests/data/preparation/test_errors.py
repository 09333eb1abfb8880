"""Arguments and sources that no dataset can be made of."""

from __future__ import annotations

import math
import runpy
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from data.preparation.sources import FOREIGN, VOCAB, english_texts, write_source
from metis_hf.data import PrepareArguments, prepare
from metis_hf.data.corpus import Document, train_tokenizer
from metis_hf.shared.locks import hold_directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 1}, "seq_len=1; choose at least 2"),
        ({"validation_share": 1.0}, "validation_share=1.0"),
        ({"num_proc": 0}, "num_proc=0"),
        ({"files": []}, "files is empty; give paths, or None"),
        ({"files": "a.jsonl"}, r"files='a.jsonl' is one string; give a list, \['a.jsonl'\]"),
        ({"output_dir": "a::b"}, "output_dir='a::b': datasets takes a path with '::' for a URL"),
        ({"files": ["absent/*.jsonl"]}, "absent/.*no such file"),
        ({"files": ["LICENSE"]}, "names must end in .jsonl or .txt"),
        ({"text_column": "body"}, "no column 'body'; its columns are: id, text.*--text-column"),
        ({"perplexity_tokens": 64}, "do not fit the context of .*choose at most 63"),
        ({"seq_len": 10**6}, "less than one sequence of seq_len=1000000; documents dropped: .*uni"),
    ],
)
def test_errors(changes, message, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(arguments(**changes))


def test_error_for_mixed_kinds(tmp_path, source, arguments):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="mixes kinds"):
        prepare(arguments(files=[*source, str(tmp_path / "a.txt")]))


def test_error_for_a_file_that_is_not_json_lines(tmp_path, arguments):
    (tmp_path / "a.jsonl").write_text("plain text\n")
    with pytest.raises(ValueError, match="is not JSON lines: its first line is 'plain text'"):
        prepare(arguments(files=[str(tmp_path / "a.jsonl")]))


def test_error_for_an_unknown_or_numeric_parquet_column(tmp_path, raw, arguments):
    files = write_source("parquet", tmp_path / "files", raw)
    with pytest.raises(ValueError, match="no column 'body'; its columns are: id, text"):
        prepare(arguments(files=files, text_column="body"))
    output = str(tmp_path / "other")
    with pytest.raises(ValueError, match="column 'id' holds int64, not text"):
        prepare(arguments(files=files, text_column="id", output_dir=output))


def test_error_for_parquet_without_rows_or_cut_short(tmp_path, arguments):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: no file has rows"):
        prepare(arguments(files=[str(path)]))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"a\.parquet is not parquet"):
        prepare(arguments(files=[str(path)]))


def test_error_when_nothing_is_left(tmp_path, arguments):
    (tmp_path / "a.txt").write_text(FOREIGN[1])
    said = r"1 documents were read and 0 training.*language 1.*delete .*out or choose another --o"
    with pytest.raises(ValueError, match=said):
        prepare(arguments(files=[str(tmp_path / "a.txt")]))
    (tmp_path / "b.jsonl").write_text("")
    output = str(tmp_path / "other")
    with pytest.raises(ValueError, match="0 documents were read"):
        prepare(arguments(files=[str(tmp_path / "b.jsonl")], output_dir=output))


def test_error_for_a_tokenizer_without_end_of_text(tmp_path, reference, arguments):
    tokenizer = AutoTokenizer.from_pretrained(reference)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="has no eos_token"):
        prepare(arguments(tokenizer=str(tmp_path / "tokenizer")))


def test_error_for_a_directory_with_other_files(tmp_path, arguments):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="is not empty and holds no preparation"):
        prepare(arguments())


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokenizer": "no/such/tokenizer"},
        {"reference_model": "no/such/model"},
        {"perplexity_tokens": 64},
        {"text_column": "body"},
    ],
)
def test_what_is_refused_claims_no_directory(wrong, tmp_path, arguments):
    """The command with that argument corrected goes on."""
    with pytest.raises((OSError, ValueError)):
        prepare(arguments(**wrong))
    assert not (tmp_path / "out").exists()


def test_what_a_reference_model_lacks_is_said_before_anything_is_read(
    tmp_path, reference, arguments
):
    place = tmp_path / "reference"
    tokenizer = AutoTokenizer.from_pretrained(reference)
    shutil.copytree(reference, place)
    (place / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"reference has no weights .*; save the model"):
        prepare(arguments(reference_model=str(place)))
    (tmp_path / "model.safetensors").rename(place / "model.safetensors")
    tokenizer.bos_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(place)
    with pytest.raises(ValueError, match="neither a bos_token nor an eos_token"):
        prepare(arguments(reference_model=str(place)))
    larger = train_tokenizer([Document("", text) for text in english_texts()], VOCAB + 1)
    larger.save_pretrained(place)
    with pytest.raises(
        ValueError, match=f"gives tokens up to {VOCAB}, and the model knows {VOCAB}"
    ):
        prepare(arguments(reference_model=str(place)))
    assert not (tmp_path / "out").exists()


def test_one_process_at_a_time(tmp_path, arguments):
    with (
        hold_directory(tmp_path / "out"),
        pytest.raises(ValueError, match=r"is in use by .* choose another --output-dir"),
    ):
        prepare(arguments())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "no/such/tokenizer", "--files", "LICENSE"], "LICENSE"),
        (["--tokenizer", "no/such/tokenizer", "--files", "{source}"], "no/such/tokenizer"),
        (["--tokenizer", "x", "--seq-len", "1"], "seq_len=1; choose at least 2"),
    ],
)
def test_the_recipe_shows_no_traceback(options, message, source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    options = [option.format(source=source[0]) for option in options]
    monkeypatch.setattr(sys, "argv", ["x", "--output-dir", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit):
        runpy.run_path("recipes/prepare_data.py", run_name="__main__")
    error = capsys.readouterr().err
    assert error.startswith("prepare_data.py: ")
    assert message in error


def test_error_for_a_reference_model_that_gives_nan(tmp_path, reference, arguments):
    model = AutoModelForCausalLM.from_pretrained(reference)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(reference).save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="gives a loss that is not finite"):
        prepare(arguments(reference_model=str(tmp_path / "broken")))


def test_help_says_what_the_option_that_keeps_documents_does(capsys):
    """transformers shows one text for an option and its opposite."""
    with pytest.raises(SystemExit):
        HfArgumentParser(PrepareArguments).parse_args(["--help"])
    said = "".join(capsys.readouterr().out.split())  # argparse breaks lines at hyphens too
    assert said.count("--no-perplexity-filterkeepsthem") == 2
