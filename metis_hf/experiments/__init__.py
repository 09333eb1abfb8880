"""Trainings that are compared: the runner, model sizes, recipes, `compare` and the demo."""
