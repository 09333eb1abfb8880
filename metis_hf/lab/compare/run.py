"""Runs a plan: one process for each run, as many side by side as there are devices or asked for."""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from metis_hf.conversion.convert import get_metis_model
from metis_hf.lab.compare.data import embed, load_data
from metis_hf.lab.compare.plan import (
    SPEC_FILE,
    ComparisonPlan,
    directory_name,
    with_accumulation,
    with_seed,
)
from metis_hf.lab.compare.results import RESULT_FILE, SchemeResult, load_result
from metis_hf.lab.compare.runner import drop_checkpoints
from metis_hf.lab.compare.variants import Variant
from metis_hf.lab.cost import meta_model
from metis_hf.lab.measured import code_digest
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.schemes import source_digests
from metis_hf.shared.inputs import claim_inputs, digest_of_path
from metis_hf.shared.locks import hold_directory
from metis_hf.shared.processes import Children, sigterm_raises
from metis_hf.shared.records import claim_directory, read_json, write_json

LOG_FILE = "worker.log"
IMPORTS_FILE = "imports.json"  # of a comparison's directory: sources of schemes
_LOG_LINES = 15  # of a failed run's log that its error shows


class RunsFailed(RuntimeError):
    """Some runs of a comparison failed; the message has the end of their logs."""


@dataclass(frozen=True)
class Run:
    """One run of a plan.

    Attributes:
        variant: what is trained.
        seed: with which seed.
        directory: its own.
    """

    variant: Variant
    seed: int
    directory: Path

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def sources(self) -> dict[str, str]:
        """Digests of its schemes and its format, of those from outside this package."""
        config = self.variant.metis_config(self.seed)
        return source_digests(config.schemes, config.format)


def run_plan(
    plan: ComparisonPlan,
    out: Path,
    *,
    jobs: int | None = None,
    launcher: str = "",
    imports: Sequence[str] = (),
    progress: TaskProgress | None = None,
) -> list[SchemeResult]:
    """Train what `out` does not hold yet, and return all results, seed by seed.

    Interrupted, it goes on where it stopped: finished runs are not repeated, and others resume from
    their last whole checkpoint. Variants and seeds can be added to a directory later. A run that
    fails does not stop the others. The runs end when this process does, however it ends.

    Args:
        plan: what to compare.
        out: directory of the comparison; a run's own is `out/runs/<variant>/seed-<seed>`.
        jobs: runs side by side; None takes the number of accelerators, or of CPU cores.
        launcher: command that starts a run on several devices, as in
            "accelerate launch --config_file recipes/accelerate/8gpu_fsdp2.yaml"; one run at a time.
        imports: sources of schemes, as `absolute_source` gives them, for the processes of the
            runs; `out` remembers them.
        progress: shows what happens; None is silent.

    Raises:
        ValueError: `out` holds another comparison, a run of a scheme whose file has changed since,
            or is in use by another process; it holds a result of another version; `jobs` is
            below 1 or contradicts the launcher; or the model cannot be converted as a variant says.
        RunsFailed: some runs failed; the others have their results.
    """
    if launcher and jobs not in (None, 1):
        raise ValueError(f"jobs={jobs} with a launcher: it takes all devices, so one run at a time")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}; expected at least 1, the runs side by side")
    if not launcher:
        with_accumulation(plan.experiment, plan.global_batch, processes=1)
    if plan.data is not None:  # before anything is written
        _check_data(plan, Path(plan.data))
    with hold_directory(out):
        return _run_plan(plan, out, jobs, launcher, imports, progress or TaskProgress(None))


def _run_plan(
    plan: ComparisonPlan,
    out: Path,
    jobs: int | None,
    launcher: str,
    imports: Sequence[str],
    progress: TaskProgress,
) -> list[SchemeResult]:
    runs = [Run(v, s, _run_directory(out, v, s)) for v, s in plan.runs()]
    _check_conversions(plan, [r for r in runs if not (r.directory / RESULT_FILE).is_file()])
    claim_directory(out, plan.settings())
    tasks_dir = plan.tasks_dir if plan.tasks else None
    read = (plan.experiment.checkpoint, plan.data, plan.validation, tasks_dir)
    claim_inputs(out, {path: digest_of_path(Path(path)) for path in read if path is not None})
    if imports:
        write_json(out / IMPORTS_FILE, list(imports))
    data = Path(plan.data) if plan.data is not None else out / "data"
    for run in runs:
        _check_begun(run, progress)
    waiting = [run for run in runs if not _finished(run, plan, progress)]
    if plan.data is None:
        embed(
            data,
            vocab_size=plan.experiment.model["vocab_size"],
            sequence_length=plan.experiment.sequence_length,
        )
    slots = 1 if launcher else jobs or _default_jobs(len(waiting))
    for run in waiting:
        _write_spec(run, plan, data, imports, slots)
    steps = plan.experiment.steps
    if waiting:
        progress.note(f"{len(waiting)} runs of {steps} steps, {slots} at a time.")
    with progress.running({run.name: (steps, 1.0) for run in waiting}, slots):
        failed = _train_all(waiting, slots, shlex.split(launcher), progress)
    if failed:
        done = len(runs) - len(failed)
        raise RunsFailed(
            f"{len(failed)} of {len(runs)} runs failed; {done} are done, and the same command goes "
            "on with the others.\n" + "\n".join(failed)
        )
    return load_results(plan, out)


