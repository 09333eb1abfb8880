"""One quantizer, several implementations of it.

`reference` is the definition: `Quantizer.blocks`, operation by operation. `compiled` is the same
arithmetic in a form that torch's compiler turns into a few passes over memory, on CPU and GPU.
Results are equal to the bit, stochastic rounding included. What compiled kernels do not cover
(formats other than NVFP4, Four Over Six) the reference computes.

The choice is automatic: compiled where it can be and the tensor is large enough to be worth it.
The environment variable METIS_KERNELS and `use_kernels` override it.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from metis_hf import noise
from metis_hf.numerics.formats import NVFP4
from metis_hf.numerics.kernels import compiled, formulation
from metis_hf.numerics.kernels.formulation import Variant
from metis_hf.numerics.kernels.layout import form_of, has_form
from metis_hf.numerics.layout import from_blocks
from metis_hf.numerics.rounding import Rounding
from metis_hf.numerics.scaling import ScaleRounding, ScaleRule

if TYPE_CHECKING:
    from metis_hf.numerics.quantize import Quantizer

__all__ = ["KERNELS", "fake_quantize", "use_kernels"]

KERNELS = ("reference", "compiled")
ENVIRONMENT = "METIS_KERNELS"
# Below this many elements a compilation is not worth its seconds: the reference takes less than a
# millisecond.
_WORTH_COMPILING = 1 << 15
_MAX_ELEMENTS = 2**31 - 1  # kernels count in 32 bits

_chosen: str | None = os.environ.get(ENVIRONMENT) or None  # None: automatic
_warned: set[str] = set()
_failed: set[str] = set()  # types of devices for which a compilation failed


@contextlib.contextmanager
def use_kernels(kernels: str | None) -> Iterator[None]:
    """Chooses the implementation inside a `with` block, for all threads of the process.

    Args:
        kernels: "reference", "compiled", or None for the automatic choice.

    Raises:
        ValueError: another name.
    """
    global _chosen
    _check(kernels)
    before, _chosen = _chosen, kernels
    try:
        yield
    finally:
        _chosen = before


def _check(kernels: str | None) -> None:
    if kernels is not None and kernels not in KERNELS:
        raise ValueError(
            f"kernels {kernels!r} do not exist; choose one of {', '.join(KERNELS)} "
            f"(in the environment variable {ENVIRONMENT} too)"
        )


def fake_quantize(
    x: Tensor,
    quantizer: Quantizer,
    *,
    dim: int = -1,
    key: noise.Key | int | None = None,
    dtype: torch.dtype = torch.float32,
    scaled: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Quantizes and back with the kernels in force.

    Args:
        x: any shape and float dtype, not empty.
        quantizer: what to do.
        dim: the dimension that row blocks run along.
        key: noise key, for stochastic rounding only.
        dtype: of the result, which is computed in fp32 and rounded once.
        scaled: whether the tensor scale is multiplied in.

    Returns:
        (values of the shape of `x`, the tensor scale that they still lack or None).
    """
    x = x.detach()
    kernels = _kernels_for(x, quantizer, dim, dtype)
    if kernels == "reference":
        return _reference(x, quantizer, dim, key, dtype, scaled)
    form = form_of(x, quantizer.tile, dim)
    two_level = bool(quantizer.two_level)
    variant = Variant(
        form.dims,
        two_level,
        quantizer.scale_rounding is ScaleRounding.UP,
        quantizer.rounding is Rounding.STOCHASTIC,
        scaled or not two_level,
        dtype,
    )
    noise_key = noise.as_key(key) if variant.stochastic else None
    operand = form.x if x.dtype in compiled.DTYPES else form.x.float()
    if kernels == "compiled":
        try:
            out = compiled.run(operand, variant, noise_key)
        except compiled.CompilationError as error:
            if _chosen is not None:
                raise
            _failed.add(x.device.type)
            _warn_slow(str(error))
            return _reference(x, quantizer, dim, key, dtype, scaled)
    else:
        source = None if noise_key is None else compiled.traced_noise(noise_key, x.device)
        out = formulation.fake_quantize(operand, variant, source)
    return form.restore(out[0]), out[1] if len(out) > 1 else None


def _reference(
    x: Tensor,
    quantizer: Quantizer,
    dim: int,
    key: noise.Key | int | None,
    dtype: torch.dtype,
    scaled: bool,
) -> tuple[Tensor, Tensor | None]:
    blocks = quantizer.blocks(x, dim=dim, key=key)
    missing_scale = None
    if not scaled:
        missing_scale = blocks.global_scale
        blocks = blocks._replace(global_scale=None)
    return from_blocks(blocks.values(), x.shape, quantizer.tile, dim).to(dtype), missing_scale


def _kernels_for(x: Tensor, quantizer: Quantizer, dim: int, dtype: torch.dtype) -> str:
    """The kernels for one call; "traced" inside torch.compile, which compiles them itself."""
    if not _covers(x, quantizer, dim, dtype) or _chosen == "reference":
        return "reference"
    if torch.compiler.is_compiling():
        return "traced"
    _check(_chosen)
    # Tensors that only stand for tensors: fake ones, distributed ones, those of a tracing mode.
    if type(x) is not Tensor or _get_current_dispatch_mode() is not None:
        return "reference"
    if _chosen is None:
        return _automatic(x)
    lacks = compiled.missing(x.device)
    if lacks:
        raise RuntimeError(
            f"kernels {_chosen!r} were asked for (use_kernels or {ENVIRONMENT}), and there is no "
            f"{lacks}. Without the request the reference runs, with equal results"
        )
    return _chosen


def _covers(x: Tensor, quantizer: Quantizer, dim: int, dtype: torch.dtype) -> bool:
    return (
        quantizer.fmt == NVFP4
        and quantizer.scale_rule is ScaleRule.ABSMAX
        and dtype in compiled.DTYPES
        and has_form(x, quantizer.tile, dim)
        and x.numel() <= _MAX_ELEMENTS
    )


def _automatic(x: Tensor) -> str:
    if x.numel() < _WORTH_COMPILING or x.device.type in _failed:
        return "reference"
    lacks = compiled.missing(x.device)
    if lacks is None:
        return "compiled"
    _warn_slow(f"there is no {lacks}")
    return "reference"


def _warn_slow(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"quantizers run uncompiled, several times slower, with equal results: {reason}",
            stacklevel=4,
        )
