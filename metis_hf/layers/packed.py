"""A linear layer with a frozen NVFP4 weight that stays packed: 4.5 bits per element.

The tensors have compressed-tensors' layout `nvfp4-pack-quantized`. The forward and the backward
GEMM each unpack the weight and free it afterwards; autograd saves only the packed tensors.
Gradients flow to the input and the bias, never to the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from metis_hf.layers.call_input import check_input, gemm_dtype
from metis_hf.layers.casts import as_integers
from metis_hf.layers.unsupported import (
    differentiable_once,
    refuse_batched_gradients,
    refuse_unsupported,
)
from metis_hf.numerics import E2M1, NVFP4, Quantizer, ScaleRounding, ScaleRule, Tile, storage
from metis_hf.numerics.rounding import round_nearest
from metis_hf.numerics.scaling import (
    TensorScale,
    block_scale,
    largest_value,
    tensor_scale,
)

BLOCK = 16
# As in "w4a4" and "w4a16": each block has the best of six scales.
DEPLOYED = Quantizer(NVFP4, scale_rule=ScaleRule.SEARCH)


class PackedWeight(NamedTuple):
    """A weight [o i] in NVFP4; value = code * (scale / global_scale).

    Attributes:
        codes: uint8 [o i/2], two E2M1 codes to a byte, the even column in the low nibble.
        scale: float8_e4m3fn [o i/16].
        global_scale: fp32 [1], an encode scale.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        weight: Tensor,
        global_scale: Tensor | None = None,
        *,
        quantizer: Quantizer = DEPLOYED,
        amax: Tensor | None = None,
    ) -> PackedWeight:
        """Quantize a weight [o i] to nearest, blocks along i; the last block may be padded.

        Args:
            weight: finite.
            global_scale: fp32 [1], an encode scale, beyond whose range values saturate; None
                computes it from `amax`.
            quantizer: an NVFP4 quantizer with row blocks or square tiles.
            amax: 0-dim, the magnitude that the global scale maps to the largest value; None: the
                amax of the weight.
        """
        weight = weight.detach().float()
        if global_scale is not None:
            amax = largest_value(NVFP4, quantizer.scale_rule) / global_scale.reshape(())
        elif not quantizer.two_level:
            global_scale = torch.ones(1, device=weight.device)
        else:
            global_scale = encode_scale(weight if amax is None else amax, quantizer)
        q = storage.quantize(
            weight,
            quantizer.fmt,
            scale_rounding=quantizer.scale_rounding,
            two_level=quantizer.two_level,
            tile=quantizer.tile,
            scale_rule=quantizer.scale_rule,
            amax=amax,
        )
        scale = q.scale
        if quantizer.tile is Tile.SQUARE:  # one scale for 16 rows; the layout has one per row
            rows = scale.view(torch.uint8).repeat_interleave(BLOCK, 0)[: weight.shape[0]]
            scale = rows.view(scale.dtype)
        return cls(q.codes, scale.contiguous(), global_scale)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [o i], computed in fp32 and rounded to `dtype` once.

        Operation order, and so the bits in bf16, are the same as in the compressed-tensors library.
        """
        rows, half = self.codes.shape
        table = _pairs(self.codes.device)
        pairs = table.index_select(0, self.codes.reshape(-1).int())  # [o i/2], two fp32 in each
        values = pairs.view(torch.float32).view(rows, -1, BLOCK)
        values = values.mul_((self.scale.float() / self.global_scale)[..., None])
        return values.view(rows, 2 * half).to(dtype)


def encode_scale(x: Tensor, quantizer: Quantizer = DEPLOYED) -> Tensor:
    """Return the encode scale of a tensor, fp32 [1]: its largest block gets the largest scale.

    The scale of zeros is 1. `x` may be just the tensor's amax.
    """
    amax = x.detach().abs().amax().float()
    return tensor_scale(amax, largest_value(NVFP4, quantizer.scale_rule)).encode.reshape(1)


def quantize_input(x: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Fake-quantize x [t i] to NVFP4 under a static tensor scale.

    Args:
        x: blocks along i; the scale of each comes from its own amax, rounded to nearest.
        global_scale: fp32 [1], an encode scale; magnitudes beyond 448 * 6 / global_scale saturate.
        dtype: of the result, which is computed in fp32.
    """
    if x.numel() == 0:
        return x.to(dtype)
    blocks = x.detach().float().reshape(x.shape[0], -1, BLOCK)
    encode = global_scale.reshape(())
    tensor = TensorScale(encode, encode.reciprocal())
    amax = blocks.abs().amax(-1, keepdim=True)
    scale, inverse = block_scale(amax, NVFP4, ScaleRounding.NEAREST, tensor)
    largest = E2M1.max
    codes = round_nearest((blocks * inverse).clamp_(-largest, largest), E2M1)
    return codes.mul_(scale).mul_(tensor.decode).view(x.shape).to(dtype)


