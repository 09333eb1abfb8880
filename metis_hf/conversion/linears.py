"""Recognition of plain linear layers: y = x W^T + b and nothing else.

A subclass of nn.Linear or Conv1D is plain if it uses its base class's forward pass, or one that was
reviewed and is listed here. A numeric probe cannot decide this: routers add jitter only while
training, and a layer may clamp values that no probe reaches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Reviewed forward passes (transformers 5.23): module and qualified name -> computation.
_READ = {
    # Deliberately not fused with the bias: in 16 bits the sum is rounded once more, as in training.
    "transformers.models.falcon.modeling_falcon.FalconLinear.forward": "input @ weight.T + bias",
}

# Instance attributes set by accelerate's hooks.
HOOKED = ("forward", "_old_forward", "_hf_hook")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Layers whose weights transformers (5.23) reads without calling them: owner class -> names.
_ONLY_READ = {
    "WavLMAttention": ("q_proj", "k_proj", "v_proj", "out_proj"),
    # dt_proj always; the others only by the kernels of mamba_ssm, if installed. All are listed, so
    # that a model is converted the same way on every machine.
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
# Read slice by slice if the config has slow_but_exact and pretraining_tp > 1, else called.
_READ_IN_SLICES = {"BloomAttention": "dense", "BloomMLP": "dense_4h_to_h"}

# Layers whose weights transformers (5.23) writes in place; factors would not see the write.
_WRITTEN = {
    "RwkvSelfAttention": ("output",),  # RwkvModel rescales both for evaluation
    "RwkvFeedForward": ("value",),
    "Gemma3nTextAltUp": ("prediction_coefs",),  # clamped in training
}


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an nn.Linear, a Conv1D, or an instance of a subclass."""
    return isinstance(module, nn.Linear | Conv1D)


def why_not_plain(module: nn.Module) -> str | None:
    """Return why an nn.Linear, Conv1D or subclass is not a plain linear layer; None: it is plain.

    The reasons:

    - torch's NonDynamicallyQuantizableLinear: nn.MultiheadAttention reads its weight and never
      calls it.
    - a custom `__call__`, or a forward pass that is neither the base class's nor listed here
      (routers, which also select; DeepSeek V4's block-diagonal layers; Idefics' layers with two
      weights; layers of other quantization methods).
    - parameters, buffers or submodules other than weight and bias: parametrized weights, adapters.
    - a forward pass set on the instance. accelerate's hooks are allowed: they wrap the class's
      forward pass and are moved to the converted layer.
    """
    cls = type(module)
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"its owner reads the weight of the {cls.__name__} without calling it"
    base = nn.Linear if isinstance(module, nn.Linear) else Conv1D
    forward: Any = cls.forward
    read = f"{forward.__module__}.{getattr(forward, '__qualname__', '')}" in _READ
    if cls.__call__ is not base.__call__ or not (forward is base.forward or read):
        return f"its class {cls.__name__} has a custom forward pass"
    # Tensors and submodules besides weight and bias, such as pruning masks.
    extra = {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}
    if extra or module._parameters.get("weight") is None:
        what = ", ".join(sorted(extra)) or "no weight"
        return f"its class {cls.__name__} has {what} besides weight and bias"
    if _forward_replaced(module):
        return "its forward pass was replaced (module.forward = ...)"
    return None


def _forward_replaced(module: nn.Module) -> bool:
    """Return whether the instance overrides its class's forward pass; accelerate's hooks may."""
    own = module.__dict__.get("forward")
    if isinstance(own, functools.partial) and own.func.__module__ == "accelerate.hooks":
        own = module.__dict__.get("_old_forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def why_only_read(owner: Any, child: str) -> str | None:
    """Return why the owner uses the child's weight without calling the child; None: it calls it."""
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
                f"its owner, a {cls.__name__}, overwrites the weight in place, but the scheme "
                "stores factors, which would not change"
            )
    return None


def why_not_trainable(weight: Tensor) -> str | None:
    """Return why a weight is not a plain floating-point Parameter; None: it is."""
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, which another library manages"
    if weight.dtype not in _FLOATS:
        return f"its weight is stored in {str(weight.dtype).removeprefix('torch.')}"
    return None


@dataclass(frozen=True)
class LinearOrigin:
    """The class and attributes of a replaced nn.Linear or Conv1D subclass instance.

    Args:
        cls: the class of the replaced module.
        attributes: its instance attributes that an nn.Linear or Conv1D does not have.
    """

    cls: type[nn.Module]
    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> LinearOrigin | None:
        """Return the origin of a linear layer; None if it is exactly an nn.Linear or Conv1D."""
        if type(module) in (nn.Linear, Conv1D):
            return None
        common = {*nn.Module().__dict__, "in_features", "out_features", "nf", "nx", *HOOKED}
        own = {key: value for key, value in module.__dict__.items() if key not in common}
        return cls(type(module), own)

    def restore(self, dense: nn.Module) -> nn.Module:
        """Change an nn.Linear or Conv1D to the original class, in place, and return it."""
        dense.__class__ = self.cls
        dense.__dict__.update(self.attributes)
        return dense
