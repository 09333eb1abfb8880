"""The demo: a small Llama trained from scratch on Python's own sources, in FP4 four ways.

No download and no GPU. Text, tokenizer and tasks come from the running interpreter's standard
library; training, evaluation, table and plots are those that real experiments use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from metis_hf.data.corpus import chunk, split_documents, stdlib_documents, train_tokenizer
from metis_hf.lab.compare import curves as figures
from metis_hf.lab.compare import tasks_table as tables
from metis_hf.lab.compare.outputs import different_code
from metis_hf.lab.compare.plan import experiment_settings
from metis_hf.lab.compare.results import SchemeResult, headlines
from metis_hf.lab.compare.runner import Evaluated, Trained, evaluate_checkpoint, run_variant
from metis_hf.lab.compare.variants import LARGEST_SEED, Experiment, Variant
from metis_hf.lab.demo.tasks import write_tasks
from metis_hf.lab.measured import code_digest
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.lab.show.table import markdown_table, terminal_table
from metis_hf.schemes import CONTROL, scheme_info, source_digests
from metis_hf.shared.inputs import claim_inputs, digest_of_texts
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.quiet import quiet
from metis_hf.shared.records import (
    SETTINGS_FILE,
    claim_directory,
    environment,
    read_json,
    write_json,
)

SCHEMES = ("bf16", "nvfp4", "nvidia", "metis-paper", "metis")
STEPS, QUICK_STEPS = 450, 12
CODE_FILE = "code.json"  # of a run: digests of the code that has trained it


def demo_experiment(steps: int | None, seed: int, quick: bool) -> Experiment:
    """Return the demo's settings; `quick` shows the mechanics only."""
    steps = steps or (QUICK_STEPS if quick else STEPS)
    width, layers = (64, 2) if quick else (128, 3)
    return Experiment(
        model={
            "model_type": "llama",
            "vocab_size": 512 if quick else 1024,
            "hidden_size": width,
            "intermediate_size": width * 8 // 3 // 16 * 16,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 32,
            "max_position_embeddings": 1024,
            "initializer_range": width**-0.5,  # 0.02 is for widths of a thousand
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        },
        training={
            "max_steps": steps,
            "per_device_train_batch_size": 4 if quick else 8,
            "learning_rate": 4e-3,
            "warmup_steps": max(1, steps // 10),
            "lr_scheduler_type": "cosine",
            "adam_beta2": 0.95,
            "max_grad_norm": 1.0,
            "save_steps": max(2, steps // 8),
        },
        sequence_length=64 if quick else 128,
        health_interval=max(2, steps // 10),
        seed=seed,
    )


def run_demo(
    *,
    out: Path,
    steps: int | None = None,
    schemes: Sequence[str] = SCHEMES,
    seed: int = 0,
    quick: bool = False,
    console: Console | None = None,
) -> list[SchemeResult]:
    """Run the demo, or the part of it that `out` does not hold yet.

    Args:
        out: directory for checkpoints, `results.json`, `table.md`, `loss.png`, `spectra.png`.
        steps: optimizer steps per scheme; None takes the default.
        schemes: registered schemes, in the order of the table.
        seed: of everything random.
        quick: a smaller model, few steps, few items; `QUICK_TIME` says how long that takes.
        console: where progress and table are shown.

    Raises:
        ValueError: an unknown scheme, or one named twice; steps or a seed out of range; or `out`
            holds a run with other settings, of a scheme whose file has changed since, or is in use
            by another process.
    """
    console = console or Console()
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps}; expected at least 1")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed={seed}; expected a whole number from 0 to {LARGEST_SEED}")
    if not schemes:
        raise ValueError("no scheme to run; name at least one, as in --schemes bf16,metis")
    twice = sorted({name for name in schemes if list(schemes).count(name) > 1})
    if twice:
        raise ValueError(f"scheme named twice: {', '.join(twice)}")
    for scheme in schemes:
        scheme_info(scheme)
    experiment = demo_experiment(steps, seed, quick)
    with hold_directory(out), quiet():
        claim_directory(out, _settings(experiment, out))
        return _run(experiment, list(schemes), out, quick, console)


def _settings(experiment: Experiment, out: Path) -> dict[str, Any]:
    """Return settings as the directory has them: versions differ in what they name."""
    path = out / SETTINGS_FILE
    named = read_json(path) if path.exists() else {}
    short = experiment_settings(experiment)
    return {k: v for k, v in asdict(experiment).items() if k in short or k in named}


def _run(
    experiment: Experiment, schemes: list[str], out: Path, quick: bool, console: Console
) -> list[SchemeResult]:
    documents = stdlib_documents()
    own = {f"scheme {name}": digest for name, digest in source_digests(schemes).items()}
    library = digest_of_texts(one.text for one in documents)
    claim_inputs(out, {"Python's library": library, **own})
    splits = split_documents(documents)
    tokenizer = train_tokenizer(
        splits.train,
        experiment.model["vocab_size"],
        max_chars=300_000 if quick else 3_000_000,
    )
    tokenizer.save_pretrained(out / "tokenizer")
    batch = experiment.training["per_device_train_batch_size"]
    tokens = experiment.steps * batch * experiment.sequence_length
    dataset = chunk(splits.train, tokenizer, experiment.sequence_length, max_tokens=tokens)
    tasks_dir = out / "tasks"
    task_names = write_tasks(
        splits.test,
        tasks_dir,
        reference=splits.train,
        items=40 if quick else 250,
        seed=experiment.seed,
    )
    loss_task, *tasks = task_names
    megabytes = sum(len(document.text) for document in splits.train) / 1e6
    where = environment()
    console.print(
        f"Corpus: {megabytes:.1f} MB of Python's standard library, {len(splits.test)} files held "
        f"out. {tokens / 1e3:.0f}k tokens per scheme, {where['device']}, {where['precision']}."
    )

    def evaluate(trained: Trained) -> Evaluated:
        from metis_hf.lab.evaluate import held_out_loss

        result = evaluate_checkpoint(trained.directory, task_names, tasks_dir)
        loss = held_out_loss(result, loss_task, tokenizer, tasks_dir / f"{loss_task}.jsonl")
        return Evaluated(loss, headlines(result, tasks), result.to_dict())

    results = []
    progress = TaskProgress(console)
    with progress.running({scheme: (experiment.steps, 1.0) for scheme in schemes}):
        for scheme in schemes:
            progress.begin(scheme, "preparing")

            def on_step(step: int, loss: float | None, scheme: str = scheme) -> None:
                shown = "" if loss is None else f"loss {loss:.3f}"
                progress.advance(scheme, step, status=shown)

            result = run_variant(
                experiment,
                Variant.of_scheme(scheme),
                dataset,
                tokenizer,
                out / scheme,
                evaluate,
                on_step=on_step,
                on_evaluate=partial(progress.status, scheme, "evaluating"),
                earlier_code=_earlier_code(out / scheme),
            )
            assert result is not None
            results.append(result)
            progress.finish(scheme, f"held-out loss {result.loss:.4f}")
    _report(experiment, results, out, where, tokens, console)
    return results


def _earlier_code(run: Path) -> list[str]:
    """Return digests of the code that has trained a run until now, and note this code's, too."""
    path = run / CODE_FILE
    begun = path.is_file() and any(run.glob("checkpoint-*"))
    earlier = read_json(path) if begun else []
    run.mkdir(parents=True, exist_ok=True)
    write_json(path, list(dict.fromkeys([*earlier, code_digest()])))
    return earlier


def _report(
    experiment: Experiment,
    results: list[SchemeResult],
    out: Path,
    where: dict,
    tokens: int,
    console: Console,
) -> None:
    label = control_label(where)
    parameters = results[0].parameters
    verdict = tables.verdict(results, parameters, tokens)
    sentences = [verdict, *different_code(results)]
    header, rows = tables.header(results), tables.rows(results, label)
    title = "Loss: nats per held-out token. Tasks: %, by chance 5 (cloze) and 25 (choice)."
    console.print(terminal_table(header, rows, title=title))
    for sentence in sentences:
        console.print(sentence)

    below = "\n\n".join(sentences)
    (out / "table.md").write_text(f"{markdown_table(header, rows)}\n{below}\n")
    title = f"Llama, {parameters / 1e6:.1f}M parameters, Python's standard library"
    figures.plot_curves(results, out / "loss.png", title)
    figures.plot_spectra(results, out / "spectra.png", f"Spectral health: {title}")
    record = {
        "experiment": asdict(experiment),
        "parameters": parameters,
        "tokens": tokens,
        **where,
        "verdict": verdict,
        "results": [asdict(result) for result in results],
    }
    write_json(out / "results.json", record)
    names = "table.md, results.json, loss.png, spectra.png, <scheme>/model"
    console.print(f"Written to {out}/: {names}", soft_wrap=True)  # a path is never broken


def control_label(where: dict) -> str:
    """Return the control's name in the table, which says where lacking bf16 units made it fp32."""
    return CONTROL if where["precision"] == "bf16" else f"{CONTROL} (run in fp32)"
