"""Processes for tests that need one of their own.

They are forked from a server that has imported what takes seconds: one for each pytest process.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from typing import Any

PRELOADED = ["torch", "transformers.trainer", "accelerate", "metis_hf.training.callback"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


def start(function: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    """Start a process that calls a function of a module; it ends with the test's process."""
    process = CONTEXT.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def exit_code(function: Callable[..., None], *args: Any, timeout: float = 300) -> int | None:
    """Return how a process ended that called a function; minus the signal that ended it."""
    process = start(function, *args)
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{function.__name__} took more than {timeout:.0f} s")
    return process.exitcode


def python(*arguments: Any, **options: Any) -> str:
    """Return what Python prints that is started with these arguments, and fails if it fails."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
