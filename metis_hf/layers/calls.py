"""Takes note of a layer's calls: a model or a loss that reads its weight passes its scheme by."""

from __future__ import annotations

import torch


class Calls:
    """Takes note of a layer's calls in training, those that autograd records.

    Replicas of nn.DataParallel share the one of their layer.
    """

    def __init__(self) -> None:
        self._eager = self._traced = False

    def note(self) -> None:
        """Note a call; under torch.compile its trace, which stands for the calls to come."""
        if not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            self._note_trace()
        else:
            self._eager = True

    @torch.compiler.assume_constant_result
    def _note_trace(self) -> bool:
        # Dynamo runs this once, while it traces: no part of the graph, no guard, no graph break.
        self._traced = True
        return True

    def forget(self) -> None:
        """Forget the calls so far; a trace stays, since compiled calls do not pass here again."""
        self._eager = False

    @property
    def any(self) -> bool:
        """True if the layer was called."""
        return self._eager or self._traced
