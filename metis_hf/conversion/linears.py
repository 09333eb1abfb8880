"""Recognition of plain linear layers: y = x W^T + b and nothing else.

A subclass of nn.Linear is one if it computes with nn.Linear's own forward pass, or with one that
was read and is listed here. A numeric probe would not do: routers of mixtures add jitter in
training alone, and a layer may clamp values that no probe reaches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Forward passes that were read (transformers 5.23), by module and qualified name, and what they do.
_READ = {
    # Not fused with the bias on purpose: in 16 bits the sum is rounded once more, as in training.
    "transformers.models.falcon.modeling_falcon.FalconLinear.forward": "input @ weight.T + bias",
}

# What accelerate's hooks put on an instance.
HOOKED = ("forward", "_old_forward", "_hf_hook")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Whose weights transformers (5.23) reads without a call: their owner's class, their names.
_ONLY_READ = {
    "WavLMAttention": ("q_proj", "k_proj", "v_proj", "out_proj"),
    # dt_proj always, the others by the kernels of mamba_ssm where these are installed: a model is
    # converted alike on all machines.
    "MambaMixer": ("x_proj", "dt_proj", "out_proj"),
    "FalconMambaMixer": ("x_proj", "dt_proj", "out_proj"),
    "JambaMambaMixer": ("dt_proj",),
    "Mamba2Mixer": ("out_proj",),
    "BambaMixer": ("out_proj",),
    "FalconH1Mixer": ("out_proj",),
    "GraniteMoeHybridMambaLayer": ("out_proj",),
    "NemotronHMamba2Mixer": ("out_proj",),
    "Zamba2MambaMixer": ("out_proj",),
    "TDNNLayer": ("kernel",),
    "DetrMHAttentionMap": ("k_proj",),
    "ConditionalDetrMHAttentionMap": ("k_proj",),
    "MaskFormerDetrMHAttentionMap": ("k_proj",),
    "DabDetrMHAttentionMap": ("k_linear",),
    "LayoutLMv2Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "LayoutLMv3Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "PPDocLayoutV2ReadingOrderEncoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "LongcatFlashTopkRouter": ("classifier",),
    "MobileBertLMPredictionHead": ("dense", "decoder"),
    "NeoMMEForMaskedLM": ("unembedding_projection",),
    "Gemma3nTextAltUp": ("correction_coefs",),  # in training
    "LSHSelfAttention": ("query_key", "value"),  # in generation from a cache
}
# Read slice by slice where the config says slow_but_exact and pretraining_tp > 1, else called.
_READ_IN_SLICES = {"BloomAttention": "dense", "BloomMLP": "dense_4h_to_h"}

# To whose weights transformers (5.23) writes in place, which does not reach factors.
_WRITTEN = {
    "RwkvSelfAttention": ("output",),  # RwkvModel rescales both for evaluation
    "RwkvFeedForward": ("value",),
    "Gemma3nTextAltUp": ("prediction_coefs",),  # clamped in training
}


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an nn.Linear or Conv1D, or of a class derived from them."""
    return isinstance(module, nn.Linear | Conv1D)


def why_not_plain(module: nn.Module) -> str | None:
    """Return why an nn.Linear or Conv1D, or a subclass, is no plain linear layer; None: it is.

    The reasons, all of subclasses:

    - torch's NonDynamicallyQuantizableLinear, which nn.MultiheadAttention never calls: it reads the
      weight.
    - another `__call__`, or a forward pass that is neither the base class's nor listed here
      (routers, which also choose; DeepSeek V4's, block-diagonal; Idefics', two weights; layers of
      other quantization methods).
    - parameters, buffers or submodules beside weight and bias: parametrized weights, adapters.
    - a forward pass that was put on the instance. Hooks of accelerate are none: they wrap the
      class's, and follow the layer.
    """
    cls = type(module)
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"its owner reads the weight of the {cls.__name__} and does not call it"
    base = nn.Linear if isinstance(module, nn.Linear) else Conv1D
    forward: Any = cls.forward
    read = f"{forward.__module__}.{getattr(forward, '__qualname__', '')}" in _READ
    if cls.__call__ is not base.__call__ or not (forward is base.forward or read):
        return f"its class {cls.__name__} has a forward pass of its own"
    extra = _beside(module)
    if extra or module._parameters.get("weight") is None:
        what = ", ".join(sorted(extra)) or "no weight"
        return f"its class {cls.__name__} has {what} beside weight and bias"
    if _forward_replaced(module):
        return "its forward pass was replaced by another (module.forward = ...)"
    return None


def _forward_replaced(module: nn.Module) -> bool:
    """Return whether an instance has another forward pass than its class, accelerate's aside."""
    own = module.__dict__.get("forward")
    if isinstance(own, functools.partial) and own.func.__module__ == "accelerate.hooks":
        own = module.__dict__.get("_old_forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def why_only_read(owner: Any, child: str) -> str | None:
    """Return why an owner computes with a child's weight without calling it; None: it calls."""
    sliced = getattr(owner, "slow_but_exact", False) and owner.pretraining_tp > 1
    for cls in type(owner).__mro__:
        name = cls.__name__
        if child in _ONLY_READ.get(name, ()) or (sliced and child == _READ_IN_SLICES.get(name)):
            return f"its owner, a {name}, reads its weight without calling it"
    return None


def why_not_split(owner: nn.Module, child: str) -> str | None:
    """Return why a child's weight cannot be stored as factors; None: it can."""
    for cls in type(owner).__mro__:
        if child in _WRITTEN.get(cls.__name__, ()):
            return (
                f"its weight, of a {cls.__name__}, is written to in place, which does not reach "
                "the factors that the scheme stores"
            )
    return None


def why_not_trainable(weight: Tensor) -> str | None:
    """Return why a weight is no plain Parameter of floating-point numbers; None: it is."""
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, which another library manages"
    if weight.dtype not in _FLOATS:
        return f"its weight is stored in {str(weight.dtype).removeprefix('torch.')}"
    return None


def _beside(module: nn.Module) -> set[str]:
    """Return names of tensors and modules beside weight and bias: the mask of torch's pruning."""
    return {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}


@dataclass(frozen=True)
class LinearOrigin:
    """The module that a converted layer replaced, where that was a subclass.

    Args:
        cls: its class.
        attributes: what its instance had that an nn.Linear or Conv1D has not.
    """

    cls: type[nn.Module]
    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> LinearOrigin | None:
        """Return the origin of a linear layer; None for an nn.Linear or Conv1D itself."""
        if type(module) in (nn.Linear, Conv1D):
            return None
        common = {*nn.Module().__dict__, "in_features", "out_features", "nf", "nx", *HOOKED}
        own = {key: value for key, value in module.__dict__.items() if key not in common}
        return cls(type(module), own)

    def restore(self, dense: nn.Module) -> nn.Module:
        """Return an nn.Linear or Conv1D as a layer of the original class."""
        dense.__class__ = self.cls
        dense.__dict__.update(self.attributes)
        return dense
