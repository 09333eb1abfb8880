"""Compile what a model's first step needs side by side, before the first of it is waited for.

A call that lacks its program waits for it, and so does the next one for the next program. Here the
first such call asks what else will be needed: layers have left a rehearsal of themselves, a step on
a few numbers, in which calls are noted and computed by the reference. What no earlier process left
on disk is then shared out: this process and others take one program after the other, until none is
left. What others compile goes into the cache on disk, from where it is read.

On a CPU alone. For GPUs Inductor has processes of its own, and most of the time is theirs.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

import torch

from metis_hf.numerics.kernels import compiled, kept
from metis_hf.numerics.kernels.compiled import Program
from metis_hf.numerics.scaling import TRIED_SCALES

_ROOT = Path(__file__).parents[3]  # of the package
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of Linux: microseconds, of a period of so many

logger = logging.getLogger(__name__)


class Rehearsal(Protocol):
    """A step on a few numbers that makes the calls which something larger is about to make."""

    def mode(self) -> Hashable | None:
        """Return a key for the calls to come; None where nothing is to be made."""

    def run(self, mode: Hashable) -> None:
        """Make them, in a thread where neither grad mode nor autocast are the caller's."""


_rehearsals: dict[Hashable, Rehearsal] = {}
_rehearsed: set[tuple[Hashable, Hashable]] = set()  # keys and modes
_noting = threading.local()  # its `programs`: of the rehearsal that this thread runs
_lock = threading.Lock()


def expect(key: Hashable, rehearsal: Rehearsal) -> None:
    """Leave a rehearsal for later; the last one of each key counts."""
    _rehearsals[key] = rehearsal


def note(program: Program) -> bool:
    """Return whether this call belongs to a rehearsal, and so is not to run compiled."""
    programs = getattr(_noting, "programs", None)
    if programs is None:
        return False
    programs.append(program)
    return True


def rehearse(rehearsal: Rehearsal, mode: Hashable) -> list[Program]:
    """Return the programs that a rehearsal needs, each once.

    It runs in a thread of its own, where autograd's hooks and modes of the caller are not in force.
    """
    found: list[Program] = []

    def run() -> None:
        _noting.programs = found
        try:
            rehearsal.run(mode)
        except Exception as error:  # its layer may be of a kind that nothing here knows
            logger.debug("a rehearsal failed, its programs are compiled one by one: %s", error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return list(dict.fromkeys(found))


def prepare(program: Program) -> None:
    """Compile a program that is missing, and what else is expected, side by side.

    What earlier processes left on disk is read at once, or small tensors would go without it for a
    thousand calls. It returns without the program where that is all that is missing.

    Raises:
        CompilationError: the compiler, or torch's way to it, failed.
    """
    if program.device.type != "cpu":
        return
    with _lock:
        needed = [program, *_expected()]
        # A new thread has the machine's number of threads, not the one that the caller set.
        needed = [p._replace(threads=program.threads) for p in needed]
        needed = [p for p in dict.fromkeys(needed) if not compiled.is_compiled(p)]
        if not kept.keeps_code():
            return
        read = {p for p in needed if compiled.load_program(p)}
        missing = [p for p in needed if p not in read and not kept.is_kept(p)]
        if len(missing) > 1:
            _compile_side_by_side(missing)
        elif missing and program in read:
            compiled.compile_program(*missing)


def _expected() -> list[Program]:
    """Run the rehearsals that have not been run in their present modes."""
    found: list[Program] = []
    for key, rehearsal in list(_rehearsals.items()):
        mode = rehearsal.mode()
        if mode is not None and (key, mode) not in _rehearsed:
            _rehearsed.add((key, mode))
            found += rehearse(rehearsal, mode)
    return found


def _compile_side_by_side(programs: list[Program]) -> None:
    # The longest first: where several scales are tried.
    waiting = deque(sorted(programs, key=lambda p: p.variant.rule not in TRIED_SCALES))
    count = min(processes(), len(programs))
    compiled.announce(f"compiling {len(programs)} quantizers for this machine, {count} at a time")
    started = time.perf_counter()
    with ExitStack() as stack:
        threads = [_helper(waiting, stack) for _ in range(count - 1)]
        while (program := _next(waiting)) is not None:
            compiled.compile_program(program)
        for thread in threads:
            thread.join()
    for program in programs:  # read from disk; what a process failed to leave there is made here
        compiled.compile_program(program)
    logger.warning("compiled them in %.0f s", time.perf_counter() - started)


def processes() -> int:
    """Return the number of processes that compile at a time: one for each core of this process.

    A container may have the time of fewer cores than it sees; each process takes memory of its own.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = map(int, _CPU_QUOTA.read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _helper(waiting: deque[Program], stack: ExitStack) -> threading.Thread:
    """Start a process that compiles programs, and a thread that gives it one when it asks."""
    thread = threading.Thread(target=lambda: None)
    # Modules from where this process has them, and none of the current directory: whatever lies
    # there may have the name of one of Python's own.
    path = [*filter(None, sys.path), str(_ROOT)]
    program = f"import sys; sys.path[:] = {path!r}; import {__name__} as ahead; ahead.main()"
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:  # nothing depends on it
        logger.debug("no process for compiling could be started: %s", error)
    else:
        thread = threading.Thread(target=_serve, args=(process, waiting))
        stack.callback(thread.join)
        stack.callback(process.kill)  # an error here must not leave it running
    thread.start()
    return thread


def _serve(process: subprocess.Popen[bytes], waiting: deque[Program]) -> None:
    """Give a process a program for each line that it writes, until none is left or it ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError), process:
        for _ in process.stdout:
            program = _next(waiting)
            if program is None:
                return
            process.stdin.write(pickle.dumps(program))
            process.stdin.flush()


def _next(waiting: deque[Program]) -> Program | None:
    """Take the first program; None where none is left."""
    try:
        return waiting.popleft()
    except IndexError:
        return None


def main() -> None:
    """Compile one program after the other: ask by a line, read it pickled, until there is none."""
    asks, sys.stdout = sys.stdout, sys.stderr
    with suppress(EOFError):
        while True:
            print(file=asks, flush=True)
            program = pickle.load(sys.stdin.buffer)
            torch.set_num_threads(program.threads)
            compiled.compile_program(program)
