"""`metis-hf eval` from the command line: results, reuse, tables on disk, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import socket

import pytest
import torch
import transformers
from texts import documents

from lab.evaluate.eval_tools import (
    DATA,
    VOCAB,
    make_model,
    make_tokenizer,
    results,
    run,
    save,
)
from metis_hf.data.corpus import train_tokenizer
from metis_hf.lab.evaluate import command, jobs
from metis_hf.lab.evaluate.held_out import LOSS_TASK, read_text
from metis_hf.lab.evaluate.tasks import LOCAL_TASKS
from metis_hf.lab.store import Store

TEXT = "The clock in the hall struck nine, and nobody came down to breakfast. " * 30


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "held_out.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def evaluated(runs, text, tmp_path_factory):
    """All seven tasks and the loss, with every attempt to reach a network an error."""

    def no_network(*_):
        raise AssertionError("the network was asked")

    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", no_network)
        done = run(
            runs / "bf16", runs / "metis", "--precision", "both", "--tasks-dir", DATA,
            "--text", text, "--out", out,
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    return out, done.output


@pytest.fixture
def asked(monkeypatch):
    """The tasks that are evaluated from now on, in their order."""
    names = []
    plain = jobs.evaluate_model

    def evaluate(model, tokenizer, tasks, **options):
        (task,) = tasks
        names.append(task["task"] if isinstance(task["task"], str) else task["task"][0]["task"])
        return plain(model, tokenizer, tasks, **options)

    monkeypatch.setattr(jobs, "evaluate_model", evaluate)
    return names


def test_result_files_are_lm_evals_with_one_key_more(evaluated):
    from lm_eval.utils import make_table

    out, printed = evaluated
    found = results(out)
    assert set(found) == {"bf16", "metis", "metis, dense"}
    assert "can be evaluated in only one precision" in printed
    for row in found.values():
        assert set(row) == {*LOCAL_TASKS, LOSS_TASK}
        for task in LOCAL_TASKS:
            record = row[task]
            assert task in make_table(record)  # lm-eval reads it as its own
            keys = {"results", "versions", "n-shot", "n-samples", "configs", "higher_is_better",
                    "config", "lm_eval_version", "task_hashes", "model_name", "metis"}  # fmt: skip
            assert keys <= record.keys()
            assert record["config"]["batch_size"] == command.CPU_BATCH_SIZE
            metis = {"label", "scheme", "precision", "quantization_config", "settings"}
            assert metis <= record["metis"].keys()
        for task in ("arc_challenge", "arc_easy", "piqa", "hellaswag"):
            assert "acc_norm,none" in row[task]["results"][task]
    (samples,) = (out / "results/metis").glob("samples_piqa_*.jsonl")
    documents = [json.loads(line) for line in samples.read_text().splitlines()]
    share = sum(one["acc"] for one in documents) / len(documents)
    assert share == found["metis"]["piqa"]["results"]["piqa"]["acc,none"]
    losses = {name: row[LOSS_TASK]["metis"]["held_out_loss"] for name, row in found.items()}
    assert losses["metis, dense"] == losses["bf16"]  # the same weights
    assert losses["metis"] != losses["bf16"]


def test_tables_on_disk(evaluated, runs):
    out, printed = evaluated
    for name in ("md", "tex", "csv"):
        shown = (out / f"table.{name}").read_text()
        positions = [shown.index(t) for t in ("Loss", "ARC-C", "ARC-E", "BoolQ", "LAMBADA", "PIQA",
                                              "RACE", "HellaSwag", "Avg")]  # fmt: skip
        assert name != "csv" or positions == sorted(positions)
        assert "metis, dense" in shown
        assert str(runs) not in shown
    assert "Difference to bf16" in printed
    assert "acc_norm of ARC-C, HellaSwag" in printed


@pytest.mark.slow
def test_finished_results_are_used_again(evaluated, runs, text, tmp_path, monkeypatch, asked):
    """A change of anything that decides the numbers evaluates again."""
    out = shutil.copytree(evaluated[0], tmp_path / "out")
    given = [runs / "metis", "--tasks-dir", DATA, "--text", text, "--out", out]
    done = run(*given)
    assert done.exit_code == 0, done.output
    assert "already finished; using results in" in done.output.replace("\n", " ")
    assert not asked
    given += ["--tasks", "piqa"]
    for changed in (["--overwrite"], ["--limit", 2], ["--batch", 4], ["--dtype", "float32"]):
        assert run(*given, *changed).exit_code == 0
        assert "piqa" in asked
        asked.clear()
    train_tokenizer(documents()[40:80], vocab_size=VOCAB).save_pretrained(tmp_path / "tokenizer")
    retrained = save(tmp_path / "metis" / "model", "metis", make_tokenizer(), seed=1)
    data = shutil.copytree(DATA, tmp_path / "data")
    (data / "piqa.jsonl").write_text((DATA / "piqa.jsonl").read_text() * 2)
    for changed in (
        [*given, "--tokenizer", tmp_path / "tokenizer"],
        [retrained, *given[1:]],
        [*given, "--tasks-dir", data],
    ):
        assert run(*changed).exit_code == 0
        assert "piqa" in asked
        asked.clear()
    with monkeypatch.context() as patch:
        patch.setattr("metis_hf.lab.store.numerics_digest", lambda: "of other code")
        assert run(*given, "--limit", 1).exit_code == 0
    assert "piqa" in asked
    asked.clear()
    assert run(*given).exit_code == 0
    assert not asked


@pytest.mark.slow
def test_a_task_is_evaluated_by_itself_and_once(runs, tmp_path, asked):
    """Whatever else was asked for, and whatever stands beside it, its batches are the same."""
    given = ["--tasks-dir", DATA, "--out", tmp_path / "out"]
    assert run(runs / "metis", *given, "--tasks", "piqa").exit_code == 0
    before = results(tmp_path / "out")["metis"]["piqa"]["results"]
    other = save(tmp_path / "other" / "metis", "metis", make_tokenizer(), seed=1)
    done = run(runs / "metis", other, *given, "--tasks", "race,piqa")
    assert done.exit_code == 0, done.output
    assert asked == ["piqa", "race", "race", "piqa"]
    assert f"{runs.name}/metis: piqa already finished; using results in" in done.output.replace(
        "\n", " "
    )
    done = run(runs / "metis", *given, "--tasks", "race,piqa", "--overwrite")
    assert asked[4:] == ["race", "piqa"]
    assert results(tmp_path / "out")["metis"]["piqa"]["results"] == before


def test_an_interrupted_row_goes_on_behind_its_last_task(runs, tmp_path, monkeypatch, asked):
    given = [runs / "bf16", "--tasks-dir", DATA, "--out", tmp_path, "--tasks", "piqa,race"]
    put, kept = Store.put, []

    def interrupted(store, name, *arguments):
        if kept:
            raise KeyboardInterrupt  # the files of lm-eval are there, the record is not
        kept.append(put(store, name, *arguments))

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", interrupted)
        assert run(*given).exit_code != 0
    assert asked == ["piqa", "race"]
    done = run(*given)
    assert done.exit_code == 0, done.output
    assert "piqa already finished; using results in" in done.output.replace("\n", " ")
    assert asked == ["piqa", "race", "race"]


def test_a_full_disk_is_named(runs, tmp_path, monkeypatch):
    """lm-eval itself logs that a file could not be written, and goes on."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    done = run(runs / "bf16", "--tasks-dir", DATA, "--tasks", "piqa", "--out", tmp_path)
    assert isinstance(done.exception, OSError)
    assert "result of piqa could not be written" in str(done.exception)
    monkeypatch.undo()
    again = run(runs / "bf16", "--tasks-dir", DATA, "--tasks", "piqa", "--out", tmp_path)
    assert again.exit_code == 0, again.output
    assert "already finished" not in again.output


