"""Training of a quantized model by Trainer: callback, schedules, refresh, resume."""
