"""The demo: a small model trained under several schemes on text that Python brings along."""

# How long `--quick` takes, in the words of docs/quickstart.md.
QUICK_TIME = "a minute or two, once quantizers are compiled"
