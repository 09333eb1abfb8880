"""The digest of the numerics under its earlier name."""

from metis_hf.lab.store import numerics_digest as code_digest

__all__ = ["code_digest"]
