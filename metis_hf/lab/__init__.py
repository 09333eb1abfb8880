"""Measure schemes: fidelity, comparisons, evaluations, analyses and cost."""
