"""The two forms that kernels take tensors in, and the way there and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.numerics.kernels.formulation import BLOCK
from metis_hf.numerics.layout import Tile

_ROW_DIMS, _COLUMN_DIMS, _SQUARE_DIMS = (1,), (1,), (1, 3)


class Form(NamedTuple):
    """A tensor as kernels take it."""

    x: Tensor  # [b 16] or [g 16 c 16], contiguous
    dims: tuple[int, ...]  # inside a block
    padded: torch.Size  # of the tensor before it was cut
    shape: torch.Size  # without padding

    def restore(self, values: Tensor) -> Tensor:
        """A result of the form of `x` -> the original shape."""
        values = values.view(self.padded)
        if self.padded == self.shape:
            return values
        values = values[..., : self.shape[-1]]
        if len(self.shape) > 1:
            values = values[..., : self.shape[-2], :]
        return values.reshape(self.shape)


def has_form(x: Tensor, tile: Tile, dim: int) -> bool:
    """Whether `form_of` takes this tensor: blocks along one of the last two dimensions."""
    ndim = x.dim()
    if ndim == 0 or tile is Tile.TENSOR or not -ndim <= dim < ndim:
        return False
    if tile is Tile.ROW and dim % ndim == ndim - 1:
        return True
    if ndim < 2 or (tile is Tile.ROW and dim % ndim != ndim - 2):
        return False
    # Rows added in the middle of a tensor would move the noise of those after them.
    return ndim == 2 or x.shape[-2] % BLOCK == 0


def form_of(x: Tensor, tile: Tile, dim: int) -> Form:
    """Pads to whole blocks and cuts; for tensors with `has_form`.

    The last dimension is padded whatever dimension blocks run along: noise is drawn in groups of
    16 along it.
    """
    shape = x.shape
    along_rows = tile is Tile.ROW and dim % x.dim() == x.dim() - 1
    matrix = x if x.dim() > 1 else x[None]
    columns = -matrix.shape[-1] % BLOCK
    rows = 0 if along_rows else -matrix.shape[-2] % BLOCK
    if rows or columns:
        matrix = F.pad(matrix, (0, columns, 0, rows))
    padded = matrix.shape if rows or columns else shape
    matrix = matrix.contiguous()
    if along_rows:
        return Form(matrix.view(-1, BLOCK), _ROW_DIMS, padded, shape)
    form = matrix.view(-1, BLOCK, matrix.shape[-1] // BLOCK, BLOCK)
    return Form(form, _SQUARE_DIMS if tile is Tile.SQUARE else _COLUMN_DIMS, padded, shape)
