"""MS-EDEN's random basis (Quartet II, arXiv 2601.22813): a Hadamard rotation with fresh signs.

The quantizer's part, nearest elements and corrected scales, is `numerics.scaling.corrected_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.noise import Key, constant, random_bits
from metis_hf.numerics.kernels import Packed, pack, unpack
from metis_hf.operands import Encoded, Part, Work
from metis_hf.transforms.rotation import sylvester

BLOCK = 16  # of NVFP4


class Contents(NamedTuple):
    """Fingerprints of what a call's gradient meets in its two GEMMs; 0-dim int32."""

    weight: Tensor
    input: Tensor


@dataclass(frozen=True)
class RandomHadamard:
    """x_hat = R^T Q(R x), R = H D: groups of 128 along `dim`, signs D of the content of a tensor.

    Both operands of a GEMM that have their signs of the same tensor are in the same basis, as
    hardware wants them: in dgrad those of the weight, in wgrad those of the input. So every call
    has fresh signs, an equal call equal ones, and nothing is drawn. The result keeps the padding
    along `dim`, a multiple of 16: the product of the rotated copies contains it. Where 128 does not
    divide that, groups are of the largest power of two that does.

    Args:
        seed: what signs depend on besides that content.
        partner: "weight" or "input", whose signs a gradient takes; None: signs of the matrix's own
            content, as its noise key has it.
        content: of the partner, 0-dim int32; `bind` puts it in. Without, the matrix's own counts.
    """

    seed: int = 0
    partner: str | None = None
    content: Tensor | None = None

    def bind(self, contents: Contents) -> RandomHadamard:
        """The conditioner of one call."""
        if self.partner is None:
            return self
        return replace(self, content=getattr(contents, self.partner))

    def __call__(self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32) -> Tensor:
        if x.numel() == 0:
            return x.to(dtype)
        signs = self._signs(self._content(key, x), x.shape[dim])
        quantized = quantizer(rotate(x, signs, dim=dim), dim=dim, key=key)
        return unrotate(quantized, signs, dim=dim).to(dtype)

    def parts(self, x, quantizer, *, dim, key, row_mask=None) -> list[Part]:
        rotated = rotate(x, self._signs(self._content(key, x), x.shape[dim]), dim=dim)
        return [Part("rotated", rotated, quantizer(rotated, dim=dim, key=key))]

    def encode(self, x, quantizer, *, dim, key, row_mask=None) -> Encoded:
        content = self._content(key, x)
        rotated = rotate(x, self._signs(content, x.shape[dim]), dim=dim)
        return Encoded((*pack(rotated, quantizer, dim=dim, key=key), content))

    def decode(self, encoded, quantizer, *, dim, shape, dtype=torch.float32) -> Tensor:
        *packed, content = encoded.tensors
        padded = _padded_shape(shape, dim)
        quantized = unpack(Packed(*packed), quantizer, dim=dim, shape=padded)
        return unrotate(quantized, self._signs(content, shape[dim]), dim=dim).to(dtype)

    def work(self, shape, *, dim) -> Work:
        rows, columns = _padded_shape(shape, dim)
        product = 2.0 * rows * columns * group_size(shape[dim])
        once = {"rotation": product}
        return Work({"rotation": 2 * product}, once, once, ((rows, columns),))

    def _content(self, key: Key, x: Tensor) -> Tensor:
        if self.content is not None:
            return self.content
        if key.data is not None:
            return key.data
        return torch.full((), key.static >> 1, dtype=torch.int32, device=x.device)

    def _signs(self, content: Tensor, n: int) -> Tensor:
        """+-1 [group], fp32."""
        bits = random_bits(group_size(n), Key(self.seed, content), content.device)
        return 1.0 - 2.0 * (bits < 0)


def group_size(n: int) -> int:
    """How many of n entries, zero-padded to blocks of 16, are rotated together."""
    blocks = (n + BLOCK - 1) // BLOCK
    # Tests rather than bit operations: torch.compile knows n as a symbol.
    return next((size for size in (128, 64, 32) if blocks % (size // BLOCK) == 0), BLOCK)


def rotate(x: Tensor, signs: Tensor, *, dim: int) -> Tensor:
    """H D x for every group along `dim` of x [t c], zero-padded to blocks; fp32 or fp64."""
    x = x if x.dtype is torch.float64 else x.float()
    missing = -x.shape[dim] % BLOCK
    if missing:
        x = F.pad(x, (0, missing) if dim % 2 else (0, 0, 0, missing))
    return _by_group(x, _hadamard_like(len(signs), x) * signs.to(x.dtype), dim)


def unrotate(x: Tensor, signs: Tensor, *, dim: int) -> Tensor:
    """The inverse of `rotate`, padding included."""
    return _by_group(x, _hadamard_like(len(signs), x) * signs.to(x.dtype)[:, None], dim)


def _by_group(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """matrix [group group] times every group along `dim` of x [t c]."""
    if dim % 2:
        return (x.reshape(-1, len(matrix)) @ matrix.T).view(x.shape)
    return (matrix @ x.reshape(-1, len(matrix), x.shape[1])).flatten(0, 1)


def _padded_shape(shape: tuple[int, int], dim: int) -> tuple[int, int]:
    rows, columns = shape
    missing = -shape[dim] % BLOCK
    return (rows, columns + missing) if dim % 2 else (rows + missing, columns)


@constant
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return sylvester(size).to(device, dtype)


def _hadamard_like(size: int, x: Tensor) -> Tensor:
    return _hadamard(size, x.dtype, x.device)
