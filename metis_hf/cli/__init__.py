"""The commands of `metis-hf`, one module each: options, and a call to the code behind them.

Before their command runs, these modules do not import torch or transformers, which take seconds, so
that help and usage errors are immediate.
"""
