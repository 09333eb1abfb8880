"""A comparison from its options to its tables: `metis-hf compare` and `metis-hf demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from metis_hf.lab.compare.dispatch import train_tasks
from metis_hf.lab.compare.dry_run import show_plan
from metis_hf.lab.compare.outputs import write_outputs
from metis_hf.lab.compare.plan import ComparisonPlan, make_plan
from metis_hf.lab.compare.step_times import measure_times
from metis_hf.lab.compare.tasks import jobs_of, results_of, tasks_of
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
    imports: Sequence[str] = (),
) -> list[str]:
    """Train what is missing, write tables and figures, and return an error text for each failure.

    Args:
        options: as `make_plan` takes them.
        out: the comparison's directory.
        jobs, launcher, imports: as `train_tasks` takes them.
        share: (K, N): this process is the K-th of N that work in the directory at the same time,
            and trains every N-th run of the plan. The one that finds all runs done writes the
            tables.
        times: time a step of every variant side by side, afterwards.
        dry_run: show the plan alone.
    """
    plan = make_plan(**options, needs_data=not dry_run)
    console = Console(markup=False)
    if dry_run:
        show_plan(plan, console)
        return []
    given = {"jobs": jobs, "launcher": launcher, "imports": imports}
    with quiet():
        if share is not None:
            return _train_share(plan, out, share, console, **given)
        failures = train(plan, out, TaskProgress(console), **given)
        with Store(out).hold():
            return failures + write_results(plan, out, console, times=times)


def train(
    plan: ComparisonPlan, out: Path, progress: TaskProgress | None = None, **given: Any
) -> list[str]:
    """Train the runs of a plan that have no result; returns an error text if some failed."""
    tasks = tasks_of(plan, out, given.pop("share", (1, 1)))
    failed = train_tasks(plan, out, tasks, progress=progress, **given)
    if not failed:
        return []
    return [
        f"{len(failed)} of {len(tasks)} runs failed; {len(tasks) - len(failed)} are done, and the "
        "same command goes on with the others.\n" + "\n".join(failed)
    ]


def _train_share(
    plan: ComparisonPlan, out: Path, share: tuple[int, int], console: Console, **given: Any
) -> list[str]:
    """Train the share of one process of an array; the last one to end writes the tables."""
    number, count = share
    if not 1 <= number <= count:
        raise ValueError(
            f"--task {number}/{count}; expected K/N with K from 1 to N, as in "
            "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT of --array=1-N"
        )
    failures = train(plan, out, TaskProgress(console), share=share, array=True, **given)
    tasks = tasks_of(plan, out)
    done = len(results_of(tasks))
    if done == len(tasks):
        with ExitStack() as lock:
            try:
                lock.enter_context(Store(out).hold())
            except ValueError:  # another process found all runs done, and writes
                return failures
            return failures + write_results(plan, out, console)
    console.print(
        f"{done} of {len(tasks)} runs are done; the process that ends last writes the tables, and "
        "so does the same command without --task."
    )
    return failures


def write_results(
    plan: ComparisonPlan, out: Path, console: Console, *, times: bool = False
) -> list[str]:
    """Write the files of the runs that are done; returns an error text if none could be timed."""
    tasks, failures = tasks_of(plan, out), []
    results = results_of(tasks)
    if not results:
        return []
    if times:
        trained = {result.scheme for result in results}
        variants = tuple(variant for variant in plan.variants if variant.name in trained)
        try:
            measure_times(replace(plan, variants=variants), out)
        except (RuntimeError, ValueError, OSError) as error:  # of memory, first of all
            failures.append(f"--times: steps were not timed: {error}")
    write_outputs(plan, results, out, jobs=jobs_of(tasks), console=console)
    return failures
