"""Layers that inference engines run as one GEMM, and that therefore need one tensor scale."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

# Last parts of the names of such layers beside each other, as llm-compressor lists them; BERT's;
# and the linear attention of Qwen3.5, as ModelOpt lists it.
DEPLOYED_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)

_EXPERT = re.compile(r"(experts\.(?:metis_\w+\.)?)\d+")  # with its number


def deployed_groups(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each layer of these names, those that are deployed with it, itself included.

    An adapter around a layer, as PEFT's, ends its name in `.base_layer`.
    """
    by_name = {name.removesuffix(".base_layer"): name for name in names}
    groups = {}
    for bare, name in by_name.items():
        parent, _, own = bare.rpartition(".")
        together = next((group for group in DEPLOYED_TOGETHER if own in group), (own,))
        full = [f"{parent}.{other}" if parent else other for other in together]
        groups[name] = tuple(by_name[other] for other in full if other in by_name)
    return groups


def input_groups(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each layer of these names, those whose inputs engines quantize under one scale.

    Besides `deployed_groups` the experts of a layer: most kernels quantize the tokens before they
    go to the experts.
    """
    together: dict[str, list[str]] = defaultdict(list)
    keys = {name: every_expert(group[0]) for name, group in deployed_groups(names).items()}
    for name, key in keys.items():
        together[key].append(name)
    return {name: tuple(together[key]) for name, key in keys.items()}


def every_expert(name: str) -> str:
    """Return a layer's name without the number of its expert, if it is one's."""
    return _EXPERT.sub(r"\1", name)
