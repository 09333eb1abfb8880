"""Routes health figures: all of them to Trainer's reporters, a summary to the console."""

from __future__ import annotations

import sys
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler


def calling_handler(callback: TrainerCallback) -> CallbackHandler | None:
    """Return the Trainer's callback handler that is calling this callback; None outside a call.

    The handler is found by walking up the call stack, since Trainer does not pass it to callbacks.
    The handler is needed to move the callback ahead of the reporters, which Trainer calls first.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, CallbackHandler) and callback in found.callbacks:
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def put_first(callback: TrainerCallback, handler: CallbackHandler, *, details: bool) -> None:
    """Move a callback ahead of the reporters, so that they see the figures it adds to a log entry.

    The handler may be iterating over its callbacks. `details` says that the callback logs details
    of health, which are then hidden from the console.
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
    """Runs before the console printers and removes the details of health from the logs."""

    def __init__(self) -> None:
        self.details: dict[str, float] = {}

    def on_log(self, *event: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = {} if logs is None else logs
        # Details are "metis/<tensor>/<layers>/<statistic>"; means over all layers have three parts.
        names = [name for name in logs if name.startswith("metis/") and name.count("/") > 2]
        self.details = {name: logs.pop(name) for name in names}


class _AllFigures(TrainerCallback):
    """Runs after the console printers and restores the details."""

    def __init__(self, summarizing: ConsoleSummary) -> None:
        self._summarizing = summarizing

    def on_log(self, *event: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None:
            logs.update(self._summarizing.details)
        self._summarizing.details = {}


def _prints(callback: TrainerCallback) -> bool:
    """Return whether a callback is Trainer's printer for a console or a notebook."""
    own = isinstance(callback, PrinterCallback | ProgressCallback)
    return own or type(callback).__name__ == "NotebookProgressCallback"  # imports IPython
