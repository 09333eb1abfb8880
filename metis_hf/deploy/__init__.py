"""Trained models for software that does not know this package, and their model cards."""

from metis_hf.deploy.checkpoint import (
    ExportReport,
    LossRow,
    export_checkpoint,
    load_low_rank,
    load_metis_model,
)

__all__ = ["ExportReport", "LossRow", "export_checkpoint", "load_low_rank", "load_metis_model"]
