"""Train one task of a comparison in its own process.

`python -m metis_hf.lab.compare.worker RUN_DIR`, where RUN_DIR holds `run.json`, the instructions.
Progress goes to standard output as JSON lines, the result to `result.json`. Several processes
(accelerate launch) can train one run together. With `--with-parent` the process ends as soon as its
parent does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from metis_hf.lab.compare.data import load_data
from metis_hf.lab.compare.plan import with_accumulation
from metis_hf.lab.compare.results import headlines, save_result
from metis_hf.lab.compare.tasks import SPEC_FILE
from metis_hf.lab.compare.training import Trained, drop_checkpoints, held_out_result, train
from metis_hf.lab.compare.variants import Experiment, Variant
from metis_hf.schemes import import_schemes
from metis_hf.shared import checkpoints
from metis_hf.shared.devices import device_of
from metis_hf.shared.processes import end_with_parent
from metis_hf.shared.quiet import quiet
from metis_hf.shared.records import commit, read_json
from metis_hf.training import uncalled


def say(**values: Any) -> None:
    """Print a JSON line for the parent process, from the first rank only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(values), flush=True)


class Forwarded(logging.Handler):
    """A logging handler that forwards messages to the parent process."""

    def emit(self, record: logging.LogRecord) -> None:
        say(note=record.getMessage())


def run(directory: Path) -> None:
    """Train and evaluate the task that `directory/run.json` describes."""
    spec = read_json(directory / SPEC_FILE)
    code = {"sha256": "+".join(spec["code"]), "commit": commit()}  # now: files may change later
    for source in spec["imports"]:
        import_schemes(source)
    asked, variant = Experiment(**spec["experiment"]), Variant(**spec["variant"])
    processes = int(os.environ.get("WORLD_SIZE", 1))
    experiment = with_accumulation(asked, spec["global_batch"], processes)
    dataset, held_out, tokenizer = load_data(
        spec["data"], spec["validation"], experiment, spec["eval_sequences"]
    )
    trained = train(
        experiment,
        variant,
        dataset,
        tokenizer,
        directory,
        on_step=lambda step, loss: say(step=step, loss=loss),
    )
    say(status="evaluating")
    result = held_out_result(trained, variant, experiment.seed, held_out, code)
    if not trained.trainer.is_world_process_zero():
        return
    tasks = _scores(trained, spec) if spec["tasks"] else {}
    save_result(directory, replace(result, tasks=tasks), spec["key"])
    drop_checkpoints(directory)  # `model` has the weights


def _scores(trained: Trained, spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Load the saved model with `from_pretrained` and evaluate it with lm-eval, task by task.

    In one call, lm-eval would put requests of all tasks into the same batches, and a quantized
    model's likelihoods depend on the rest of the batch.
    """
    from metis_hf.lab.evaluate import EvalResult, evaluate_model
    from metis_hf.lab.evaluate.tasks import plan_tasks

    asked = plan_tasks(spec["tasks"], spec["tasks_dir"] and Path(spec["tasks_dir"]))
    own = next((task.include_path for task in asked if task.include_path), None)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        trained.directory, dtype=torch.float32
    )
    model.to(device_of(None))  # type: ignore[arg-type]
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.directory)
    result = EvalResult.joined(
        [evaluate_model(model, tokenizer, [task.spec], include_path=own) for task in asked]
    )
    return headlines(result, spec["tasks"])


def main() -> None:
    """Train the run that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="RUN_DIR")
    parser.add_argument("--with-parent", action="store_true")
    arguments = parser.parse_args()
    if arguments.with_parent:
        end_with_parent()
    for handler in (Forwarded(), logging.StreamHandler()):  # terminal and log file
        for logger in (checkpoints.logger, uncalled.logger):
            logger.addHandler(handler)
    with quiet():
        run(arguments.directory)


if __name__ == "__main__":
    main()
