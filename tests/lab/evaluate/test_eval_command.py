"""`metis-hf eval` from the command line: results, reuse, tables on disk, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import socket

import pytest
import torch
from lm_eval.utils import make_table
from texts import documents

from lab.evaluate.eval_tools import CONTEXT, DATA, VOCAB, make_model, make_tokenizer, run, save
from metis_hf.data.corpus import train_tokenizer
from metis_hf.lab.evaluate import jobs, plan
from metis_hf.lab.evaluate.local_tasks import LOCAL_TASKS
from metis_hf.shared.locks import hold_directory

TEXT = "The clock in the hall struck nine, and nobody came down to breakfast. " * 30
SAME_FLOAT32 = 1e-5


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
            "--loss-text", text, "--out", out,
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    return out, done.output


def results(out):
    """Return row -> task -> what its result file holds."""
    found = {}
    for path in sorted((out / "results").glob("*.json")):
        label, precision, task, _ = path.name.removesuffix(".json").rsplit(".", 3)
        found.setdefault(f"{label}.{precision}", {})[task] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_seven_tasks_and_the_loss_give_numbers(evaluated, runs):
    out, printed = evaluated
    records = results(out)
    assert set(records) == {"bf16.dense", "metis.scheme", "metis.dense"}
    assert "one evaluation is all there is" in printed
    for row in records.values():
        assert set(row) == {*LOCAL_TASKS, plan.LOSS_TASK}
        for task in LOCAL_TASKS:
            record = row[task]
            assert 0 <= record["results"][task]["acc,none"] <= 1
            keys = {"results", "versions", "n-shot", "n-samples", "configs", "higher_is_better"}
            assert keys | {"config", "lm_eval_version", "transformers_version"} <= record.keys()
            assert "custom_dataset" not in record["configs"][task]
            assert record["configs"][task]["dataset_kwargs"]["data_files"]
            assert task in make_table(record)  # lm-eval reads it as its own
            ours = record["metis"]
            assert ours["batch_size"] == ours["settings"]["batch_size"] == plan.CPU_BATCH_SIZE
            assert list(ours["items"]) == [task]
            assert list(ours["settings"]["data_sha256"]) == [f"{task}.jsonl"]
            share = ours["items"][task]["acc"].count("1") / len(ours["items"][task]["acc"])
            assert share == record["results"][task]["acc,none"]
        for task in ("arc_challenge", "arc_easy", "piqa", "hellaswag"):
            assert "acc_norm,none" in row[task]["results"][task]
    losses = {name: row[plan.LOSS_TASK]["metis"]["held_out_loss"] for name, row in records.items()}
    assert losses["metis.dense"] == losses["bf16.dense"]  # the same weights
    assert losses["metis.scheme"] != losses["metis.dense"]
    assert str(runs) not in (out / "table.md").read_text()


def test_loss_is_the_models_cross_entropy(evaluated, tokenizer):
    out, _ = evaluated
    measured = results(out)["bf16.dense"][plan.LOSS_TASK]["metis"]
    ids = tokenizer.encode(TEXT)
    assert measured["held_out_tokens"] == len(ids)
    model, total = make_model(), 0.0
    for start in range(0, len(ids), CONTEXT):
        window = ids[start : start + CONTEXT]
        first = max(0, start + len(window) - CONTEXT)  # the last window is filled up
        before = [tokenizer.eos_token_id, *ids][first : start + 1]
        batch = torch.tensor([before + window])
        with torch.no_grad():
            logits = model(batch).logits[0, len(before) - 1 : -1].double()
        target = torch.tensor(window)[:, None]
        total -= logits.log_softmax(-1).gather(1, target).sum().item()
    assert measured["held_out_loss"] == pytest.approx(total / len(ids), rel=SAME_FLOAT32)


def test_tables_on_disk(evaluated):
    out, printed = evaluated
    for name in ("md", "tex", "csv"):
        shown = (out / f"table.{name}").read_text()
        positions = [shown.index(t) for t in ("Loss", "ARC-C", "ARC-E", "BoolQ", "LAMBADA", "PIQA",
                                              "RACE", "HellaSwag", "Avg")]  # fmt: skip
        assert name != "csv" or positions == sorted(positions)
        assert "metis, dense" in shown
    assert "Difference to bf16" in printed
    assert "acc_norm of ARC-C, HellaSwag" in printed


def test_finished_results_are_used_again_and_said_so(evaluated, runs, text, monkeypatch, tmp_path):
    out, _ = evaluated
    again = shutil.copytree(out, tmp_path / "out")

    def evaluate(*_, **__):
        raise AssertionError("evaluated again")

    monkeypatch.setattr("metis_hf.lab.evaluate.jobs.evaluate_model", evaluate)
    arguments = [runs / "metis", "--tasks-dir", DATA, "--loss-text", text, "--out", again]
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert "finished before, taken from" in done.output.replace("\n", " ")
    for changed in (["--overwrite"], ["--limit", 2], ["--batch-size", 4], ["--dtype", "float32"]):
        assert isinstance(run(*arguments, *changed).exception, AssertionError)
    train_tokenizer(documents()[40:80], vocab_size=VOCAB).save_pretrained(tmp_path / "tokenizer")
    changed = ["--tokenizer", tmp_path / "tokenizer"]
    assert isinstance(run(*arguments, *changed).exception, AssertionError)
    retrained = save(tmp_path / "metis" / "model", "metis", make_tokenizer(), seed=1)
    assert isinstance(run(retrained, *arguments[1:]).exception, AssertionError)
    for place, other in (
        ("metis_hf.lab.evaluate.store.code_digest", lambda: "of other code"),
        ("metis_hf.lab.evaluate.command.device_of", lambda name: torch.device("meta")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, other)
            refused = run(*arguments, "--batch-size", plan.CPU_BATCH_SIZE).exception
        assert isinstance(refused, AssertionError)
    assert run(*arguments).exit_code == 0
    other = shutil.copytree(DATA, tmp_path / "data")
    (other / "piqa.jsonl").write_text((DATA / "piqa.jsonl").read_text() * 2)
    arguments[2] = other
    assert isinstance(run(*arguments).exception, AssertionError)


def test_results_are_found_whatever_stands_beside_them(runs, tmp_path, monkeypatch):
    """A checkpoint of the same name gives both longer labels, which begin the files' names."""
    arguments = ["--tasks-dir", DATA, "--tasks", "piqa", "--out", tmp_path / "out"]
    assert run(runs / "bf16", *arguments).exit_code == 0
    asked = []
    plain = jobs.evaluate_model
    monkeypatch.setattr(jobs, "evaluate_model", lambda *a, **o: asked.append(a) or plain(*a, **o))
    other = save(tmp_path / "other" / "bf16", None, make_tokenizer(), seed=1)
    done = run(runs / "bf16", other, *arguments)
    assert done.exit_code == 0, done.output
    assert len(asked) == 1  # the other one
    assert f"{runs.name}/bf16 (dense): piqa finished before" in done.output.replace("\n", " ")
    assert run(runs / "bf16", *arguments).exit_code == 0
    assert len(asked) == 1


