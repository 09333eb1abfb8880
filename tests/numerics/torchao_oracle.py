"""torchao's casts; `make` installs it apart, since transformers loads it wherever it is."""

import logging
import sys
from pathlib import Path

sys.path.append(str(Path(sys.prefix) / "oracles"))
logging.getLogger("torchao").setLevel(logging.CRITICAL)  # its GPU kernels do not load on a CPU

from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2  # noqa: E402
from torchao.prototype.mx_formats.kernels import (  # noqa: E402
    f4_unpacked_to_f32,
    unpack_uint4,
)
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import (  # noqa: E402
    nvfp4_quantize,
    per_tensor_amax_to_scale,
)
from torchao.prototype.mx_formats.utils import to_blocked  # noqa: E402

__all__ = [
    "DTYPE_FP6_E2M3",
    "DTYPE_FP6_E3M2",
    "ScaleCalculationMode",
    "f4_unpacked_to_f32",
    "nvfp4_quantize",
    "per_tensor_amax_to_scale",
    "to_blocked",
    "to_dtype",
    "to_mx",
    "unpack_uint4",
]
