"""torchao's casts, imported at the first use of one: that takes seconds.

`make` installs torchao apart, since transformers loads it wherever it is.
"""

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(sys.prefix) / "oracles"))
logging.getLogger("torchao").setLevel(logging.CRITICAL)  # its GPU kernels do not load on a CPU

MODULES = {
    "DTYPE_FP6_E2M3": "constants",
    "DTYPE_FP6_E3M2": "constants",
    "ScaleCalculationMode": "config",
    "nvfp4_quantize": "nvfp4_tensor",
    "per_tensor_amax_to_scale": "nvfp4_tensor",
    "to_blocked": "utils",
    "to_dtype": "mx_tensor",
    "to_mx": "mx_tensor",
    "unpack_uint4": "kernels",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"torchao.prototype.mx_formats.{MODULES[name]}"), name)
