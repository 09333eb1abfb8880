"""What the installed versions of other libraries can do; Python 3.10 has no newer ones."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

OLD_TRANSFORMERS = Version(version("transformers")) < Version("5.21")
# Dequantizing while loading.
reads_packed = pytest.mark.skipif(
    OLD_TRANSFORMERS or Version(version("compressed-tensors")) < Version("0.20"),
    reason="this transformers or compressed-tensors does not dequantize while loading",
)
