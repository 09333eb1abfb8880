"""Measure schemes: fidelity, comparisons, evaluations, analyses, and what they cost."""
