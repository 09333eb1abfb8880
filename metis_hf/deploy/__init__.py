"""Exports trained models for software that does not know this package, and writes model cards.

Names are imported lazily to avoid an import cycle: transformers' quantizers import
`deploy.packed_loader`; the other files import transformers' models, which import the quantizers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metis_hf.deploy.checkpoint import (
        ExportReport,
        LossRow,
        export_checkpoint,
        load_low_rank,
        load_metis_model,
    )

__all__ = ["ExportReport", "LossRow", "export_checkpoint", "load_low_rank", "load_metis_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("metis_hf.deploy.checkpoint"), name)
