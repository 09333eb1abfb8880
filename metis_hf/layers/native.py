"""The three GEMMs of a layer on FP4 units, with the same codes and scales as emulation.

Quantization, saved tensors and gradients are as in `gemm`. Only the products differ:
`numerics.native` multiplies codes, while emulation multiplies the numbers that codes stand for.
A layer runs natively if its config asks for it, and `obstacle` and `obstacle_of_call` find nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metis_hf.config import MetisConfig
from metis_hf.layers.gemm import GemmPlan
from metis_hf.layers.saved_input import SavedInput
from metis_hf.numerics import Tile
from metis_hf.numerics.kernels.epilogue import finish_product
from metis_hf.numerics.native import DTYPES, device_to_be, obstacle_of_device
from metis_hf.numerics.scaling import OuterScale
from metis_hf.operands import Encoded, Identity, Operand
from metis_hf.operands.native_operand import NativeOperand, product
from metis_hf.schemes.base import Scheme
from metis_hf.schemes.roles import Role, contracted_dim, tensor_of

_GEMMS = {
    "fprop": (Role.FPROP_INPUT, Role.FPROP_WEIGHT),
    "dgrad": (Role.DGRAD_GRAD_OUTPUT, Role.DGRAD_WEIGHT),
    "wgrad": (Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT),
}


@dataclass(frozen=True)
class NativePlan(GemmPlan):
    """The plan of a call whose quantized GEMMs run on FP4 units; operands are `NativeOperand`s.

    GEMMs that the scheme leaves in high precision stay so. `QuantizedGemm` passes operands from one
    method of the plan to another without reading them.
    """

    def weight_operand(self, role: Role, params: Sequence[Tensor]) -> Any:
        contracted = -1 if role is Role.FPROP_WEIGHT else 0
        source, operand = self.resolve(role)
        if operand.quantizer is None:
            return super().weight_operand(role, params)
        dim, key = -1 if source is Role.FPROP_WEIGHT else 0, self.keys[source]
        rows, columns = params[-1].shape

        def make() -> NativeOperand:
            encoded = self.weight.encode(params, operand, dim=dim, key=key)
            options: Any = {"dim": dim, "shape": (rows, columns), "contracted": contracted}
            return NativeOperand.of(encoded, operand, dtype=self.dtype, **options)

        if self.kept is None or self.state is not None or not self._comes_again(source, operand):
            return make()
        name = ("native", operand, dim, contracted, self.dtype, key.static)
        return self.kept.keep(params, name, make, key=key)

    def matrix_operand(self, role: Role, x: Tensor) -> Any:
        role, operand = self.resolve(role)
        if operand.quantizer is None:
            return super().matrix_operand(role, x)
        encoded = operand.encode(
            x, dim=contracted_dim(role), key=self.keys[role], row_mask=self.row_mask
        )
        return self._operand(role, operand, encoded, (x.shape[0], x.shape[1]))

    def wgrad_input(self, saved: SavedInput, shape: tuple[int, int]) -> Any:
        role, operand = self.resolve(Role.WGRAD_INPUT)
        if operand.quantizer is None:
            return super().wgrad_input(saved, shape)
        return self._operand(role, operand, Encoded(saved.tensors), shape)

    def _operand(
        self, role: Role, operand: Operand, encoded: Encoded, shape: tuple[int, int]
    ) -> NativeOperand:
        dim = contracted_dim(role)
        return NativeOperand.of(
            encoded, operand, dim=dim, shape=shape, contracted=dim, dtype=self.dtype
        )

    def multiply(
        self,
        a: Any,
        b: Any,
        bias: Tensor | None = None,
        terms: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        if not isinstance(a, NativeOperand):
            return super().multiply(a, b, bias, terms)
        out = product(a, b)
        finish_product(out, bias=bias, terms=terms)
        return out


def obstacle(scheme: Scheme) -> str | None:
    """Return why FP4 units cannot run a scheme's quantized GEMMs, as a clause; None if they can.

    This checks the scheme alone; `obstacle_of_call` checks dtypes and devices.
    """
    if scheme.weight.is_split:
        return "its weight is stored as factors and a residual; use split_weight=False"
    for gemm, roles in _GEMMS.items():
        reason = _obstacle_of_gemm(scheme, gemm, roles)
        if reason is not None:
            return reason
    return None


def _obstacle_of_gemm(scheme: Scheme, gemm: str, roles: tuple[Role, Role]) -> str | None:
    names = [tensor_of(role) for role in roles]
    operands = [scheme.resolve(role)[1] for role in roles]
    if all(operand.quantizer is None for operand in operands):
        return None
    for role, name, operand in zip(roles, names, operands):
        quantizer = operand.quantizer
        if quantizer is None:
            return f"{gemm} takes its {name} in high precision, but the other operand in FP4"
        if quantizer.fmt.name not in DTYPES:
            return f"{gemm} takes its {name} in {quantizer.fmt.name}, not in NVFP4 or MXFP4"
        token = quantizer.outer_scale is OuterScale.TOKEN
        if token and gemm != "wgrad":  # wgrad's blocks run along tokens: one scale per tensor
            return (
                f"{gemm} takes its {name} with one scale per token, but FP4 units take one scale "
                'per tensor; use outer_scale="tensor"'
            )
        # Square tiles of a weight serve both of its GEMMs, unless it is rotated for one of them.
        tiles = quantizer.tile is Tile.SQUARE and role is Role.DGRAD_WEIGHT
        plain = operand.conditioner.basis(name) == Identity().basis(name)
        if (scheme.reuses(role) and not (tiles and plain)) or quantizer.tile is Tile.TENSOR:
            copy = f"{gemm} uses the copy of its {name} that"
            if tiles and not plain:  # in every mode
                return f"{copy} is rotated along a different dimension from the one it contracts"
            return (
                f"{copy} has blocks along a different dimension from the one it contracts; use "
                'operand_mode="contraction"'
            )
    bases = [operand.conditioner.basis(name) for operand, name in zip(operands, names)]
    if bases[0] is None or bases[0] != bases[1]:
        one, other = (
            f"{type(operand.conditioner).__name__} of its {name}"
            for operand, name in zip(operands, names)
        )
        return f"{gemm} is not a product of codes: {one} and {other} do not cancel"
    formats = [operand.quantizer.fmt.name for operand in operands if operand.quantizer]
    if formats[0] != formats[1]:
        return f"{gemm} takes operands in two different formats, {' and '.join(formats)}"
    return None


def obstacle_of_call(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why FP4 units cannot run a call of a scheme without `obstacle`; None if they can.

    `dtype` is the dtype of the GEMMs' results.
    """
    for fmt in _formats(scheme):
        if dtype not in DTYPES[fmt]:
            known = " or ".join(_name(each) for each in DTYPES[fmt])
            return f"torch's {fmt} GEMM returns {known}, but the model needs {_name(dtype)}"
    return _obstacle_of_device(scheme, device)


