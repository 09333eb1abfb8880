"""Groups of layers that inference engines fuse into one GEMM, which needs one tensor scale."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

# Last name parts of sibling layers that are fused: llm-compressor's list, BERT's layers, and the
# linear attention of Qwen3.5 from ModelOpt's list.
DEPLOYED_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)

_EXPERT = re.compile(r"(experts\.(?:metis_\w+\.)?)\d+")


def deployed_groups(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each name, the layers that are fused with it, itself included.

    Names of layers inside a PEFT adapter end in `.base_layer`.
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
    """Return, for each name, the layers whose inputs engines quantize under the same scale.

    These are its `deployed_groups` across all experts of the block: most kernels quantize the
    tokens before they dispatch them to the experts.
    """
    together: dict[str, list[str]] = defaultdict(list)
    keys = {name: every_expert(group[0]) for name, group in deployed_groups(names).items()}
    for name, key in keys.items():
        together[key].append(name)
    return {name: tuple(together[key]) for name, key in keys.items()}


def every_expert(name: str) -> str:
    """Return a layer's name without its expert number, if it has one."""
    return _EXPERT.sub(r"\1", name)
