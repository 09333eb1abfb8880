"""The published methods, one short file each; importing this package registers them."""

from metis_hf.schemes import bf16, bf16_split, metis, metis_paper, nvfp4, nvidia  # noqa: F401
from metis_hf.schemes.base import (
    Role,
    Scheme,
    SchemeInfo,
    build_scheme,
    kept_directions,
    layer_rank,
    register_scheme,
    scheme_info,
    scheme_names,
)

__all__ = [
    "Role",
    "Scheme",
    "SchemeInfo",
    "build_scheme",
    "kept_directions",
    "layer_rank",
    "register_scheme",
    "scheme_info",
    "scheme_names",
]