def _check_conversions(plan: ComparisonPlan, runs: Sequence[Run]) -> None:
    """Convert the model once for each variant, without weights, rather than fail in each run."""
    config = AutoConfig.for_model(**plan.experiment.model)
    for run in {run.variant.name: run for run in runs}.values():
        try:
            get_metis_model(meta_model(config), run.variant.metis_config(run.seed))
        except ValueError as error:
            raise ValueError(f"variant {run.variant.name!r}: {error}") from None


def _check_data(plan: ComparisonPlan, data: Path) -> None:
    """Open the data once: errors come early, and the runs share the cache that this makes."""
    load_data(
        data,
        None if plan.validation is None else Path(plan.validation),
        vocab_size=plan.experiment.model["vocab_size"],
        sequence_length=plan.experiment.sequence_length,
        eval_sequences=plan.eval_sequences,
        seed=plan.seeds[0],
    )


def remembered_imports(out: Path) -> list[str]:
    """Return the sources of schemes that a comparison was started with."""
    path = out / IMPORTS_FILE
    return read_json(path) if path.is_file() else []


def load_results(plan: ComparisonPlan, out: Path) -> list[SchemeResult]:
    """Return the finished runs of a plan, seed by seed."""
    found = (load_result(_run_directory(out, v, s)) for v, s in plan.runs())
    return [result for result in found if result is not None]


def jobs_of(plan: ComparisonPlan, out: Path) -> int | None:
    """Return how many runs of a plan were side by side at most; None if no run says so."""
    specs = [_run_directory(out, v, s) / SPEC_FILE for v, s in plan.runs()]
    jobs = [read_json(path).get("jobs") for path in specs if path.is_file()]
    return max((each for each in jobs if each is not None), default=None)


def _run_directory(out: Path, variant: Variant, seed: int) -> Path:
    return out / "runs" / directory_name(variant.name) / f"seed-{seed}"


def _finished(run: Run, plan: ComparisonPlan, progress: TaskProgress) -> bool:
    """Return whether a run has its result; a damaged file is named, and the run done again.

    Raises:
        ValueError: the result is of another version, or of another variant.
    """
    path = run.directory / RESULT_FILE
    try:
        if path.exists():
            read_json(path)
    except ValueError as error:
        progress.note(f"{run.name}: {error}; this run is trained again")
        path.unlink()
    result = load_result(run.directory)
    if result is None:
        return False
    _check_variant(run, result.config, result.precision_schedule)
    drop_checkpoints(run.directory)  # its process may have ended before it did so
    return True


def _check_variant(
    run: Run, config: dict[str, Any], precision_schedule: dict[str, Any] | None
) -> None:
    """Refuse a run that another variant of the same name has trained."""
    own = run.variant.metis_config(run.seed).to_dict(), run.variant.precision_schedule
    if (config, precision_schedule) != own:
        raise ValueError(
            f"{run.directory} holds a run of another variant of the name {run.variant.name!r}; "
            "choose another name or another --out"
        )


def _check_begun(run: Run, progress: TaskProgress) -> None:
    """Refuse to go on with a run whose variant or scheme was another when it began."""
    path = run.directory / SPEC_FILE
    trained = any(run.directory.glob("checkpoint-*"))
    if not path.is_file() or not (trained or (run.directory / RESULT_FILE).is_file()):
        return
    spec = read_json(path)
    if trained:
        begun = Variant(**spec["variant"])
        _check_variant(run, begun.metis_config(run.seed).to_dict(), begun.precision_schedule)
        if spec.get("code", code_digest()) != code_digest():
            progress.note(f"{run.name} began with other code or torch, and goes on with this one")
    there, now = spec.get("sources", {}), run.sources
    changed = [name for name in now if there.get(name) != now[name]]
    if changed:
        raise ValueError(
            f"{run.directory} holds a run of {changed[0]!r} as its file was before it was changed; "
            "delete this directory to train it again, or choose another --out"
        )


