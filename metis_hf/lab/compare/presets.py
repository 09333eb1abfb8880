"""Named sets of variants: the paper's tables and figures, a public grid, questions of our own.

A preset is a function that is called on use, so importing this module imports neither torch nor
transformers, and presets include schemes that are registered later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from metis_hf.lab.compare.variants import Variant


def schemes(*names: str) -> tuple[Variant, ...]:
    """Return one variant per registered scheme, unchanged."""
    return tuple(Variant.of_scheme(name) for name in names)


def _ablations(scheme: str) -> tuple[Variant, ...]:
    """Return the paper's Table 2: the control, the method, and the method without each part.

    A part that the method leaves out by default is added instead.
    """
    from metis_hf.config import DECOMPOSABLE
    from metis_hf.schemes.metis import SPLIT

    own = SPLIT if scheme == "metis" else DECOMPOSABLE
    variants = [*schemes("bf16", scheme)]
    for tensor in DECOMPOSABLE:
        word = "w/o" if tensor in own else "with"
        chosen = [t for t in DECOMPOSABLE if (t in own) != (t == tensor)]
        config = {"scheme": scheme, "decompose": chosen}
        variants.append(Variant(f"{scheme} {word} {tensor} split", config))
    whole = Variant(f"{scheme} w/o sampling", {"scheme": scheme, "sample_frac": 1.0})
    return (*variants, whole)


# The paper's rank sweep (Appendix, sensitivity analysis of rank).
_SHARES = (0.015, 0.03, 0.0625, 0.125)


def _ranks(scheme: str, shares: Sequence[float] = _SHARES) -> tuple[Variant, ...]:
    """Return the control, and a scheme at several shares of the full rank."""
    variants = [*schemes("bf16")]
    for share in shares:
        config = {"scheme": scheme, "rank_frac": share, "rank_multiple": 1}
        variants.append(Variant(f"{scheme} rank {100 * share:g}%", config))
    return tuple(variants)


def _with_split_weights() -> tuple[Variant, ...]:
    """Return all schemes with weights stored as u, s, vh and residual, and the two controls."""
    from metis_hf.schemes import scheme_names

    quantized = (name for name in scheme_names() if not name.startswith("bf16"))
    stored = filter(None, map(_stored_split, quantized))
    return (*schemes("bf16", "bf16-split"), *stored)


def _stored_split(name: str) -> Variant | None:
    """Return a scheme's variant with split weights: the scheme itself if it splits by default.

    None if the scheme rejects split weights, as the schemes for deployment do.
    """
    from metis_hf.config import MetisConfig
    from metis_hf.schemes import build_scheme

    side = 64  # any size: a scheme's weight form does not depend on it
    if build_scheme(MetisConfig(scheme=name), side, side).weight.is_split:
        return Variant.of_scheme(name)
    try:
        build_scheme(MetisConfig(scheme=name, split_weight=True), side, side)
    except ValueError:
        return None
    return Variant(f"{name}, split", {"scheme": name, "split_weight": True})


def _switched() -> tuple[Variant, ...]:
    """Return two schemes, with and without a last fifth in BF16 as in arXiv 2509.25149."""
    passes = {"forward": ["forward"], "both": ["forward", "backward"]}
    variants = [*schemes("bf16")]
    for name in ("nvidia", "metis"):
        variants += schemes(name)
        for title, high in passes.items():
            schedule = {"at": 0.8, "high_precision": high}
            variants.append(
                Variant(f"{name}, {title} in bf16 from 80%", {"scheme": name}, schedule)
            )
    return tuple(variants)


def _ladder() -> tuple[Variant, ...]:
    """Return the variants of the from-scratch runs at 51M parameters, most informative first.

    Ranks 1.5 % and 18 % are for width 640; the interval is from the paper's conference version. The
    authors' released code has its own control: the same trained branch without quantization.
    """
    unquantized = {"scheme": "metis-released", "high_precision": ["forward", "backward"]}
    return (
        *schemes("bf16", "metis", "nvidia", "nvfp4-rne", "quartet2", "four-over-six", "averis"),
        *_ranks("metis", (0.015, 0.18))[1:],
        *schemes("metis-released"),
        Variant("metis-released in bf16", unquantized),
        Variant("metis subspaces of 8 steps", {"scheme": "metis", "subspace_interval": 8}),
        *schemes("metis-paper"),
    )


# The paper's tables and rank figure, split weights alone, the precision switch, and the public grid
# of Quartet II; the control comes first.
PRESETS: dict[str, Callable[[], tuple[Variant, ...]]] = {
    "main": partial(schemes, "bf16", "bf16-split", "nvfp4", "nvidia", "metis-paper", "metis"),
    "demo": partial(schemes, "bf16", "nvfp4", "nvidia", "metis-paper", "metis"),
    "ablations": partial(_ablations, "metis-paper"),
    "ablations-metis": partial(_ablations, "metis"),
    "nvidia": partial(schemes, "bf16", "metis-paper", "metis", "nvidia"),
    "rank": partial(_ranks, "metis-paper"),
    "rank-metis": partial(_ranks, "metis"),
    "split": _with_split_weights,
    "switch": _switched,
    "quartet2-30m": partial(
        schemes,
        "bf16",
        "nvidia-unbiased",
        "four-over-six-unbiased",
        "tetrajet2",
        "quartet2",
        "metis",
    ),
    "30m": _ladder,
    "130m": partial(schemes, "bf16", "metis", "nvidia"),
}
# Defaults of `Options` under a preset.
PRESET_DEFAULTS: dict[str, dict[str, Any]] = {
    "demo": {"size": "demo", "seeds": (0,)},
    "quartet2-30m": {"size": "quartet2-30m", "seeds": (0,)},  # one seed is published
    "30m": {"size": "scale-30m"},
    "130m": {"size": "scale-130m"},
}
