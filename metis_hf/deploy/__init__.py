"""Trained models for software that does not know this package, and their model cards.

Its names are imported when they are used: transformers' quantizers import `deploy.packed_loader`,
and models, which the other files need, import transformers' quantizers.
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
