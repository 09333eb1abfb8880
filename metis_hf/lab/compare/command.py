"""Run a comparison from options to tables: `metis-hf compare` and `metis-hf demo`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from metis_hf.data.shards import text_files
from metis_hf.lab.compare.data import embed, load_data
from metis_hf.lab.compare.dispatch import devices, train_all
from metis_hf.lab.compare.dry_run import show_plan
from metis_hf.lab.compare.outputs import write_outputs
from metis_hf.lab.compare.plan import ComparisonPlan, make_plan, with_accumulation
from metis_hf.lab.compare.step_times import TIMES_FILE, measure_times
from metis_hf.lab.compare.tasks import (
    Task,
    held,
    imports_of,
    jobs_of,
    results_of,
    tasks_of,
    write_spec,
)
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.lab.store import Store
from metis_hf.shared.quiet import quiet


def compare_schemes(
    options: Mapping[str, Any],
    out: Path,
    *,
    jobs: int | None = None,
    launcher: str = "",
    share: tuple[int, int] | None = None,
    times: bool = False,
    dry_run: bool = False,
    device: str | None = None,
    imports: Sequence[str] = (),
) -> list[str]:
    """Train missing runs, write tables and figures, and return an error text for each failure.

    An interrupted comparison resumes: finished runs are not repeated, and others continue from
    their last complete checkpoint. A run that fails does not stop the others. The runs end when
    this process does, however it ends.

    Args:
        options: arguments of `make_plan`.
        out: the comparison's directory.
        jobs: runs side by side; None takes the number of accelerators, or of CPU cores.
        launcher: command that starts a run on several devices; one run at a time.
        share: (K, N): this process is the K-th of N that work in the directory at the same time,
            and trains every N-th run of the plan. The process that finds all runs done writes the
            tables.
        times: after training, time a step of every variant side by side.
        dry_run: only show the plan.
        device: device for the times of a dry run; see `show_plan`.
        imports: files and modules that register schemes, from `absolute_source`.

    Raises:
        ValueError: the directory or a run in it belongs to another comparison or is in use
            (`held`); the directory was used with `imports`, and none are given; `jobs` is below 1
            or contradicts the launcher; the data does not fit the model.
    """
    if not imports and (begun := imports_of(out)):
        named = " ".join(f"--import {shlex.quote(source)}" for source in begun)
        raise ValueError(
            f"{out} was started with {named}. Imported code runs only if you name it; if you "
            "trust the directory and the code, add that to the command"
        )
    plan, console = make_plan(**options, needs_data=not dry_run), Console(markup=False)
    if dry_run:
        show_plan(plan, console, device)
        return []
    if launcher and jobs not in (None, 1):
        raise ValueError(
            f"jobs={jobs} does not work with a launcher, which uses all devices for one run at a "
            "time; leave --jobs out"
        )
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}; expected at least 1, the number of runs at a time")
    store = Store(out)
    data = out / "data" if plan.data is None or plan.text is not None else Path(plan.data)
    tasks = tasks_of(plan, out)
    number, count = share or (1, 1)
    with quiet(), ExitStack() as lock:
        failures = _train(
            plan,
            store,
            tasks[number - 1 :: count],
            data,
            TaskProgress(console),
            jobs=jobs,
            launcher=shlex.split(launcher),
            imports=imports,
            array=share is not None,
        )
        if share is not None and (done := len(results_of(tasks))) < len(tasks):
            console.print(
                f"{done} of {len(tasks)} runs are done; the last process to finish writes the "
                "tables, or run the same command without --task."
            )
            return failures
        try:
            lock.enter_context(store.hold())
        except ValueError:
            if share is None:
                raise
            return failures  # another process is writing the tables
        return failures + _write(plan, tasks, data, out, console, times=times)


def _train(
    plan: ComparisonPlan,
    store: Store,
    tasks: Sequence[Task],
    data: Path,
    progress: TaskProgress,
    *,
    jobs: int | None,
    launcher: list[str],
    imports: Sequence[str],
    array: bool,
) -> list[str]:
    """Train the tasks that have no result; return an error text if any failed."""
    length = plan.experiment.sequence_length
    if not launcher:
        with_accumulation(plan.experiment, plan.global_batch, processes=1)
    checkpoint = plan.experiment.checkpoint
    if plan.text is not None:
        text_files(plan.text)  # fail before anything is written
    elif plan.data is not None:
        # Fail early here too, and fill the cache that the runs share.
        load_data(data, plan.validation, plan.of_seed(plan.seeds[0]), plan.eval_sequences)
    with held(plan, store, tasks, array=array, note=progress.note) as waiting:
        if plan.data is None or plan.text is not None:
            some = plan.embedded == "run" or plan.text is not None
            embed(
                data,
                vocab_size=plan.experiment.model["vocab_size"],
                sequence_length=length,
                tokens=plan.tokens if some else None,
                held_out_tokens=plan.eval_sequences * length if some else None,
                text=plan.text,
                tokenizer=None if checkpoint is None else AutoTokenizer.from_pretrained(checkpoint),
            )
        slots = 1 if launcher else jobs or max(1, min(devices(), len(waiting)))
        for task in waiting:
            write_spec(task, plan, data, imports=imports, jobs=slots, note=progress.note)
        steps = plan.experiment.steps
        if waiting:
            progress.note(f"Training {len(waiting)} runs of {steps} steps, {slots} at a time.")
        with progress.running({task.name: (steps, 1.0) for task in waiting}, slots):
            failed = train_all(waiting, slots, launcher, progress)
    if not failed:
        return []
    return [
        f"{len(failed)} of {len(tasks)} runs failed; {len(tasks) - len(failed)} are done, and the "
        "same command continues with the others.\n" + "\n".join(failed)
    ]


def _write(
    plan: ComparisonPlan,
    tasks: Sequence[Task],
    data: Path,
    out: Path,
    console: Console,
    *,
    times: bool,
) -> list[str]:
    """Write the output files of the finished runs; return an error text if timing failed."""
    results, failures = results_of(tasks), []
    if not results:
        return []
    if times:
        trained = {result.scheme for result in results}
        variants = tuple(variant for variant in plan.variants if variant.name in trained)
        try:
            measure_times(replace(plan, variants=variants), data, out / TIMES_FILE)
        except (RuntimeError, ValueError, OSError) as error:  # mostly out of memory
            failures.append(f"--times could not time the steps: {error}")
    write_outputs(plan, results, out, jobs=jobs_of(tasks), console=console)
    return failures