def _write_spec(
    run: Run, plan: ComparisonPlan, data: Path, imports: Sequence[str], slots: int
) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    path = run.directory / SPEC_FILE
    earlier: list[str] = []
    jobs = slots
    if path.is_file() and any(run.directory.glob("checkpoint-*")):
        begun = read_json(path)
        earlier = [*begun.get("earlier_code", ()), *([begun["code"]] if "code" in begun else ())]
        jobs = max(slots, begun.get("jobs") or slots)  # what its step times were measured beside
    spec = {
        "experiment": asdict(with_seed(plan.experiment, run.seed)),
        "variant": asdict(run.variant),
        "global_batch": plan.global_batch,
        "eval_sequences": plan.eval_sequences,
        "data": str(data.resolve()),
        "validation": plan.validation,
        "tasks": list(plan.tasks),
        "tasks_dir": plan.tasks_dir,
        "imports": list(imports),
        "sources": run.sources,
        "code": code_digest(),
        "earlier_code": [each for each in dict.fromkeys(earlier) if each != code_digest()],
        "jobs": jobs,
    }
    write_json(path, spec)


def _default_jobs(runs: int) -> int:
    """Return runs side by side where nothing else is asked for."""
    return max(1, min(_devices(), runs))


def _devices() -> int:
    """Return runs that a machine can hold: one for each accelerator, else one for each CPU core."""
    if torch.accelerator.is_available():
        return torch.accelerator.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _slot_environment(slot: int, slots: int) -> dict[str, str]:
    """Return a run's share of the machine: its accelerator, or its part of the CPU's threads."""
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(_devices())]
        return {"CUDA_VISIBLE_DEVICES": names[slot % len(names)]}
    if torch.accelerator.is_available():
        return {}
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, _devices() // slots))
    }


def _train_all(
    runs: Sequence[Run], slots: int, launcher: list[str], progress: TaskProgress
) -> list[str]:
    """Train runs side by side; returns an error text for each that failed."""
    free: queue.Queue[int] = queue.Queue()
    for slot in range(slots):
        free.put(slot)
    children = Children()

    def train(run: Run) -> str | None:
        slot = free.get()
        try:
            if children.ended:
                return None
            environment = {} if launcher else _slot_environment(slot, slots)
            return _train_one(run, environment, launcher, children, progress)
        finally:
            free.put(slot)

    with sigterm_raises(), ThreadPoolExecutor(slots) as pool:
        futures = [pool.submit(train, run) for run in runs]
        try:
            errors = [future.result() for future in futures]
        except BaseException:  # Ctrl-C, SIGTERM: the runs end too, and keep their checkpoints
            children.end()
            raise
    return [error for error in errors if error is not None]


def _train_one(
    run: Run,
    environment: dict[str, str],
    launcher: list[str],
    children: Children,
    progress: TaskProgress,
) -> str | None:
    start = launcher or [sys.executable]
    command = [*start, "-m", "metis_hf.lab.compare.worker", str(run.directory)]
    command.append("--with-parent")
    progress.begin(run.name, "preparing")
    with open(run.directory / LOG_FILE, "w") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # ends with this process, and the run with it
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"} | environment,
        )
        children.add(child)
        assert child.stdout is not None
        for line in child.stdout:
            _follow(line, run, progress)
        code = child.wait()
        children.discard(child)
        assert child.stdin is not None
        child.stdin.close()
    result = load_result(run.directory) if code == 0 else None
    said = "failed" if result is None else f"held-out loss {result.loss:.4f}"
    progress.finish(run.name, said)
    if result is not None:
        return None
    log_text = (run.directory / LOG_FILE).read_text(errors="replace")
    tail = log_text.splitlines()[-_LOG_LINES:]
    return f"{run.name} (exit code {code}):\n" + "\n".join(f"    {line}" for line in tail)


def _follow(line: str, run: Run, progress: TaskProgress) -> None:
    try:
        values: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:  # something else that was printed
        return
    if isinstance(values, dict) and {"step", "loss"} <= values.keys():
        loss = values["loss"]
        shown = "" if loss is None else f"loss {loss:.3f}"
        progress.advance(run.name, values["step"], status=shown)
    elif isinstance(values, dict) and "status" in values:
        progress.status(run.name, values["status"])
    elif isinstance(values, dict) and "note" in values:
        progress.note(f"{run.name}: {values['note']}")
