"""Recognition of plain linear layers: y = x W^T + b and nothing else.

A subclass of nn.Linear is one if it computes with nn.Linear's own forward pass, or with one that
was read and is listed here. A numeric probe would not do: routers of mixtures add jitter in
training alone, and a layer may clamp values that no probe reaches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

# Forward passes that were read (transformers 5.23), by module and qualified name, and what they do.
_READ = {
    # Not fused with the bias on purpose: in 16 bits the sum is rounded once more, as in training.
    "transformers.models.falcon.modeling_falcon.FalconLinear.forward": "input @ weight.T + bias",
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
      (routers, which also choose; DeepSeek V4's, block-diagonal; Idefics', two weights; those of
      other quantization methods).
    - parameters, buffers or submodules beside weight and bias: parametrized weights, adapters.
    """
    cls = type(module)
    if cls in (nn.Linear, Conv1D) and not _beside(module):
        return None
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
    return None


def _beside(module: nn.Module) -> set[str]:
    """Return names of what a layer has beside weight and bias: a mask of torch's pruning, say."""
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
        common = {*nn.Module().__dict__, "in_features", "out_features", "nf", "nx"}
        own = {key: value for key, value in module.__dict__.items() if key not in common}
        return cls(type(module), own)

    def restore(self, dense: nn.Module) -> nn.Module:
        """Return an nn.Linear or Conv1D as a layer of the original class."""
        dense.__class__ = self.cls
        dense.__dict__.update(self.attributes)
        return dense
