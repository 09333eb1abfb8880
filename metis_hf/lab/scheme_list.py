"""The schemes of this package, one line each; imports nothing, so that listing them is instant.

Costs and gaps are copies: tests/schemes/test_schemes_command.py checks them against
`lab.cost.scheme_overhead` and the records of eval/results, and the groups against docs/schemes.md.
"""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """The line of a scheme."""

    name: str
    use: str  # its purpose, in at most 30 characters
    extra: float  # multiply-adds beyond the three GEMMs of a 4096 x 4096 layer, in % of theirs
    # Held-out loss above BF16's in %, trained from scratch; None: not on record.
    tiny: float | None = None  # 0.3M parameters, three seeds: eval/results/methods-tiny*.json
    larger: float | None = None  # 51M parameters, one seed: eval/results/scale-30m


# The schemes to start with; the others need a reason.
FIRST = (
    "bf16", "metis", "metis-paper", "metis-released", "nvfp4", "nvfp4-rne", "nvidia",
    "four-over-six", "quartet2", "mxfp4", "w4a4", "w4a16",
)  # fmt: skip
GROUPS = {
    "Controls": (
        Line("bf16", "control: nn.Linear", 0.0),
        Line("bf16-split", "control for split weights", 0.8, 0.27),
    ),
    "Spectral splits": (
        Line("metis", "the default, smallest loss gap", 4.0, 0.83, 0.13),
        Line("metis-paper", "the Metis paper as written", 7.8, 17.86, 12.65),
        Line("metis-released", "the Metis authors' code", 13.6),
        Line("mean-released", "token means instead of splits", 3.2),
    ),
    "NVFP4": (
        Line("nvfp4", "the Metis paper's baseline", 0.0, 6.1),
        Line("nvfp4-rne", "cheapest that trains well", 0.0, 2.48, 1.06),
        Line("nvidia", "the TransformerEngine recipe", 0.3, 3.13, 0.99),
        Line("nvidia-unbiased", "nvidia with unbiased gradients", 0.3),
        Line("nvidia-paper", "nvidia as rebuilt by Metis", 4.7, 6.48),
        Line("four-over-six", "nvidia with finer block scales", 0.3, 2.69),
        Line("four-over-six-unbiased", "the same, unbiased gradients", 0.3),
        Line("quartet2", "unbiased gradients by MS-EDEN", 3.6, 2.27),
        Line("tetrajet2", "oscillating weights reset", 0.5, 2.82),
        Line("hot-channel", "hot-channel errors added back", 6.5, 2.51),
    ),
    "Other formats": (
        Line("mxfp4", "the OCP format, blocks of 32", 0.0, 3.79),
        Line("mxfp4-hadamard", "mxfp4 with rotations", 0.7, 4.48),
        Line("ufp4", "a uniform four-bit grid", 0.7, 2.49),
        Line("if4", "E2M1 or INT4 per block", 0.3, 2.69),
        Line("mixfp4", "E2M1 or E1M2 per block", 0.3, 2.63),
    ),
    "Rotations": (
        Line("halo", "full-width rotations, HALO-2", 6.2, 2.6),
        Line("quarot", "full-width rotations, QuaRot", 4.7, 2.59),
        Line("quip", "random orthogonal matrices", 4.7, 2.87),
    ),
    "Channels and outliers": (
        Line("smoothquant", "inputs scaled per channel", 0.0, 2.73),
        Line("outlier-suppression-plus", "inputs shifted and scaled", 0.0, 6.34),
        Line("omniquant", "trained weight clipping", 0.0, 2.62),
        Line("svdquant", "exact low-rank weight branch", 2.6, 2.88),
        Line("occ", "outliers separated in BF16", 1.3, 2.82),
        Line("mean", "token means separate", 0.0, 7.12),
        Line("averis", "token means separate, nearest", 0.0, 3.27),
        Line("averis-hadamard", "averis with rotations in wgrad", 0.3, 3.32),
    ),
    "As deployed": (
        Line("w4a4", "served with four-bit inputs", 0.0),
        Line("w4a16", "served with four-bit weights", 0.0),
    ),
}
