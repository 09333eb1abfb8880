"""Runs the tasks of a comparison in parallel processes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from metis_hf.lab.compare.results import load_result
from metis_hf.lab.compare.tasks import Task
from metis_hf.lab.show.progress import TaskProgress
from metis_hf.shared.processes import Children, sigterm_raises

LOG_FILE = "worker.log"
_LOG_LINES = 15  # last lines of a failed run's log, shown in its error


def devices() -> int:
    """Return the number of runs that fit: one per accelerator, or per CPU core without any."""
    if torch.accelerator.is_available():
        return torch.accelerator.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slot_environment(slot: int, slots: int) -> dict[str, str]:
    """Return environment variables that give a run its CUDA device or share of the CPU threads."""
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(devices())]
        return {"CUDA_VISIBLE_DEVICES": names[slot % len(names)]}
    if torch.accelerator.is_available():
        return {}
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, devices() // slots))}


def train_all(
    tasks: Sequence[Task], slots: int, launcher: list[str], progress: TaskProgress
) -> list[str]:
    """Train the tasks, `slots` at a time; return an error text for each failure.

    The processes of the tasks end when this process does, however it ends.
    """
    free: queue.Queue[int] = queue.Queue()
    for slot in range(slots):
        free.put(slot)
    children = Children()

    def train(task: Task) -> str | None:
        slot = free.get()
        try:
            if children.ended:
                return None
            environment = {} if launcher else slot_environment(slot, slots)
            return _train_one(task, environment, launcher, children, progress)
        finally:
            free.put(slot)

    with sigterm_raises(), ThreadPoolExecutor(slots) as pool:
        futures = [pool.submit(train, task) for task in tasks]
        try:
            errors = [future.result() for future in futures]
        except BaseException:  # Ctrl-C, SIGTERM: the runs end too, and keep their checkpoints
            children.end()
            raise
    return [error for error in errors if error is not None]


def _train_one(
    task: Task,
    environment: dict[str, str],
    launcher: list[str],
    children: Children,
    progress: TaskProgress,
) -> str | None:
    command = [*(launcher or [sys.executable]), "-m", "metis_hf.lab.compare.worker"]
    log = task.directory / LOG_FILE
    progress.begin(task.name, "preparing")
    with open(log, "w") as errors:
        child = subprocess.Popen(
            [*command, str(task.directory), "--with-parent"],
            stdin=subprocess.PIPE,  # closes when this process ends, which ends the run
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"} | environment,
        )
        children.add(child)
        assert child.stdout is not None
        for line in child.stdout:
            _follow(line, task, progress)
        code = child.wait()
        children.discard(child)
        assert child.stdin is not None
        child.stdin.close()
    result = load_result(task.directory) if code == 0 else None
    shown = "failed" if result is None else f"held-out loss {result.loss:.4f}"
    progress.finish(task.name, shown)
    if result is not None:
        return None
    tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"{task.name} (exit code {code}):\n" + "\n".join(f"    {line}" for line in tail)


def _follow(line: str, task: Task, progress: TaskProgress) -> None:
    try:
        values: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:  # other output
        return
    if not isinstance(values, dict):
        return
    if {"step", "loss"} <= values.keys():
        loss = values["loss"]
        shown = "" if loss is None else f"loss {loss:.3f}"
        progress.advance(task.name, values["step"], status=shown)
    elif "status" in values:
        progress.status(task.name, values["status"])
    elif "note" in values:
        progress.note(f"{task.name}: {values['note']}")
