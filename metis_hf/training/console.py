"""Shows a few figures of spectral health on the console, in place of 150."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback


def summarize(callbacks: list[TrainerCallback]) -> None:
    """Put a `ConsoleSummary` before Trainer's printer, in place, unless there is one."""
    if not any(isinstance(callback, ConsoleSummary) for callback in callbacks):
        of_console = (n for n, callback in enumerate(callbacks) if _prints(callback))
        callbacks.insert(next(of_console, len(callbacks)), ConsoleSummary())


class ConsoleSummary(TrainerCallback):
    """Stands before what prints to the console, which gets a few figures, not 150."""

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        measured = {key: value for key, value in (logs or {}).items() if key.startswith("metis/")}
        if logs is not None and measured:
            for key in measured:
                del logs[key]
            logs.update(summary(measured))


def _prints(callback: TrainerCallback) -> bool:
    """Return whether a callback is Trainer's own for a console or a notebook."""
    own = isinstance(callback, PrinterCallback | ProgressCallback)
    return own or type(callback).__name__ == "NotebookProgressCallback"  # imports IPython


def summary(measured: dict[str, float]) -> dict[str, float]:
    """Return what a person watches: mean SQNR of weights, activations, gradients, and alarms.

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
