"""Helpers independent of quantization: records, checkpoints, locks, messages, processes."""