def why_emulated(config: MetisConfig, scheme: Scheme, device: torch.device) -> str | None:
    """Return why `backend="auto"` emulates a layer; None: it does not, or the backend is another.

    `device` holds the layer's weight during conversion.

    Raises:
        ValueError: `backend="native"`, and the layer cannot run natively.
    """
    if config.backend == "emulated" or scheme.is_high_precision:
        return None
    reason = obstacle(scheme) or _obstacle_of_device(scheme, device_to_be(device))
    if reason is not None and config.backend == "native":
        raise ValueError(refusal(config, reason))
    return reason


def refusal(config: MetisConfig, reason: str) -> str:
    """Return the error message for a layer that cannot run natively."""
    return (
        f'backend="native" cannot run scheme {config.scheme!r} on FP4 units: {reason}. '
        'backend="auto" emulates only such layers, backend="emulated" emulates all layers'
    )


def _obstacle_of_device(scheme: Scheme, device: torch.device) -> str | None:
    reasons = (obstacle_of_device(device, fmt) for fmt in _formats(scheme))
    return next((reason for reason in reasons if reason is not None), None)


def _formats(scheme: Scheme) -> list[str]:
    """Return the distinct format names of a scheme's operands."""
    operands = [scheme.resolve(role)[1] for role in Role]
    return list(dict.fromkeys(op.quantizer.fmt.name for op in operands if op.quantizer))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
