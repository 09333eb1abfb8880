"""Text to train tokenizers and small models on."""

from __future__ import annotations

import functools

from metis_hf.data.corpus import Document, stdlib_documents


@functools.cache
def documents() -> tuple[Document, ...]:
    """Return the standard library's sources, read once in a process: reading takes a second."""
    return tuple(stdlib_documents())
