"""Effects of schemes on predictions: loss, divergence from the exact model, agreement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from metis_hf.lab.fidelity.subject import Part, running
from metis_hf.layers.linear import MetisLayer
from metis_hf.schemes import Scheme

Batch = dict[str, float]  # statistics of a batch by name
_ROWS = 1024  # of logits that are turned into fp32 probabilities at a time


@torch.no_grad()
def predictions(
    model: PreTrainedModel,
    layers: Mapping[str, Part],
    ids: Tensor,
    batch: int,
    schemes: Sequence[dict[str, Scheme]],
    advance: Callable[[], None] = lambda: None,
    *,
    training: bool = False,
) -> list[list[Batch]]:
    """Compare the next-token distributions of schemes with the exact model's, batch by batch.

    The exact model runs once for each batch, and its logits are kept no longer than that. Where a
    scheme names some layers only, those that run before them are not computed a second time: the
    exact outputs of the batch's layers are then held in memory.

    Args:
        model: with its converted layers.
        layers: those layers, and its attention where that is quantized.
        ids: [n length]
        batch: sequences of a batch.
        schemes: what is compared: schemes by layer; layers that are not named run exactly.
        advance: called after each scheme of each batch.
        training: with the rounding of training; else with that of evaluation. Dropout is off.

    Returns:
        For each of `schemes` and each batch: "loss" and "exact", nats per token; "kl", of the exact
        distribution from the scheme's, nats per token; "top1", the share of tokens with the same
        likeliest successor.
    """
    model.eval()
    for part in layers.values():
        part.train(training)
    found: list[list[Batch]] = [[] for _ in schemes]
    for rows in ids.split(batch):
        rows = rows.to(model.device)
        labels = rows[:, 1:].flatten()
        outputs = _ExactOutputs({n: x for n, x in layers.items() if isinstance(x, MetisLayer)})
        partial = any(len(scheme) < len(layers) for scheme in schemes)
        with running(layers), outputs.recorded() if partial else contextlib.nullcontext():
            exact = model(input_ids=rows).logits[:, :-1].flatten(0, 1)
        for scheme, batches in zip(schemes, found):
            with running(layers, scheme), outputs.given_before(scheme):
                logits = model(input_ids=rows).logits[:, :-1].flatten(0, 1)
            batches.append(_compare(exact, logits, labels))
            advance()
    return found


class _ExactOutputs:
    """The outputs of layers in an exact run, given again where nothing before them has changed.

    A layer that runs more than once in a pass is computed always.
    """

    def __init__(self, layers: dict[str, MetisLayer]) -> None:
        self.layers = layers
        self.found: dict[str, Tensor | None] = {}  # in the order of first runs; None: ran again

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the outputs of a forward pass that runs in the block."""

        def record(name: str):
            def hook(_layer: MetisLayer, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
                # A copy: some models add to a layer's output in place.
                self.found[name] = None if name in self.found else output.clone()

            return hook

        handles = [layer.register_forward_hook(record(name)) for name, layer in self.layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def given_before(self, names: Collection[str]) -> Iterator[None]:
        """Give the recorded outputs, for the block, of layers that ran before all of `names`."""
        order = list(self.found)
        first = min((order.index(name) for name in names if name in self.found), default=len(order))
        before = [(self.layers[name], self.found[name]) for name in order[:first]]
        given = [(layer, output) for layer, output in before if output is not None]
        for layer, output in given:
            vars(layer)["forward"] = _Given(output)
        try:
            yield
        finally:
            for layer, _ in given:
                del vars(layer)["forward"]


class _Given:
    """A forward pass that returns a copy of an output that is known."""

    def __init__(self, output: Tensor) -> None:
        self.output = output

    def __call__(self, *_args: object, **_kwargs: object) -> Tensor:
        return self.output.clone()


def _compare(exact: Tensor, logits: Tensor, labels: Tensor) -> Batch:
    """Return the statistics of logits [t v] against exact ones, with labels [t]."""
    sums = torch.zeros(4, dtype=torch.float64)
    parts = zip(exact.split(_ROWS), logits.split(_ROWS), labels.split(_ROWS))
    for p, q, label in parts:
        p, q = F.log_softmax(p.float(), -1), F.log_softmax(q.float(), -1)
        found = (
            F.nll_loss(q, label, reduction="sum"),
            F.nll_loss(p, label, reduction="sum"),
            F.kl_div(q, p, reduction="sum", log_target=True),
            (p.argmax(-1) == q.argmax(-1)).sum(),
        )
        sums += torch.stack(found).cpu().double()  # some devices have no fp64
    loss, exact_loss, kl, top1 = (sums / len(labels)).tolist()
    return {"loss": loss, "exact": exact_loss, "kl": kl, "top1": top1}
