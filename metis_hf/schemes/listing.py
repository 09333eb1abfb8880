"""The registry as data: the operands of each scheme, with their bits and sources."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from metis_hf.config import MetisConfig
from metis_hf.noise import Key
from metis_hf.numerics.kernels import use_kernels
from metis_hf.numerics.layout import Tile
from metis_hf.operands import IDENTITY, Conditioner, Operand, SplitWeight
from metis_hf.operands.weight_forms import HIGH_PRECISION_BITS
from metis_hf.schemes.base import Scheme
from metis_hf.schemes.registry import build_scheme, scheme_info, scheme_names
from metis_hf.schemes.roles import Role, contracted_dim

WIDTH = 4096  # in_features, out_features and tokens of the layer whose bits are counted

SLOTS = {role: role.name.lower().replace("_", ".", 1) for role in Role}  # fprop.input, ...


def list_schemes(
    names: Sequence[str] | None = None, mode: str | None = None
) -> list[dict[str, Any]]:
    """Return a JSON-ready record for each registered scheme.

    Args:
        names: of schemes; None: all.
        mode: `MetisConfig.operand_mode`; schemes without that mode are shown in their default one.

    Raises:
        ValueError: a name that is not registered, a mode that does not exist.
    """
    return [_record(name, mode) for name in names or scheme_names()]


def _record(name: str, mode: str | None) -> dict[str, Any]:
    info = scheme_info(name)
    config = MetisConfig(scheme=name, operand_mode=mode)
    try:
        scheme = build_scheme(config, WIDTH, WIDTH)
    except ValueError:
        config = config.replace(operand_mode=None)
        scheme = build_scheme(config, WIDTH, WIDTH)
    return {
        "name": name,
        "summary": info.summary,
        "source": info.source,
        "weight": "split" if scheme.weight.is_split else "dense",
        "operands": {SLOTS[role]: _operand(scheme, role) for role in Role},
    }


def _operand(scheme: Scheme, role: Role) -> dict[str, Any]:
    used, operand = scheme.resolve(role)
    correction = _correction(scheme, role)
    if used is not role:
        return {"reuses": SLOTS[used], **correction}
    quantizer = operand.quantizer
    if quantizer is None:
        return {"format": "high precision", "bits": HIGH_PRECISION_BITS}
    size = quantizer.fmt.block_size
    square = quantizer.tile is Tile.SQUARE
    gemm, kind = SLOTS[role].split(".")
    split = kind == "weight" and scheme.multiplies_factors
    return {
        "format": quantizer.fmt.name,
        "blocks": quantizer.tile.value if size is None else f"{size if square else 1}x{size}",
        "along": None if square else {"fprop": "in", "dgrad": "out", "wgrad": "tokens"}[gemm],
        "rounding": quantizer.rounding.value,
        "scale_rounding": quantizer.scale_rounding.value if quantizer.scale_rounding else None,
        "scale_rule": quantizer.scale_rule.value,
        "two_level": bool(quantizer.two_level),
        "conditioner": "split" if split else conditioner_name(operand.conditioner),
        "bits": _bits(scheme, operand, role),
        **correction,
    }


def _correction(scheme: Scheme, role: Role) -> dict[str, Any]:
    """Describe the correction of an operand's rounding errors, along its partner's directions."""
    if role not in scheme.corrected:
        return {}
    quantizer = scheme.resolve(role)[1].quantizer
    other = Role(role ^ 1)  # the two operands of a GEMM are neighbors
    shape = WIDTH, scheme.directions(other)
    bits = _encoded_bits(Operand(quantizer), shape, -1) / WIDTH**2
    return {"correction": {"along": SLOTS[other], "bits": round(bits, 3)}}


def conditioner_name(conditioner: Conditioner) -> str:
    """Return the class name in words, with the options that are on: "full hadamard (across)"."""
    words = re.findall("[A-Z][a-z]*", type(conditioner).__name__)
    values: dict[str, Any] = (
        {f.name: getattr(conditioner, f.name) for f in dataclasses.fields(conditioner)}
        if dataclasses.is_dataclass(conditioner)
        else {}
    )
    options = [option.replace("_", " ") for option, value in values.items() if value is True]
    inner = (v for v in values.values() if isinstance(v, Conditioner) and v != IDENTITY)
    options += map(conditioner_name, inner)
    return " ".join(words).lower() + (f" ({', '.join(options)})" if options else "")


def _bits(scheme: Scheme, operand: Operand, role: Role) -> float | None:
    """Count stored bits per element of a matrix [WIDTH WIDTH]; None if that needs its values."""
    try:
        return round(_counted_bits(scheme, operand, role), 3)
    except (RuntimeError, TypeError):
        return None


def _counted_bits(scheme: Scheme, operand: Operand, role: Role) -> float:
    dim = contracted_dim(role)
    whole = (WIDTH, WIDTH)
    form = scheme.weight
    if not isinstance(form, SplitWeight) or role not in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT):
        return _encoded_bits(operand, whole, dim) / WIDTH**2
    factors = [(WIDTH, form.rank), (form.rank, WIDTH)]
    direct = dataclasses.replace(operand, conditioner=IDENTITY)
    if form.exact_factors:
        extra = HIGH_PRECISION_BITS * sum(rows * columns for rows, columns in factors)
    else:
        extra = sum(_encoded_bits(direct, shape, dim) for shape in factors)
    return (_encoded_bits(direct, whole, dim) + extra) / WIDTH**2


@functools.cache  # schemes share most of their operands
def _encoded_bits(operand: Operand, shape: tuple[int, int], dim: int) -> float:
    """Return the bits that `Operand.encode` stores for a matrix, counted on the meta device."""
    x = torch.empty(shape, device="meta")
    if not operand.has_codes(x):
        return HIGH_PRECISION_BITS * x.numel()  # saved densely
    with use_kernels("reference"):
        tensors = operand.encode(x, dim=dim, key=Key(0)).tensors
    return 8.0 * sum(t.numel() * t.element_size() for t in tensors if t is not None)
