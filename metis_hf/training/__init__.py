"""What a quantized model needs of Trainer: callback, schedules, refresh, resume."""
