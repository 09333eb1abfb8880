"""Where the figures of health go: before Trainer's reporters, and in short to the console."""

from __future__ import annotations

import sys
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler


def calling_handler(callback: TrainerCallback) -> CallbackHandler | None:
    """Return Trainer's handler of callbacks that is calling this one; None where none does.

    It is looked up in the functions that are running: Trainer calls its reporters before a user's
    callbacks, with `logs` that no earlier event reaches, and passes no event its handler.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, CallbackHandler) and callback in found.callbacks:
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def put_first(callback: TrainerCallback, handler: CallbackHandler, *, details: bool) -> None:
    """Put a callback before the reporters, so that they see what it adds to a log entry.

    Args:
        callback: to be called first.
        handler: of the Trainer; it may be going through its callbacks.
        details: keep details of health from the console.
    """
    if handler.callbacks[:1] == [callback]:
        return
    callbacks = [one for one in handler.callbacks if one is not callback]
    printers = [n for n, one in enumerate(callbacks) if _prints(one)]
    if details and printers and not any(isinstance(one, ConsoleSummary) for one in callbacks):
        summarizing = ConsoleSummary()
        callbacks.insert(printers[-1] + 1, _AllFigures(summarizing))
        callbacks.insert(printers[0], summarizing)
    handler.callbacks = [callback, *callbacks]


class ConsoleSummary(TrainerCallback):
    """Stands before what prints to the console, and takes the details of health away."""

    def __init__(self) -> None:
        self.details: dict[str, float] = {}

    def on_log(self, *event: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = {} if logs is None else logs
        # "metis/<tensor>/<of which layers>/<statistic>"; a mean over all has no third part.
        names = [name for name in logs if name.startswith("metis/") and name.count("/") > 2]
        self.details = {name: logs.pop(name) for name in names}


class _AllFigures(TrainerCallback):
    """Stands behind what prints to the console, and gives the details back."""

    def __init__(self, summarizing: ConsoleSummary) -> None:
        self._summarizing = summarizing

    def on_log(self, *event: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None:
            logs.update(self._summarizing.details)
        self._summarizing.details = {}


def _prints(callback: TrainerCallback) -> bool:
    """Return whether a callback is Trainer's own for a console or a notebook."""
    own = isinstance(callback, PrinterCallback | ProgressCallback)
    return own or type(callback).__name__ == "NotebookProgressCallback"  # imports IPython