def test_damaged_results_are_named(runs, tmp_path):
    given = [runs / "bf16", "--tasks-dir", DATA, "--tasks", "piqa", "--out", tmp_path]
    given += ["--limit", 2]
    assert run(*given).exit_code == 0
    for pattern, damage in (
        ("results_*.json", lambda text: text[: len(text) // 2]),
        ("results_*.json", lambda text: "{}"),
        ("samples_*.jsonl", lambda text: text[: len(text) // 2]),
        ("samples_*.jsonl", lambda text: text.split("\n")[0]),
        ("*/piqa-*.json", lambda text: text[:9]),
    ):
        (file,) = tmp_path.rglob(pattern)
        whole = file.read_text()
        file.write_text(damage(whole))
        said = str(run(*given).exception)
        assert str(file) in said
        assert "delete" in said
        file.write_text(whole)
    file.write_text("")
    assert run(*given, "--overwrite").exit_code == 0
    assert run(*given).exit_code == 0


def test_a_directory_in_use_is_refused(runs, tmp_path):
    with Store(tmp_path).hold():
        done = run(runs / "bf16", "--tasks-dir", DATA, "--tasks", "piqa", "--out", tmp_path)
    assert "is in use by" in str(done.exception)


def test_a_limit_for_each_task(runs, text, tmp_path):
    done = run(runs / "bf16", "--tasks-dir", DATA, "--tasks", "piqa,race,arc_easy", "--out",
               tmp_path, "--limit", 2, "--limit", "race=1", "--text", text)  # fmt: skip
    assert done.exit_code == 0, done.output
    row = results(tmp_path)["bf16"]
    counts = {task: record["n-samples"][task]["effective"] for task, record in row.items()}
    assert counts == {"piqa": 2, "race": 1, "arc_easy": 2, LOSS_TASK: 1}  # of one document
    said = "Only the first 2 of held_out_loss, PIQA, ARC-E; 1 of RACE: a smoke test, not a result."
    assert said in (tmp_path / "table.md").read_text()


def test_nan_is_shown_flagged_and_never_averaged_away(runs, tokenizer, tmp_path):
    broken = make_model()
    torch.nn.init.constant_(broken.lm_head.weight[7], math.nan)  # every softmax is NaN with it
    broken.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    done = run(runs / "bf16", tmp_path / "broken", "--tasks", "piqa,race", "--tasks-dir", DATA,
               "--out", tmp_path)  # fmt: skip
    assert done.exit_code == 0, done.output
    found = results(tmp_path)["broken dense"]
    assert math.isnan(found["piqa"]["results"]["piqa"]["acc,none"])
    assert found["piqa"]["metis"]["nonfinite"] == {"piqa": 8}
    assert found["race"]["metis"]["nonfinite"] == {"race": 16}
    row = next(r for r in (tmp_path / "table.md").read_text().splitlines() if "| broken" in r)
    assert row.count("NaN (!)") == 3  # two tasks and the average
    assert "8 likelihoods of PIQA are NaN" in done.output.replace("\n", " ")


def test_tasks_of_lm_eval_with_their_own_definition(runs, tmp_path):
    (tmp_path / "words.jsonl").write_text('{"text": "one two three"}\n{"text": "two three four"}\n')
    (tmp_path / "words.yaml").write_text(
        "task: words\ndataset_path: json\noutput_type: loglikelihood_rolling\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/words.jsonl}}}}\n"
        "doc_to_text: ''\ndoc_to_target: text\nmetric_list: [{metric: word_perplexity}]\n"
    )
    given = ["--tasks", "words,piqa", "--tasks-dir", tmp_path, "--out", tmp_path / "out"]
    assert isinstance(run(runs / "bf16", *given).exception, FileNotFoundError)  # piqa's data
    shutil.copy(DATA / "piqa.jsonl", tmp_path)
    done = run(runs / "bf16", *given)
    assert done.exit_code == 0, done.output
    assert "word_perplexity of words" in done.output
    assert "The average leaves out words" in done.output


def test_loss_alone_of_json_lines(runs, tokenizer, tmp_path):
    # Of a template, lm-eval would evaluate the last two as Python.
    texts = [TEXT[:700], TEXT[:900], "[" + ", ".join(map(str, range(200))) + "]", "['a', 'b']"]
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = run(runs / "bf16", "--tasks", "none", "--text", file, "--out", tmp_path,
               "--dtype", "bfloat16")  # fmt: skip
    assert done.exit_code == 0, done.output
    record = results(tmp_path)["bf16"][LOSS_TASK]
    assert record["metis"]["held_out_tokens"] == sum(len(tokenizer.encode(t)) for t in texts)
    assert 0 < record["metis"]["held_out_loss"] < 20
    assert record["config"]["model_dtype"] == "torch.bfloat16"


def test_options_of_the_table(evaluated, runs, text, tmp_path, asked):
    """They need finished results only."""
    out = tmp_path / "out"
    for folder in (jobs.RESULTS, jobs.FINISHED):
        shutil.copytree(evaluated[0] / folder, out / folder)
    done = run(
        runs / "bf16", runs / "metis", "--precision", "both", "--tasks-dir", DATA, "--text",
        text, "--out", out, "--metric", "acc", "--control", "metis, dense", "--paper", "gpt2-130m",
        "--format", "csv",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    shown = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert shown == {jobs.RESULTS, jobs.FINISHED, "table.csv"}
    assert "Difference to metis, dense" in done.output
    assert "Shown: acc of ARC-C, ARC-E" in done.output
    assert "FP4-Metis (published)" in done.output
    assert not asked


def test_digest_of_a_tokenizer(tokenizer):
    """Special tokens count, and what a call leaves in the tokenizer does not."""
    before = jobs.tokenizer_digest(tokenizer)
    tokenizer("one two three", truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert jobs.tokenizer_digest(tokenizer) == before
    other = make_tokenizer()
    assert jobs.tokenizer_digest(other) == before
    other.bos_token = "a"  # rolling likelihoods begin with it, and the tokenizer's file lacks it
    assert jobs.tokenizer_digest(other) != before
    assert jobs.tokenizer_digest(train_tokenizer(documents()[:9], vocab_size=300)) != before


def test_a_batch_size_is_tried_on_what_tasks_are_known_to_need():
    for context, changes, tokens in (
        (131_072, {}, 2048),
        (1024, {}, 1024),
        (131_072, {"loss_text": "held_out.txt"}, 131_072),
        (131_072, {"tasks": ("piqa", "longbench")}, 131_072),
    ):
        config = transformers.LlamaConfig(max_position_embeddings=context)
        assert command.longest_sequence(config, command.Options(**changes)) == tokens


def test_the_batch_size_that_was_chosen_is_remembered(runs, text, tmp_path, monkeypatch):
    """Another one would change the numbers, and what is finished would not be found."""
    sizes = iter([4, 2])
    monkeypatch.setattr(command, "largest_batch_size", lambda model, tokens: next(sizes))
    monkeypatch.setattr(command, "device_of", lambda name: torch.device("cuda"))
    monkeypatch.setattr(command, "device_name", lambda device: "a GPU")
    load = command.Checkpoint.load
    monkeypatch.setattr(
        command.Checkpoint, "load", lambda one, p, d, device: load(one, p, d, torch.device("cpu"))
    )
    given = [runs / "bf16", "--tasks", "none", "--text", text, "--out", tmp_path]
    for options, size, said in (([], 4, False), ([], 4, True), (["--overwrite"], 2, False)):
        done = run(*given, *options)
        assert done.exit_code == 0, done.output
        assert f"Batch size {size} for all rows" in done.output
        assert ("as chosen in an earlier run" in done.output) == said


def test_held_out_text_is_read_as_it_is_meant(tmp_path):
    """Without a byte order mark, with the line ends that Python knows."""
    for ending, content in (("txt", b"Nine.\r\nTen."), ("jsonl", b'{"text": "Nine.\\nTen."}')):
        path = tmp_path / f"held_out.{ending}"
        path.write_bytes(b"\xef\xbb\xbf" + content)
        assert read_text(path).documents == ["Nine.\nTen."]
