"""Training data as in the paper: filtered, joined, split and chunked text.

Here: reading documents (`source`), the text filters (`filters`), the perplexity filter
(`perplexity`), the resumable pipeline (`prepare`) and its output format (`chunked`).
`recipes/prepare_data.py` is the command. The corpus for demos and tests is `metis_hf.data.corpus`.
"""

from metis_hf.data.arguments import PrepareArguments
from metis_hf.data.chunked import load_chunked
from metis_hf.data.prepare import prepare

__all__ = ["PrepareArguments", "load_chunked", "prepare"]
