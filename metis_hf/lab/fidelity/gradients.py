"""Errors of a scheme's gradient: of one batch, and of the mean over batches.

All errors are computed from the inner products of all batches' gradients, exact and in the scheme.
The gradients are stored in two fp32 files (exact, scheme), 4 bytes per weight and batch each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from metis_hf.conversion.attention import attention_products
from metis_hf.conversion.convert import metis_layers
from metis_hf.layers.linear import MetisLayer, QuantLinear
from metis_hf.shared.numbers import gib

_CHUNK = 1 << 22  # weights whose gradients are multiplied at a time


class GradientFile:
    """Gradients of several weights for each of several batches, fp32, on disk.

    Every gradient is stored as [o i], so that files of schemes with other weight layouts can be
    compared. An existing file is overwritten.

    Raises:
        OSError: the disk cannot hold it.
    """

    def __init__(self, path: Path, batches: int, layers: dict[str, MetisLayer]) -> None:
        self.path = path
        # The matrix of a Conv1D is [i o], unless it is split.
        self._transposed = [x.conv1d and isinstance(x, QuantLinear) for x in layers.values()]
        sizes = [x.in_features * x.out_features for x in layers.values()]
        self._bounds = np.cumsum([0, *sizes])
        shape = (batches, int(self._bounds[-1]))
        size = 4 * math.prod(shape)
        with path.open("wb") as file:
            file.truncate(size)
            try:
                if hasattr(os, "posix_fallocate"):  # a mapped file on a full disk is fatal
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                what = f"{error.strerror}; two gradient files of {gib(size)} each are needed"
                raise OSError(error.errno, what, str(path)) from None
        self.rows = np.memmap(path, dtype=np.float32, mode="r+", shape=shape)

    def put(self, batch: int, weights: Sequence[nn.Parameter]) -> None:
        """Store the weights' `.grad` as the row of a batch; zeros for a weight without one."""
        ends = self._bounds[1:]
        for weight, turn, start, end in zip(weights, self._transposed, self._bounds, ends):
            grad = weight.grad
            if grad is not None and turn:
                grad = grad.T
            self.rows[batch, start:end] = (
                0.0 if grad is None else grad.detach().float().cpu().flatten().numpy()
            )

    def remove(self) -> None:
        """Delete the file."""
        del self.rows
        self.path.unlink(missing_ok=True)


def run_batches(
    model: PreTrainedModel,
    weights: Sequence[nn.Parameter],
    batches: Sequence[Tensor],
    done: Callable[[int], None],
) -> None:
    """Run forward and backward on each batch [b length] with training rounding.

    Dropout is off, since it would differ between runs. Only `weights` get gradients. `done` is
    called with the number of each batch while `.grad` holds the gradients of this batch alone.
    """
    wanted = {id(weight) for weight in weights}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
    model.eval()
    for _, part in (*metis_layers(model), *attention_products(model)):
        part.train()
    for number, rows in enumerate(batches):
        rows = rows.to(model.device)
        model.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        done(number)
    model.zero_grad()


@contextmanager
def on_calls(
    layers: Mapping[str, MetisLayer],
    measure: Callable[[str, Tensor, Tensor, Tensor | None], None],
) -> Iterator[None]:
    """Call measure(layer's name, input, output's gradient, row mask) for each call in the block.

    `measure` runs in the backward pass; its own calls of the layer are ignored.
    """
    busy: set[str] = set()

    def hook_of(name: str):
        def hook(layer: MetisLayer, args: Sequence[Tensor], kwargs: dict[str, Any], y: Tensor):
            if name in busy or not y.requires_grad:
                return
            x, mask = (args[0] if args else kwargs["input"]).detach(), kwargs.get("row_mask")
            mask = layer.row_mask(x) if mask is None else mask

            def take(dy: Tensor) -> None:
                busy.add(name)
                measure(name, x, dy.detach(), mask)
                busy.remove(name)

            y.register_hook(take)

        return hook

    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_hook(hook_of(name), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def inner_products(exact: GradientFile, scheme: GradientFile) -> np.ndarray:
    """Return the inner products of two files' gradients [2b 2b], fp64.

    Rows and columns are the exact batches, then the scheme's.
    """
    total = np.zeros((2 * len(exact.rows), 2 * len(exact.rows)))
    for low in range(0, exact.rows.shape[1], _CHUNK):
        part = slice(low, low + _CHUNK)
        both = np.concatenate([exact.rows[:, part], scheme.rows[:, part]])
        total += both.astype(np.float64) @ both.T
    return total


def errors(products: np.ndarray) -> tuple[list[float], list[float]]:
    """Return (relative error, cosine) of each batch's gradient, from products [2b 2b]."""
    batches = len(products) // 2
    pairs = [_pair(products, np.eye(batches)[number]) for number in range(batches)]
    return [error for error, _ in pairs], [cosine for _, cosine in pairs]


def mean_errors(products: np.ndarray) -> dict[str, float]:
    """Return relative error and cosine of the gradient's mean over batches.

    The standard errors come from the jackknife, which leaves out one batch at a time.
    """
    batches = len(products) // 2
    error, cosine = _pair(products, np.ones(batches))
    left_out = [_pair(products, 1 - np.eye(batches)[n]) for n in range(batches)]
    found = {"error": error, "cosine": cosine}
    for place, name in enumerate(("error", "cosine")):
        values = np.array([pair[place] for pair in left_out])
        spread = (batches - 1) / batches * ((values - values.mean()) ** 2).sum()
        found[f"{name}_se"] = math.sqrt(spread) if batches > 1 else math.nan
    return found


def _pair(products: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return (relative error, cosine) of a weighted sum of batches."""
    zero = np.zeros_like(weights)
    exact, scheme = np.concatenate([weights, zero]), np.concatenate([zero, weights])
    difference = scheme - exact
    length = exact @ products @ exact
    if not length > 0:
        return math.nan, math.nan
    other = scheme @ products @ scheme
    error = math.sqrt(max(difference @ products @ difference, 0.0) / length)
    return error, float(exact @ products @ scheme / math.sqrt(length * other)) if other else 0.0
