"""Measurements of a run: spectral health, gradient noise, and the record of the run."""
