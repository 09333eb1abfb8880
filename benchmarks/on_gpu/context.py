"""What the parts are given."""

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
    """The options of a call, and what its parts share.

    Attributes:
        device: that is measured.
        quick: tiny sizes, to see that everything runs.
        clock: of the call.
        entry: name of a part -> what the record holds of it.
        work: folder for checkpoints and other large files.
        model: directory of a causal language model, for `fidelity`.
        text: UTF-8 file, for `fidelity`.
        data: directory of chunked tokens, for `compare`.
        tokens: that `scale` trains on.
        peers: folder of checkouts, for `layer`.
        schemes: that `compare` trains.
        train_minutes: that `compare` trains, all schemes together.
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
        """The options that results of a part depend on, for the parts that were given any."""
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
        """Seconds that the timed rounds of one item may take."""
        return min(2.0 if self.quick else 20.0, max(0.0, self.clock.left()))

    @property
    def rounds(self) -> int:
        return 2 if self.quick else 20
