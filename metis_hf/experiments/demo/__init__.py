"""The demo: a small model trained under several schemes on text that Python brings along."""

# How long it takes, in the words of README.md; measured with quantizers compiled.
FULL_TIME = "less than ten minutes on two CPU cores"
QUICK_TIME = "a minute or two, once quantizers are compiled"