def _pairs(device: torch.device) -> Tensor:
    """Return a table from a byte of codes to its two fp32 values, as int64 [256]."""
    if torch.compiler.is_compiling():
        return _make_pairs(device)
    return _held_pairs(device)


def _make_pairs(device: torch.device) -> Tensor:
    byte = torch.arange(256, device=device)
    codes = torch.stack((byte & 15, byte >> 4), -1).to(torch.uint8)  # the low nibble is first
    return E2M1.decode(codes).contiguous().view(torch.int64).view(-1)


@functools.cache
def _held_pairs(device: torch.device) -> Tensor:
    with _disable_current_modes():  # no tensor of a tracing mode may be cached
        return _make_pairs(device)


class _PackedGemm(torch.autograd.Function):
    """y = x_hat @ weight.T + bias; see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [t i]
        bias: Tensor | None,  # [o]
        input_scale: Tensor | None,
        dtype: torch.dtype,
        *packed: Tensor,
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x_hat = x.to(dtype) if input_scale is None else quantize_input(x, input_scale, dtype)
            weight = PackedWeight(*packed).dense(dtype)
            y = F.linear(x_hat, weight, None if bias is None else bias.to(dtype))
        ctx.save_for_backward(*packed)
        ctx.dtype, ctx.x_dtype = dtype, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # [t o]
        refuse_batched_gradients(dy)
        packed = ctx.saved_tensors
        need_x, need_bias, *others = ctx.needs_input_grad
        dx = dbias = None
        with torch.autocast(dy.device.type, enabled=False):
            if need_x:
                dx = (dy @ PackedWeight(*packed).dense(ctx.dtype)).to(ctx.x_dtype)
            if need_bias:
                dbias = dy.sum(0).to(ctx.bias_dtype)
        return dx, dbias, *(None for _ in others)


class PackedLinear(nn.Module):
    """A linear layer with a frozen weight [o i] in NVFP4. x [... i] -> [... o].

    Buffers, named as in compressed-tensors: `weight_packed` uint8 [o i/2], `weight_scale`
    float8_e4m3fn [o i/16], `weight_global_scale` fp32 [1], and `input_global_scale` fp32 [1] if the
    checkpoint quantizes activations. They keep their dtypes in casts of the model
    (`.to(torch.bfloat16)`).

    Args:
        in_features: i, a multiple of 16.
        out_features: o.
        bias: whether the layer has a bias.
        input_scale: whether the layer has an `input_global_scale`.
        dtype: of the bias and of `weight`; a call computes in the dtype of its input.
        device: "meta" if a checkpoint is loaded next.
        name: full name in the model, for messages.

    Attributes:
        quantizes_input: whether x is quantized to NVFP4 (W4A4), with a dynamic scale for each block
            of 16 under the static `input_global_scale`, straight-through in the backward pass.
            False uses x unquantized (W4A16).
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_global_scale: Tensor
    input_global_scale: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        input_scale: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        if in_features % BLOCK:
            raise ValueError(
                f"{name or 'a packed layer'} has in_features={in_features}, which is not a "
                f"multiple of the NVFP4 block size of {BLOCK}, so its weight cannot be packed. "
                "Leave this layer dense"
            )
        self.in_features, self.out_features, self.name = in_features, out_features, name
        self.quantizes_input = input_scale
        dtype = dtype or torch.get_default_dtype()
        blocks = in_features // BLOCK
        fp8, fp32 = torch.float8_e4m3fn, torch.float32
        shapes = {
            "weight_packed": ((out_features, in_features // 2), torch.uint8),
            "weight_scale": ((out_features, blocks), fp8),
            "weight_global_scale": ((1,), fp32),
            "input_global_scale": ((1,), fp32) if input_scale else None,
        }
        for key, shape in shapes.items():
            value = None if shape is None else torch.zeros(shape[0], dtype=shape[1], device=device)
            self.register_buffer(key, value)
        # Has the dtype and device of the model; the buffers above ignore casts.
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.bias = None
        if bias:
            zeros = torch.zeros(out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(zeros, requires_grad=False)

    @property
    def packed(self) -> PackedWeight:
        """The packed tensors themselves."""
        return PackedWeight(self.weight_packed, self.weight_scale, self.weight_global_scale)

    @packed.setter
    def packed(self, packed: PackedWeight) -> None:
        self.weight_packed, self.weight_scale, self.weight_global_scale = packed

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model was loaded in or cast to."""
        return self._buffers["_like"].dtype  # type: ignore[union-attr]

    @property
    def scales_input(self) -> bool:
        """True if there is a static scale for inputs."""
        return self.input_global_scale is not None

    def follow(self, device: torch.device) -> None:
        """Move the buffer that tracks the model's dtype to the device of the weight."""
        self._like = torch.empty(0, dtype=self.dtype, device=device)

    @property
    def weight(self) -> Tensor:
        """The represented weight [o i], unpacked at each access; writing to it changes nothing."""
        return self.packed.dense(self.dtype)

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales and bias in bytes."""
        tensors = (*self._buffers.values(), self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def forward(self, input: Tensor) -> Tensor:
        """Map x [... i], the input, to [... o], in the dtype of x or of autocast."""
        x, packed = input, self.packed
        name = self.name or "a packed layer"
        refuse_unsupported(name, x, packed)
        check_input(name, x, self.in_features)
        dtype = gemm_dtype(x)
        scale = self.input_global_scale if self.quantizes_input else None
        y = _PackedGemm.apply(x.reshape(-1, self.in_features), self.bias, scale, dtype, *packed)
        return y.view(*x.shape[:-1], self.out_features)

    def requires_grad_(self, requires_grad: bool = True) -> PackedLinear:
        """Freeze the layer; a packed weight cannot train.

        Raises:
            ValueError: with `requires_grad=True`.
        """
        if requires_grad:
            raise ValueError(
                f"{self.name or 'a packed layer'} cannot be trained, because its weight is packed "
                "in NVFP4, which cannot represent small updates. Train an adapter on top of it "
                "(PEFT: get_peft_model(model, LoraConfig(...))), or convert the model with "
                "metis_hf.to_dense and train that"
            )
        return super().requires_grad_(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        scales = ["weight_scale", "weight_global_scale", "input_global_scale"]
        with as_integers(self, [name for name in scales if getattr(self, name) is not None]):
            super()._apply(fn, recurse)
        return self

    def to_dense(self) -> nn.Linear:
        """Return the nn.Linear with the represented weight, trainable."""
        with torch.device("meta"):
            dense = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        dense.weight = nn.Parameter(self.weight)
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach())
        return dense.train(self.training)

    def extra_repr(self) -> str:
        activations = "nvfp4" if self.quantizes_input else "high precision"
        return f"{self.in_features}, {self.out_features}, nvfp4, activations={activations}"


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """Return every packed layer of a model by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
