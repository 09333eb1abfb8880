"""Fine-tuning for deployment in NVFP4: arguments, the run, its table, a smoke model."""
