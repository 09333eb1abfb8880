"""Which tensor enters which GEMM, and how, in every scheme: the table that layers are held to."""

from __future__ import annotations

from pathlib import Path

from layers.layer_reference import Slot
from layers.layer_tools import CONTRACTION_ONLY, SCHEME_MODES

from metis_hf.schemes import Role

SLOTS = ["fprop.input", "fprop.weight", "dgrad.grad_output"]
SLOTS += ["dgrad.weight", "wgrad.grad_output", "wgrad.input"]
REUSED = {
    "dgrad.weight": "fprop.weight",
    "wgrad.grad_output": "dgrad.grad_output",
    "wgrad.input": "fprop.input",
}  # by slots without a line


def parse(table: str) -> dict[tuple[str, str], dict[str, Slot]]:
    """(scheme, mode) -> slot name -> line."""
    sections: dict[tuple[str, str], dict[str, Slot]] = {}
    for line in table.splitlines():
        if not line or line.startswith("#"):
            continue
        if not line.startswith(" "):
            scheme, mode = line.split(", ")
            section = sections[scheme, mode] = dict.fromkeys(SLOTS)
            section |= {slot: Slot(slot, "", reuses=reused) for slot, reused in REUSED.items()}
            continue
        slot, source, *rest = line.split(maxsplit=6)
        if source == "=":
            reused, corrected = rest
            section[slot] = Slot(slot, "", reuses=reused, corrected=corrected == "corrected")
            continue
        *rest, conditioner = rest
        corrected = conditioner.endswith(" corrected")
        conditioner = conditioner.removesuffix(" corrected")
        section[slot] = Slot(slot, source, *rest, conditioner, corrected=corrected)
    # Nothing is quantized in backward, so that the mode changes nothing.
    for scheme in ("bf16", "bf16-split", "w4a4", "w4a16"):
        sections[scheme, "contraction"] = sections[scheme, "shared"]
    return sections


OPERANDS = parse(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
# What the table has beside the registered schemes.
VARIANTS = {
    "metis split": {"scheme": "metis", "split_weight": True},
    "metis of all": {"scheme": "metis", "decompose": ("weight", "activation", "gradient")},
    "metis of weights": {"scheme": "metis", "decompose": ("weight",)},
    "metis of activations": {"scheme": "metis", "decompose": ("activation",)},
    "metis-paper dense": {"scheme": "metis-paper", "split_weight": False},
    "nvidia split": {"scheme": "nvidia", "split_weight": True},
    "quarot split": {"scheme": "quarot", "split_weight": True},
}
VARIANT_MODES = [
    (name, mode)
    for name in VARIANTS
    for mode in ("shared", "contraction")
    if name.split()[0] not in {*CONTRACTION_ONLY, "quarot"} or mode == "contraction"
]
ALL_MODES = [*SCHEME_MODES, *VARIANT_MODES]
ALL_QUANTIZED_MODES = [pair for pair in ALL_MODES if not pair[0].startswith("bf16")]


def options(scheme: str) -> dict:
    """The config's fields for a name in the table."""
    return VARIANTS.get(scheme, {"scheme": scheme})


# No dimension is a multiple of 8: every block shape has an incomplete last one.
TOKENS, IN, OUT = 37, 70, 52
# Terms go through one sum over each dimension at most, and a few single operations each time.
ROUNDINGS = TOKENS + IN + OUT + 32
RANKS = {"thin": {"rank_frac": 0.05, "rank_multiple": 1}, "full block": {"rank_multiple": 16}}


def slot_of(role: Role) -> str:
    gemm, operand = role.name.lower().split("_", 1)
    return f"{gemm}.{operand}"
