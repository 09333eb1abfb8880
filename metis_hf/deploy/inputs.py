"""Input quantization of exported layers: calibrated scales, and hooks for plain models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from metis_hf.deploy.compressed_tensors import static_scales
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.packed import encode_scale
from metis_hf.numerics import Quantizer


@dataclass(frozen=True)
class InputQuantizer:
    """The quantization of an exported layer's input.

    Attributes:
        quantizer: quantizer of the blocks.
        amax: 0-dim fp32, the magnitude the tensor scale is computed from.
    """

    quantizer: Quantizer
    amax: Tensor

    @property
    def global_scale(self) -> Tensor:
        """The encode scale, fp32 [1]."""
        return encode_scale(self.amax, self.quantizer)

    def __call__(self, x: Tensor) -> Tensor:
        """Fake-quantize x, in the dtype of x."""
        return self.quantizer(x, dtype=x.dtype, amax=self.amax)


def quantized_input(layer: MetisLayer) -> InputQuantizer | None:
    """Return a layer's input quantizer with its calibrated scale, or None if it has none."""
    state, quantizer = static_scales(layer), layer.eval_scheme.fprop_input.quantizer
    if state is None or not state.input or quantizer is None:
        return None
    return InputQuantizer(quantizer, layer.get_buffer("input_amax").detach().clone())


@contextmanager
def quantizing_inputs(model: nn.Module, inputs: Mapping[str, InputQuantizer]) -> Iterator[None]:
    """Make plain layers quantize their inputs inside the block, as deployed layers do."""

    def hook(quantize: InputQuantizer) -> Callable[..., tuple[Any, ...]]:
        return lambda module, args: (quantize(args[0]), *args[1:])

    with ExitStack() as stack:
        for name, quantize in inputs.items():
            module = model.get_submodule(name)
            stack.enter_context(module.register_forward_pre_hook(hook(quantize)))
        yield