def test_a_directory_in_use_is_refused(runs, tmp_path):
    with hold_directory(tmp_path):
        done = run(runs / "bf16", "--tasks-dir", DATA, "--tasks", "piqa", "--out", tmp_path)
    assert "is in use by" in str(done.exception)


def test_the_tokenizer_counts_not_what_was_called_before(tokenizer):
    """A call leaves its truncation and padding in the tokenizer."""
    before = jobs._tokenizer_fingerprint(tokenizer)
    tokenizer("one two three", truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert jobs._tokenizer_fingerprint(tokenizer) == before
    assert jobs._tokenizer_fingerprint(train_tokenizer(documents()[:9], vocab_size=300)) != before


@pytest.mark.slow
def test_a_task_is_evaluated_by_itself_and_once(evaluated, runs, tmp_path, monkeypatch):
    """Whatever else was asked for, before or now, so that its batches are always the same."""
    out, _ = evaluated
    asked = []
    plain = jobs.evaluate_model

    def evaluate(model, tokenizer, tasks, **options):
        asked.append([task["task"][0]["task"] for task in tasks])
        return plain(model, tokenizer, tasks, **options)

    monkeypatch.setattr("metis_hf.lab.evaluate.jobs.evaluate_model", evaluate)
    arguments = [runs / "metis", "--tasks-dir", DATA, "--out", tmp_path]
    assert run(*arguments, "--tasks", "piqa").exit_code == 0
    done = run(*arguments, "--tasks", "race,piqa,arc_easy")
    assert done.exit_code == 0, done.output
    assert asked == [["piqa"], ["race"], ["arc_easy"]]
    assert "piqa finished before, taken from" in done.output.replace("\n", " ")
    apart, together = results(tmp_path)["metis.scheme"], results(out)["metis.scheme"]
    for task in ("piqa", "race", "arc_easy"):
        assert apart[task]["metis"]["settings"] == together[task]["metis"]["settings"]
        assert apart[task]["results"] == together[task]["results"]


@pytest.mark.slow
def test_a_limit_for_each_task(runs, text, tmp_path):
    done = run(runs / "bf16", "--tasks-dir", DATA, "--tasks", "piqa,race,arc_easy", "--out",
               tmp_path, "--limit", 2, "--limit", "race=1", "--loss-text", text)  # fmt: skip
    assert done.exit_code == 0, done.output
    row = results(tmp_path)["bf16.dense"]
    counts = {task: record["n-samples"][task]["effective"] for task, record in row.items()}
    assert counts == {"piqa": 2, "race": 1, "arc_easy": 2, plan.LOSS_TASK: 1}  # of one document
    said = "Only the first 2 of held_out_loss, PIQA, ARC-E; 1 of RACE: a smoke test, not a result."
    assert said in (tmp_path / "table.md").read_text()


def test_an_interrupted_row_goes_on_behind_its_last_task(runs, tmp_path, monkeypatch):
    plain = jobs.evaluate_model

    def interrupted(model, tokenizer, tasks, **options):
        if tasks[0]["task"][0]["task"] == "race":
            raise KeyboardInterrupt
        return plain(model, tokenizer, tasks, **options)

    arguments = [runs / "bf16", "--tasks-dir", DATA, "--out", tmp_path, "--tasks", "piqa,race"]
    monkeypatch.setattr("metis_hf.lab.evaluate.jobs.evaluate_model", interrupted)
    assert run(*arguments).exit_code != 0
    assert set(results(tmp_path)["bf16.dense"]) == {"piqa"}
    monkeypatch.setattr("metis_hf.lab.evaluate.jobs.evaluate_model", plain)
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert "piqa finished before" in done.output.replace("\n", " ")
    assert set(results(tmp_path)["bf16.dense"]) == {"piqa", "race"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "half-written or damaged; delete it, or"),
        (lambda text: "{}", "is not a result of metis-hf eval"),
        (lambda text: text.replace('"limit": 2', '"limit": 3'), "was edited"),
    ],
)
def test_damaged_results_are_named(damage, message, runs, tmp_path):
    arguments = [runs / "bf16", "--tasks-dir", DATA, "--tasks", "piqa", "--out", tmp_path]
    arguments += ["--limit", 2]
    assert run(*arguments).exit_code == 0
    (file,) = (tmp_path / "results").iterdir()
    file.write_text(damage(file.read_text()))
    done = run(*arguments)
    assert isinstance(done.exception, ValueError)
    assert str(file) in str(done.exception)
    assert message in str(done.exception)
    assert run(*arguments, "--overwrite").exit_code == 0
    assert json.loads(file.read_text())["results"]["piqa"]


