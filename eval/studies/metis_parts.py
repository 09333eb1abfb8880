"""Variants of `metis` at rank 9 that drop or replace one of its parts.

    metis-hf fidelity MODEL --text FILE --import eval/studies/metis_parts.py --alone none \
        --batch 2 --schemes metis-9,metis-9-nearest-scales,...

Rank 9 is 1.5 % of 576, the width of SmolLM2-135M. The paper keeps 1.5 %; these variants use rank 9
for inputs and for output gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metis_hf.operands import LowRank
from metis_hf.schemes.metis import metis
from metis_hf.schemes.parts import (
    MetisConfig,
    Operand,
    Role,
    ScaleRule,
    Scheme,
    Spectral,
    register_scheme,
)

RANK = 9


@dataclass(frozen=True)
class TokensTwice(Spectral):
    """Split that adds a second FP4 term for the tokens with the largest errors.

    Args:
        tokens: share of tokens with a second term; each adds one token to the GEMMs.
    """

    tokens: float = 0.01

    has_codes = False  # a study may store dense values

    def with_factors(
        self, x, quantizer, *, dim, key, row_mask=None, dtype=torch.float32
    ) -> tuple[Tensor, LowRank | None]:
        options = {"dim": dim, "key": key, "row_mask": row_mask}
        x_hat, low = super().with_factors(x, quantizer, dtype=torch.float32, **options)
        error = x.float() - x_hat
        count = max(1, round(self.tokens * len(x)))
        rows = torch.linalg.vector_norm(error, dim=1).topk(count).indices
        second = quantizer(error[rows], dim=dim, key=key.fold(4))
        return x_hat.index_add(0, rows, second).to(dtype), low


Change = Callable[[Scheme], Scheme]


def with_operands(changed: Callable[[Operand], Operand], *roles: str) -> Change:
    """Change some operands."""
    return lambda scheme: replace(
        scheme, **{role: changed(getattr(scheme, role)) for role in roles}
    )


def with_scales(rule: ScaleRule, *roles: str) -> Change:
    """Change the rule for the block scales of some operands."""

    def changed(operand: Operand) -> Operand:
        return replace(operand, quantizer=replace(operand.quantizer, scale_rule=rule))

    return with_operands(changed, *roles)


def with_split(*roles: str, **fields: object) -> Change:
    """Change fields of the splits of some operands."""

    def changed(operand: Operand) -> Operand:
        return replace(operand, conditioner=replace(operand.conditioner, **fields))

    return with_operands(changed, *roles)


def as_a(kind: type[Spectral], role: str) -> Change:
    """Replace an operand's split by a subclass with the same fields."""

    def changed(operand: Operand) -> Operand:
        return replace(operand, conditioner=kind(**vars(operand.conditioner)))

    return with_operands(changed, role)


def without_split(role: str) -> Change:
    """Quantize an operand without a split."""
    return with_operands(lambda operand: Operand(operand.quantizer), role)


def without_corrections(*roles: Role) -> Change:
    """Drop the corrections of some operands."""
    return lambda scheme: replace(scheme, corrected=scheme.corrected - set(roles))


FORWARD = ("fprop_input", "fprop_weight")
SAMPLED = ("fprop_input", "dgrad_grad_output")
GRADIENT = (without_corrections(Role.DGRAD_WEIGHT), without_split("dgrad_grad_output"))

VARIANTS: dict[str, tuple[Change, ...]] = {
    "": (),
    "-nearest-scales": (with_scales(ScaleRule.ABSMAX, *FORWARD),),
    "-four-over-six": (with_scales(ScaleRule.FOUR_OVER_SIX, *FORWARD),),
    "-few-rows": (with_split(*SAMPLED, rows=4),),
    "-all-rows": (with_split(*SAMPLED, sample_frac=1.0),),
    "-no-weight-correction": (without_corrections(Role.FPROP_WEIGHT),),
    "-no-dgrad-correction": (without_corrections(Role.DGRAD_WEIGHT),),
    "-no-corrections": (without_corrections(*Role),),
    "-no-gradient-split": GRADIENT,
    "-tokens-twice": (as_a(TokensTwice, "fprop_input"),),
}
WITH_WEIGHT: dict[str, tuple[Change, ...]] = {
    "-weight-split": (),
    "-weight-split-no-input-correction": (without_corrections(Role.FPROP_INPUT),),
}
GROUPS: tuple[tuple[dict[str, tuple[Change, ...]], dict[str, object]], ...] = (
    (VARIANTS, {}),
    (WITH_WEIGHT, {"decompose": ("weight", "activation", "gradient")}),
    ({"-contraction": ()}, {"operand_mode": "contraction"}),
)


def register(ending: str, changes: tuple[Change, ...], fields: dict[str, object]) -> None:
    """Register a variant; its rank is `RANK` regardless of the config."""

    @register_scheme(
        f"metis-{RANK}{ending}", summary="metis in parts", source="eval/results/report/method.md"
    )
    def build(config: MetisConfig, rank: int) -> Scheme:
        scheme = metis(config.replace(gradient_rank_frac=1, **fields), RANK)
        for change in changes:
            scheme = change(scheme)
        return scheme


for variants, fields in GROUPS:
    for ending, changes in variants.items():
        register(ending, changes, fields)
