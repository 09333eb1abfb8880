"""The paper's published tables as data, and the rows that match a trained scheme."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

PAPER_TASKS = (
    "arc_challenge",
    "arc_easy",
    "boolq",
    "lambada_openai",
    "piqa",
    "race",
    "hellaswag",
)
TITLES = dict(zip(PAPER_TASKS, ("ARC-C", "ARC-E", "BoolQ", "LAMBADA", "PIQA", "RACE", "HellaSwag")))

# Scheme -> the paper's name; schemes that the paper does not have are absent.
METHODS = {
    "bf16": "BF16",
    "nvfp4": "FP4",
    "metis": "FP4-Metis",
    "metis-paper": "FP4-Metis",
    "nvidia": "FP4-Nvidia's Recipe",
}
# Config fields that change a scheme's computation -> the values of the published method.
# Ranks and samples are free: the paper's are shares, and small models need larger ones.
_AS_PUBLISHED: dict[str, tuple[Any, ...]] = {
    "format": (None, "nvfp4"),
    "outer_scale": (None, "tensor"),
    "high_precision": (None, (), []),
    "split_weight": (None,),
    "operand_mode": (None,),
    "scheme_pattern": (None, {}),
    "attention": (None,),
    "forward_rounding": (None,),
    "backward_rounding": (None,),
    "scale_rounding": (None,),
    "two_level": (None, True),
}
# Blocks in high precision are part of NVIDIA's recipe, and of no other method.
_KEPT_BLOCKS = ("keep_first_blocks", "keep_last_blocks")
ABLATIONS = {
    "weight": "w/o Weight Decomposition",
    "activation": "w/o Activation Decomposition",
    "gradient": "w/o Gradient Decomposition",
}


@cache
def paper_tables() -> dict[str, Any]:
    """Return `paper_tables.json`: source, units, tasks, models, tables and notes."""
    return json.loads(
        (files("metis_hf.lab.evaluate") / "paper_tables.json").read_text(encoding="utf-8")
    )


def published_method(quantization: dict[str, Any]) -> str | None:
    """Return the paper's name for a checkpoint's `quantization_config`; None if it has none."""
    if any(quantization.get(name) not in known for name, known in _AS_PUBLISHED.items()):
        return None
    method = METHODS.get(quantization.get("scheme", ""))
    kept = any(quantization.get(name) for name in _KEPT_BLOCKS)
    if kept and method != METHODS["nvidia"]:
        return None
    if method == "FP4-Metis":
        parts = quantization.get("decompose")  # None: the full method
        missing = [] if parts is None else [part for part in ABLATIONS if part not in parts]
        if len(missing) > 1:
            return None
        return ABLATIONS[missing[0]] if missing else method
    return method


def shared_methods(rows: Sequence[tuple[str, str | None]], model: str) -> list[str]:
    """Return the methods that the paper has too, for rows (scheme, `published_method` or None).

    Raises:
        ValueError: the paper has no such model, or none of the methods for it.
    """
    published = published_rows(model)
    methods = [method for _, method in rows if method is not None and method in published]
    if not methods:
        raise ValueError(
            f"the paper has no row of {model} for any of the evaluated schemes "
            f"({', '.join(scheme for scheme, _ in rows)}); it has {', '.join(published)}"
        )
    return list(dict.fromkeys(methods))


def published_rows(model: str) -> dict[str, dict[str, Any]]:
    """Return method -> row of a model, from the three tables.

    The ablation's row "Metis" is left out: its scores are the scores of BF16 (see the notes).

    Raises:
        ValueError: the paper has no such model.
    """
    tables = paper_tables()
    if model not in tables["models"]:
        raise ValueError(
            f"paper={model!r}; choose a model of the paper: {', '.join(tables['models'])}"
        )
    rows: dict[str, dict[str, Any]] = {}
    for table in tables["tables"].values():
        for row in table["rows"]:
            if row["model"] == model and row["method"] != "Metis":
                rows.setdefault(row["method"], row)
    return rows