@pytest.mark.slow
def test_nan_is_shown_flagged_and_never_averaged_away(runs, tokenizer, tmp_path):
    broken = make_model()
    torch.nn.init.constant_(broken.lm_head.weight[7], math.nan)  # every softmax is NaN with it
    broken.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    done = run(runs / "bf16", tmp_path / "broken", "--tasks", "piqa,race", "--tasks-dir", DATA,
               "--out", tmp_path)  # fmt: skip
    assert done.exit_code == 0, done.output
    broken = results(tmp_path)["broken.dense"]
    assert math.isnan(broken["piqa"]["results"]["piqa"]["acc,none"])
    assert broken["piqa"]["metis"]["nonfinite"] == {"piqa": 8}
    assert broken["race"]["metis"]["nonfinite"] == {"race": 16}
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
    out = tmp_path / "out"
    done = run(runs / "bf16", "--tasks", "words,piqa", "--tasks-dir", tmp_path, "--out", out)
    assert isinstance(done.exception, FileNotFoundError)  # piqa's data
    shutil.copy(DATA / "piqa.jsonl", tmp_path)
    done = run(runs / "bf16", "--tasks", "words,piqa", "--tasks-dir", tmp_path, "--out", out)
    assert done.exit_code == 0, done.output
    assert "word_perplexity of words" in done.output
    assert "The average leaves out words" in done.output
    row = results(out)["bf16.dense"]
    data = {task: set(row[task]["metis"]["settings"]["data_sha256"]) for task in row}
    assert data == {"words": {"words.yaml", "words.jsonl"}, "piqa": {"piqa.jsonl"}}


