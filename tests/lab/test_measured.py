"""What measurements on disk depend on."""

from __future__ import annotations

import importlib.metadata

from metis_hf.lab.measured import code_digest


def test_another_transformers_is_other_code(monkeypatch):
    """Its models are what is measured."""
    code_digest.cache_clear()
    now = code_digest()
    with monkeypatch.context() as patch:
        real = importlib.metadata.version
        patch.setattr(
            importlib.metadata,
            "version",
            lambda name: real(name) + "+other" * (name == "transformers"),
        )
        code_digest.cache_clear()
        other = code_digest()
    code_digest.cache_clear()
    assert code_digest() == now != other
