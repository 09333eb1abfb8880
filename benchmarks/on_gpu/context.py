"""The context that all parts receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from timing import Row

from on_gpu.record import Clock, Entry

if TYPE_CHECKING:
    from on_gpu.scale import Text

TOKENS = 8192  # of a layer's input


@dataclass(frozen=True)
class Context:
    """The options of a call and the state that its parts share.

    Attributes:
        device: the device to measure.
        quick: tiny sizes, to see that everything runs.
        clock: of the call.
        entry: name of a part -> its entry in the record.
        work: folder for checkpoints and other large files.
        model: directory of a causal language model, for `fidelity`.
        text: UTF-8 file, for `fidelity`.
        data: directory of chunked tokens, for `compare`.
        tokens: training tokens, for `scale`.
        peers: folder of checkouts, for `layer`.
        schemes: the schemes that `compare` trains.
        train_minutes: training time of `compare`, all schemes together.
    """

    device: torch.device
    quick: bool
    clock: Clock
    entry: Callable[[str], Entry]
    work: Path
    model: str | None = None
    text: Path | None = None
    data: Path | None = None
    tokens: Text | None = None
    peers: Path | None = None
    schemes: tuple[str, ...] = ()
    train_minutes: float = 12.0

    @property
    def options(self) -> dict[str, Row]:
        """Return part -> the options that its results depend on, for parts that have options."""
        found: dict[str, Row] = {}
        if self.model is not None and self.text is not None:
            model, text = Path(self.model).absolute().name, self.text.name
            found["fidelity"] = {"model": model, "text": text}
        if self.data is not None:
            found["compare"] = {
                "data": self.data.absolute().name,
                "schemes": list(self.schemes),
                "train_minutes": self.train_minutes,
            }
        if self.tokens is not None:
            found["scale"] = self.tokens.options
        return found

    @property
    def budget(self) -> float:
        """Return the seconds that the timed rounds of one item may take."""
        return min(2.0 if self.quick else 20.0, max(0.0, self.clock.left()))

    @property
    def rounds(self) -> int:
        return 2 if self.quick else 20