def test_a_document_that_looks_like_a_list_is_text(runs, tokenizer, tmp_path):
    """Of a template, lm-eval would evaluate it as Python."""
    texts = ["[" + ", ".join(map(str, range(200))) + "]", "['a', 'b']"]
    file = tmp_path / "lists.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = run(runs / "bf16", "--tasks", "none", "--loss-text", file, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    ours = results(tmp_path)["bf16.dense"][plan.LOSS_TASK]["metis"]
    assert ours["held_out_tokens"] == sum(len(tokenizer.encode(text)) for text in texts)
    assert 0 < ours["held_out_loss"] < 20


def test_loss_alone_of_json_lines(runs, tokenizer, tmp_path):
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": TEXT[:size]}) + "\n" for size in (700, 900)))
    done = run(runs / "bf16", "--tasks", "none", "--loss-text", file, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    ours = results(tmp_path)["bf16.dense"][plan.LOSS_TASK]["metis"]
    assert ours["held_out_tokens"] == sum(len(tokenizer.encode(TEXT[:n])) for n in (700, 900))
    assert 0 < ours["held_out_loss"] < 20


def test_options_of_the_table(evaluated, runs, text, tmp_path):
    """They need finished results only."""
    out = tmp_path / "out"
    shutil.copytree(evaluated[0] / "results", out / "results")
    done = run(
        runs / "bf16", runs / "metis", "--precision", "both", "--tasks-dir", DATA, "--loss-text",
        text, "--out", out, "--metric", "acc", "--control", "metis, dense", "--paper", "gpt2-130m",
        "--format", "csv",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.iterdir()} == {"results", "table.csv", ".lock"}
    assert "Difference to metis, dense" in done.output
    assert "Shown: acc of ARC-C, ARC-E" in done.output
    assert "FP4-Metis (published)" in done.output
    assert "took" not in done.output  # nothing was evaluated


def test_weights_in_the_dtype_that_was_asked_for(runs, text, tmp_path):
    done = run(runs / "bf16", "--tasks", "none", "--loss-text", text, "--out", tmp_path,
               "--dtype", "bfloat16")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert results(tmp_path)["bf16.dense"][plan.LOSS_TASK]["metis"]["parameter_dtype"] == "bfloat16"


def test_special_tokens_are_of_the_tokenizer_too():
    """Rolling likelihoods begin with one of them, which the tokenizer's own file does not name."""
    tokenizer = make_tokenizer()
    before = jobs._tokenizer_fingerprint(tokenizer)
    text = tokenizer.backend_tokenizer.to_str()
    tokenizer.bos_token = "a"
    assert tokenizer.backend_tokenizer.to_str() == text
    assert jobs._tokenizer_fingerprint(tokenizer) != before
