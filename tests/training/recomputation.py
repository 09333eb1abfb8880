"""Activation checkpointing by the names that the installed transformers has for it.

The old ones, gradient checkpointing, are all that versions for Python 3.10 know.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import transformers

_FIELDS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
_WHAT = "activation" if "activation_checkpointing" in _FIELDS else "gradient"


def recomputed(**options: Any) -> dict[str, Any]:
    """Return the training arguments that turn it on."""
    return {f"{_WHAT}_checkpointing": True, f"{_WHAT}_checkpointing_kwargs": options or None}


def is_recomputed(model: transformers.PreTrainedModel) -> bool:
    return getattr(model, f"is_{_WHAT}_checkpointing")
