"""Text and tokens: chunked tokens, chat files, documents of files, the embedded corpus.

`recipes/prepare_data.py` writes chunked tokens (`chunked`) of documents that `documents` reads and
`perplexity` scores. `chat` reads the texts of a fine-tuning. The corpus for demos and tests is
`corpus`.
"""

from metis_hf.data.chunked import load_chunked

__all__ = ["load_chunked"]
