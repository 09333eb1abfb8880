"""Variants of `metis-paper`, each with one change to a detail that the paper leaves open.

    metis-hf compare --import eval/studies/paper_parts.py --config eval/studies/paper_parts.yaml \
        --data DIR --out runs/paper-parts

Changes that a config can express (rounding, scales, kept subspaces, a weight that is not split)
need no scheme here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metis_hf.operands import LowRank
from metis_hf.schemes.metis_paper import metis_paper
from metis_hf.schemes.parts import MetisConfig, Scheme, Spectral, SplitWeight, register_scheme


@dataclass(frozen=True)
class ExactFactors(Spectral):
    """Split with factors in high precision: x_hat = a diag(lam) v^T + Q(x - a diag(lam) v^T)."""

    has_codes = False  # a study may store dense values

    def with_factors(
        self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32
    ) -> tuple[Tensor, LowRank | None]:
        a, lam, v = self.split(x, key=key, row_mask=row_mask)
        low = LowRank(a, lam, v.T)
        dense = low.dense()
        options = {"dim": dim, "key": key.fold(3), "dtype": dtype}
        return quantizer(x, minus=dense, plus=dense, **options), low


def changed(
    scheme: Scheme, of_split: Callable[[Spectral], Spectral], **of_weight: object
) -> Scheme:
    """Return the scheme with changed splits of inputs and gradients, and a changed split weight."""
    for role in ("fprop_input", "dgrad_grad_output"):
        operand = getattr(scheme, role)
        split = of_split(operand.conditioner)
        scheme = replace(scheme, **{role: replace(operand, conditioner=split)})
    if isinstance(scheme.weight, SplitWeight):
        scheme = replace(scheme, weight=replace(scheme.weight, **of_weight))
    return scheme


def exact(split: Spectral) -> Spectral:
    """Return the split with factors in high precision."""
    return ExactFactors(**vars(split))


def compensated(split: Spectral) -> Spectral:
    """Return the split with its residual taken against the quantized factors."""
    return replace(split, compensated=True)


CHANGES: dict[str, tuple[Callable[[Spectral], Spectral], dict[str, object]]] = {
    "exact-factors": (exact, {"exact_factors": True}),
    "compensated": (compensated, {"compensated": True}),
    "unit-factors": (lambda split: split, {"unit_rms": True}),
}


def register(ending: str, split: Callable[[Spectral], Spectral], weight: dict[str, object]) -> None:
    """Register `metis-paper` with one change."""

    @register_scheme(
        f"metis-paper-{ending}", summary="metis-paper changed", source="2509.00404", rank_multiple=1
    )
    def build(config: MetisConfig, rank: int) -> Scheme:
        return changed(metis_paper(config, rank), split, **weight)


for ending, (split, weight) in CHANGES.items():
    register(ending, split, weight)
