"""Casts a plain model for saving; modules that transformers keeps in fp32 stay in fp32."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers in place to the dtype that `from_pretrained` would give.

    Models list modules that stay in fp32 (`_keep_in_fp32_modules` under fp16, and
    `_keep_in_fp32_modules_strict` under bf16 too), such as the routing biases of DeepSeek V3.
    Buffers that are not saved keep their dtype, because loading recomputes them. The model is plain
    and in fp32.
    """
    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    pattern = re.compile(rf"(^|\.)({'|'.join(map(re.escape, names))})($|\.)")

    def cast_to(name: str) -> torch.dtype:
        return torch.float32 if names and pattern.search(name) else dtype

    saved = model.state_dict().keys()
    for name, param in model.named_parameters():
        param.data = param.data.to(cast_to(name))
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(cast_to(name))
    model.config.dtype = dtype
