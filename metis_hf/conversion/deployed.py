"""Layers that inference engines run as one GEMM, and that therefore need one tensor scale."""

from __future__ import annotations

from collections.abc import Collection

# Last parts of the names of such layers beside each other; as llm-compressor lists them.
DEPLOYED_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


def deployed_groups(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return, for each layer of these names, those that are deployed with it, itself included."""
    groups = {}
    for name in names:
        parent, _, own = name.rpartition(".")
        together = next((group for group in DEPLOYED_TOGETHER if own in group), (own,))
        full = [f"{parent}.{other}" if parent else other for other in together]
        groups[name] = tuple(other for other in full if other in names)
    return groups
