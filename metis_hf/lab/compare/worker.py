"""One run of a comparison in a process of its own.

`python -m metis_hf.lab.compare.worker RUN_DIR`. RUN_DIR holds `run.json`, what to train.
Progress goes to standard output as JSON lines; the result to `result.json`. Several processes
(accelerate launch) train one run together. With `--with-parent` the process ends as soon as the one
that started it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from metis_hf.lab.compare.data import load_data
from metis_hf.lab.compare.plan import SPEC_FILE, task_plan, with_accumulation
from metis_hf.lab.compare.results import headlines
from metis_hf.lab.compare.runner import Evaluated, Trained, evaluate_checkpoint, run_variant
from metis_hf.lab.compare.variants import Experiment, Variant
from metis_hf.schemes import import_schemes
from metis_hf.shared import checkpoints
from metis_hf.shared.processes import end_with_parent
from metis_hf.shared.quiet import quiet
from metis_hf.shared.records import read_json
from metis_hf.training.precision import high_precision


def say(**values: Any) -> None:
    """Print a line of progress for the process that started this one; from the first rank only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(values), flush=True)


class Forwarded(logging.Handler):
    """Hands what is logged to the process that started this one."""

    def emit(self, record: logging.LogRecord) -> None:
        say(note=record.getMessage())


def run(directory: Path) -> None:
    """Train and evaluate what `directory/run.json` says."""
    spec = read_json(directory / SPEC_FILE)
    for source in spec["imports"]:
        import_schemes(source)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    asked = Experiment(**spec["experiment"])
    experiment = with_accumulation(asked, spec["global_batch"], processes)
    dataset, held_out, tokenizer = load_data(
        Path(spec["data"]),
        None if spec["validation"] is None else Path(spec["validation"]),
        vocab_size=experiment.model["vocab_size"],
        sequence_length=experiment.sequence_length,
        eval_sequences=spec["eval_sequences"],
        seed=experiment.seed,
    )

    def evaluate(trained: Trained) -> Evaluated:
        trainer = trained.trainer
        found = Evaluated(trainer.evaluate(held_out)["eval_loss"])
        assert trainer.model is not None
        with high_precision(trainer.model):  # under a name of its own in the log
            exact = trainer.evaluate(held_out, metric_key_prefix="eval_dense")
        found = replace(found, loss_dense=exact["eval_dense_loss"])
        if not spec["tasks"] or not trainer.is_world_process_zero():
            return found
        asked = task_plan(spec["tasks"], spec["tasks_dir"])
        own = next((task.include_path for task in asked if task.include_path), None)
        result = evaluate_checkpoint(trained.directory, [task.spec for task in asked], own)
        tasks = headlines(result, spec["tasks"])
        return replace(found, tasks=tasks, record=result.to_dict())

    run_variant(
        experiment,
        Variant(**spec["variant"]),
        dataset,
        tokenizer,
        directory,
        evaluate,
        on_step=lambda step, loss: say(step=step, loss=loss),
        on_evaluate=lambda: say(status="evaluating"),
        earlier_code=spec.get("earlier_code", ()),
    )


def main() -> None:
    """Train the run that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="RUN_DIR")
    parser.add_argument("--with-parent", action="store_true")
    arguments = parser.parse_args()
    if arguments.with_parent:
        end_with_parent()
    for handler in (Forwarded(), logging.StreamHandler()):  # for people now, and in the log
        checkpoints.logger.addHandler(handler)
    with quiet():
        run(arguments.directory)


if __name__ == "__main__":
    main()
