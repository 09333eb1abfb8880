"""Shows a few figures of spectral health on the console, in place of 150."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback


def summarize(callbacks: list[TrainerCallback]) -> None:
    """Put a `ConsoleSummary` before Trainer's printer, in place, unless there is one.

    What is behind the printer gets all figures again.
    """
    printers = [n for n, callback in enumerate(callbacks) if _prints(callback)]
    if printers and not any(isinstance(callback, ConsoleSummary) for callback in callbacks):
        summarizing = ConsoleSummary()
        callbacks.insert(printers[-1] + 1, _AllFigures(summarizing))
        callbacks.insert(printers[0], summarizing)


class ConsoleSummary(TrainerCallback):
    """Stands before what prints to the console, which gets a few figures, not 150."""

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}  # what the console does not get

    def on_log(self, *event: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        measured = {key: value for key, value in (logs or {}).items() if key.startswith("metis/")}
        if logs is not None and measured:
            for key in measured:
                del logs[key]
            logs.update(summary(measured))
        self.measured = measured


class _AllFigures(TrainerCallback):
    """Stands behind what prints to the console, and gives the figures back."""

    def __init__(self, summarizing: ConsoleSummary) -> None:
        self._summarizing = summarizing

    def on_log(self, *event: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        measured, self._summarizing.measured = self._summarizing.measured, {}
        if logs is not None and measured:
            for key in summary(measured):
                logs.pop(key, None)
            logs.update(measured)


def _prints(callback: TrainerCallback) -> bool:
    """Return whether a callback is Trainer's own for a console or a notebook."""
    own = isinstance(callback, PrinterCallback | ProgressCallback)
    return own or type(callback).__name__ == "NotebookProgressCallback"  # imports IPython


def summary(measured: dict[str, float]) -> dict[str, float]:
    """Pick the figures to watch: mean SQNR of weights, activations and gradients, and alarms.

    Args:
        measured: "metis/<tensor>/<group>/<statistic>" -> mean over the group's layers, and
            "metis/<name>" -> figure of the whole model.
    """
    short = {key: value for key, value in measured.items() if key.count("/") == 1}
    by_tensor: dict[str, list[float]] = {}
    for key, value in measured.items():
        if key.count("/") > 1 and key.endswith("/sqnr_db"):
            by_tensor.setdefault(key.split("/")[1], []).append(value)
    means = {f"metis/{k}/sqnr_db": sum(v) / len(v) for k, v in by_tensor.items()}
    return {**means, **short}
