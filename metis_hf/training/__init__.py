"""Training of quantized models with Trainer: callback, schedules, refresh, resume."""
