"""Records whether a layer is called: code that only reads its weight bypasses its scheme."""

from __future__ import annotations

import torch


class Calls:
    """Records whether a layer was called with gradients enabled.

    Replicas of nn.DataParallel share the object of their layer.
    """

    def __init__(self) -> None:
        self._eager = self._traced = False

    def note(self) -> None:
        """Record a call; under torch.compile, the trace stands for all later calls."""
        if not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            self._note_trace()
        else:
            self._eager = True

    @torch.compiler.assume_constant_result
    def _note_trace(self) -> bool:
        # Dynamo runs this once while tracing; it adds no graph node, no guard, no graph break.
        self._traced = True
        return True

    def forget(self) -> None:
        """Forget eager calls; a trace stays, since compiled calls do not run `note`."""
        self._eager = False

    @property
    def any(self) -> bool:
        """True if the layer was called."""
        return self._eager or self._traced
