"""Text and tokens: chunked tokens, chat files, documents of files, the embedded corpus.

`recipes/prepare_data.py` reads documents (`documents`), scores them (`perplexity`) and writes
chunked tokens (`chunked`). `chat` reads data for fine-tuning, `shards` tokenizes text folders in
memory, and `corpus` is the corpus for demos and tests.
"""

from metis_hf.data.chunked import load_chunked

__all__ = ["load_chunked"]
