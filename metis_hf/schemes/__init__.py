"""The published methods, one short file each; importing this package registers them."""

from metis_hf.schemes import (  # noqa: F401
    bf16,
    bf16_split,
    four_over_six,
    halo,
    hot_channel,
    mean,
    metis,
    metis_paper,
    mxfp4,
    nvfp4,
    nvfp4_rne,
    nvidia,
    nvidia_paper,
    occ,
    omniquant,
    outlier_suppression_plus,
    quarot,
    quartet2,
    quip,
    smoothquant,
    svdquant,
    tetrajet2,
)
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
