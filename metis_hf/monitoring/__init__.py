"""What a run measures of itself: spectral health, gradient noise, and the record of the run."""
