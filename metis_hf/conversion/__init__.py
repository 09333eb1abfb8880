"""Convert a transformers model to a quantized one and back, and report what was converted."""
