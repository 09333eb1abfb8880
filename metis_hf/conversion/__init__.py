"""Turning a transformers model into a quantized one and back, and saying what was converted."""
