"""Stand-ins for CUDA graphs on machines without a GPU."""

from __future__ import annotations


class Again:
    """Computes a recording's step again, from its own places, into the tensors that it gave.

    That is what a CUDA graph does with them.
    """

    def __init__(self, model) -> None:
        self.model = model
        self.played = 0

    def _trained(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    def __call__(self, run):
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        loss = run()
        self.places = places = [p.grad for p in self._trained()]

        def play() -> None:
            self.played += 1
            parameters = self._trained()
            before = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            loss.copy_(run())
            for p, place, old in zip(parameters, places, before, strict=True):
                place.copy_(p.grad)
                p.grad = old

        # Nothing is computed while a graph is recorded.
        for place in (loss, *places):
            place.detach_().fill_(float("nan"))
        for buffer, before in buffers:
            buffer.copy_(before)
        return play, loss


class AgainFromPlaces:
    """Calls again what was recorded, which writes its results into places that it knows."""

    def __init__(self, model=None) -> None:
        self.model = model
        self.played = 0

    def __call__(self, run):
        def play() -> None:
            self.played += 1
            run()

        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        run()
        for buffer, before in buffers:
            buffer.copy_(before)
        return play, None
