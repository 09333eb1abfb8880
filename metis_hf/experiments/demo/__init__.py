"""The demo: a small model trained under several schemes on text that Python brings along."""
