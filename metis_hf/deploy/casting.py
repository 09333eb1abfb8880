"""The dtype in which a plain model is saved: what transformers keeps in fp32 stays there."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from transformers import PreTrainedModel


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give parameters and saved buffers the dtype that `from_pretrained` would, in place.

    Models name modules that stay in fp32 (`_keep_in_fp32_modules` under fp16, and
    `_keep_in_fp32_modules_strict` under bf16 too), such as the routing biases of DeepSeek V3.
    Buffers that are not saved stay as they are: a loader computes them.

    Args:
        model: plain, in fp32.
        dtype: floating point.
    """
    kept = _kept_in_fp32(model, dtype)
    saved = model.state_dict().keys()
    for name, param in model.named_parameters():
        param.data = param.data.to(torch.float32 if kept(name) else dtype)
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(torch.float32 if kept(name) else dtype)
    model.config.dtype = dtype


def _kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a function of a parameter's or buffer's name: does it stay in fp32 under `dtype`?"""
    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not names:
        return lambda name: False
    pattern = re.compile(rf"(^|\.)({'|'.join(map(re.escape, names))})($|\.)")
    return lambda name: pattern.search(name) is not None
