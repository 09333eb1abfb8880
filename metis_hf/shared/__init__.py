"""Helpers that know nothing of quantization: records on disk, progress, HTML pages."""
