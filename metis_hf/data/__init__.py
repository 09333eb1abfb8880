"""Training data as in the paper: filtered, joined, split and packed text.

Here: reading documents (`source`), the text filters (`filters`), the perplexity filter
(`perplexity`), the resumable pipeline (`prepare`) and its output format (`packed`).
`recipes/prepare_data.py` is the command. The corpus for demos and tests is `metis_hf.data.corpus`.
"""

from metis_hf.data.arguments import PrepareArguments
from metis_hf.data.packed import load_packed
from metis_hf.data.prepare import prepare

__all__ = ["PrepareArguments", "load_packed", "prepare"]
