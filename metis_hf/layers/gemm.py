"""The three GEMMs of a linear layer with quantized operands, as one autograd function.

    fprop   y  = x_hat @ w_hat.T        [t i] @ [i o] -> [t o]
    dgrad   dx = dy_hat @ w_hat         [t o] @ [o i] -> [t i]
    wgrad   dw = dy_hat.T @ x_hat       [o t] @ [t i] -> [o i]

A scheme may add to a GEMM what rounding took off one operand in the dominant directions of the
other, quantized in its turn (`Scheme.corrected`). With x_hat = (a_x lam_x) v_x + .., and so on:

    fprop   + Q((x - x_hat) @ v_w.T lam_w) @ a_w.T  + a_x @ Q((w - w_hat) @ v_x.T lam_x).T
    dgrad   + Q((dy - dy_hat) @ a_w lam_w) @ v_w    + a_dy @ Q((w - w_hat).T @ v_dy.T lam_dy).T
    wgrad   + Q((dy - dy_hat).T @ a_x lam_x) @ v_x

Each is k more channels of the same GEMM, all in FP4 and in blocks along k. What then is left of the
error is the rounding of one operand times the rest of the other. Backward does not have x, only
x_hat: what rounding took off x is not added to wgrad.

Quantizers are straight-through, so dw reaches the stored parameters by the chain rule through
w_hat alone. Parameters are saved, never their quantized copies: w_hat is made again in backward.
Of x its codes and scales are saved, from which backward has x_hat to the bit; see `SavedInput`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from metis_hf.noise import Key, fingerprint
from metis_hf.operands import Encoded, LowRank, Operand, Quantized
from metis_hf.operands.held_weight import HeldWeight
from metis_hf.operands.weight_forms import WeightForm
from metis_hf.schemes.base import Role, Scheme


class CallKeys:
    """Noise keys of one forward call and its backward: role -> key.

    Weights: (layer key, role, weight). Gradients: also the input. Activations: (input key, role,
    input), so that layers that read one tensor quantize it alike, as one wide GEMM would; what is
    quantized of it along directions of the weight: as gradients. Equal tensors give equal noise,
    so a recomputed forward pass repeats the original exactly.

    Args:
        layer_key: of config seed, layer name and process rank.
        x: the input of the call.
        weight: the stored weight (the residual of a split one).
        input_key: of config seed and process rank; None: activations have noise of this layer.
    """

    def __init__(
        self, layer_key: Key, x: Tensor, weight: Tensor, input_key: Key | None = None
    ) -> None:
        data = fingerprint(x)
        self.weight_key = layer_key.with_data(fingerprint(weight))
        self.input_key = (input_key or layer_key).with_data(data)
        self.call_key = self.weight_key.with_data(data)

    def __getitem__(self, role: Role) -> Key:
        if role in (Role.FPROP_WEIGHT, Role.DGRAD_WEIGHT):
            key = self.weight_key
        elif role in (Role.FPROP_INPUT, Role.WGRAD_INPUT):
            key = self.input_key
        else:
            key = self.call_key
        return key.fold(16 + role)


class _LastInput(threading.local):
    """What was last encoded, and of what: layers that read one tensor encode it once.

    Kept as long as that tensor lives, or until another is encoded; never its dense parts.
    """

    source: weakref.ref[Tensor] | None = None
    version: int
    wanted: tuple[Any, ...]
    row_mask: Tensor | None
    encoded: Encoded

    def find(self, x: Tensor, wanted: tuple[Any, ...], row_mask: Tensor | None) -> Encoded | None:
        """What was encoded of this very tensor in this very way."""
        if self.source is None or self.source() is not x or x._version != self.version:
            return None
        return self.encoded if wanted == self.wanted and row_mask is self.row_mask else None

    def keep(
        self, x: Tensor, wanted: tuple[Any, ...], row_mask: Tensor | None, encoded: Encoded
    ) -> None:
        def forget(source: weakref.ref[Tensor]) -> None:
            if self.source is source:
                self.__dict__.clear()

        self.source, self.version = weakref.ref(x, forget), x._version
        self.wanted, self.row_mask = wanted, row_mask
        self.encoded = encoded.stored()


_last_input = _LastInput()
_COORDINATES = 32  # and the role: folded into a correction's key, as 16 and the role for operands


@dataclass(frozen=True)
class GemmPlan:
    """What one call of a layer does; the static part is the layer's, the keys are the call's."""

    scheme: Scheme
    weight: WeightForm
    dtype: torch.dtype  # of the GEMMs and the output
    keys: CallKeys
    row_mask: Tensor | None = None
    saves_input: bool = True  # a backward pass with wgrad may follow
    source: weakref.ref[Tensor] | None = None  # the layer's input, which other layers may read
    state: Any = None  # what the scheme's `LayerState` froze for this call
    held: HeldWeight | None = None  # w_hat of earlier calls with the same parameters

    def resolve(self, role: Role) -> tuple[Role, Operand]:
        """`Scheme.resolve`, with conditioners that know the call's state."""
        role, operand = self.scheme.resolve(role)
        return role, operand if self.state is None else operand.bind(self.state)

    def weight_operand(self, role: Role, params: Sequence[Tensor]) -> Quantized:
        """w_hat [o i] for fprop (blocks along i) or dgrad (along o)."""
        role, operand = self.resolve(role)
        options: dict[str, Any] = {
            "dim": -1 if role is Role.FPROP_WEIGHT else 0,
            "key": self.keys[role],
            "dtype": self.dtype,
        }
        if self.held is not None and self.state is None:
            return self.held.operand(self.weight, params, operand, **options)
        return self.weight.quantize(params, operand, **options)

    def fprop(
        self, x: Tensor, x_hat: Quantized, params: Sequence[Tensor], w_hat: Quantized
    ) -> Tensor:
        """y [t o] without bias."""
        y = _multiply(x_hat, _transposed(w_hat))
        corrected = self._corrected(x)
        if Role.FPROP_INPUT in corrected:
            self._correct(y, Role.FPROP_INPUT, x_hat.error(x), _by_columns(w_hat))
        if Role.FPROP_WEIGHT in corrected:
            error = w_hat.error(self._exact_weight(params))
            self._correct(y.T, Role.FPROP_WEIGHT, error, _by_columns(x_hat))
        return y

    def dgrad(
        self, dy: Tensor, d_hat: Quantized, params: Sequence[Tensor], w_hat: Quantized
    ) -> Tensor:
        """dx [t i]"""
        dx = _multiply(d_hat, w_hat)
        corrected = self._corrected(dy)
        if Role.DGRAD_GRAD_OUTPUT in corrected:
            self._correct(dx, Role.DGRAD_GRAD_OUTPUT, d_hat.error(dy), _by_rows(w_hat))
        if Role.DGRAD_WEIGHT in corrected:
            error = w_hat.error(self._exact_weight(params)).T
            self._correct(dx.T, Role.DGRAD_WEIGHT, error, _by_columns(d_hat))
        return dx

    def wgrad(self, dy: Tensor, d_hat: Quantized, x_hat: Quantized) -> Tensor:
        """dw [o i]"""
        dw = _multiply(_transposed(d_hat), x_hat)
        if Role.WGRAD_GRAD_OUTPUT in self._corrected(dy):
            self._correct(dw, Role.WGRAD_GRAD_OUTPUT, d_hat.error(dy).T, _by_rows(x_hat))
        return dw

    def _corrected(self, x: Tensor) -> frozenset[Role]:
        return self.scheme.corrected if x.numel() > 0 else frozenset()

    def _exact_weight(self, params: Sequence[Tensor]) -> Tensor:
        return self.weight.dense([p.detach() for p in params])

    def _correct(
        self, out: Tensor, role: Role, error: Tensor, other: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Adds to a GEMM's output [m p], in place, what rounding took off its operand at `role`.

        Args:
            error: that [m n]; for the operand on the right, this and `out` are transposed.
            other: low-rank part of the other operand [n p]: [n k], lengths [k], [k p].
        """
        near, lengths, far = other
        # [m n] @ [n k] -> [m k]
        coordinates = (error.to(self.dtype) @ near.to(self.dtype)) * lengths
        _, operand = self.resolve(role)
        assert operand.quantizer is not None
        # Of this layer's weight: others that read the same input have coordinates of their own.
        key = self.keys.call_key.fold(_COORDINATES + role)
        left = operand.quantizer(coordinates, dim=-1, key=key, dtype=self.dtype)
        out.addmm_(left, far.to(self.dtype))  # [m k] @ [k p] -> [m p]

    def matrix_operand(self, role: Role, x: Tensor) -> Quantized:
        """x_hat or dy_hat, for the GEMM that `role` names."""
        role, operand = self.resolve(role)
        return operand(
            x,
            dim=_contracted(role),
            key=self.keys[role],
            dtype=self.dtype,
            row_mask=self.row_mask,
        )

    def input_operand(self, x: Tensor) -> tuple[Quantized, SavedInput]:
        """x_hat for fprop, and what is saved of x for wgrad."""
        role, operand = self.resolve(Role.WGRAD_INPUT)
        shared = role is Role.FPROP_INPUT
        if self.saves_input and operand.has_codes(x):
            dim = _contracted(role)
            encoded = self._encode(operand, x, role, dim)
            saved = SavedInput("encoded", encoded.tensors)
            if shared:
                shape = (x.shape[0], x.shape[1])
                return operand.decode(encoded, dim=dim, shape=shape, dtype=self.dtype), saved
            return self.matrix_operand(Role.FPROP_INPUT, x), saved
        x_hat = self.matrix_operand(Role.FPROP_INPUT, x)
        if not self.saves_input:
            return x_hat, SavedInput("dense", ())
        if shared:
            return x_hat, SavedInput("dense", (x_hat.values, x_hat.scale, *(x_hat.low or ())))
        if operand.quantizer is None:
            return x_hat, SavedInput("dense", (x.to(self.dtype), None))
        return x_hat, SavedInput("input", (x,))

    def _encode(self, operand: Operand, x: Tensor, role: Role, dim: int) -> Encoded:
        """`Operand.encode`, or what it gave for another layer that reads the same tensor."""
        key = self.keys[role]
        source = None if self.source is None else self.source()
        if source is None or source.is_inference() or torch.compiler.is_compiling():
            return operand.encode(x, dim=dim, key=key, row_mask=self.row_mask)
        wanted = (operand, dim, key.static)
        encoded = _last_input.find(source, wanted, self.row_mask)
        if encoded is None:
            encoded = operand.encode(x, dim=dim, key=key, row_mask=self.row_mask)
            _last_input.keep(source, wanted, self.row_mask, encoded)
        return encoded

    def wgrad_input(self, saved: SavedInput, shape: tuple[int, int]) -> Quantized:
        """x_hat for wgrad, from what forward saved of x."""
        if saved.kind == "dense":
            x_hat, scale, *low = saved.tensors
            assert x_hat is not None
            return Quantized(x_hat, scale, LowRank(*low) if low else None)  # type: ignore[arg-type]
        if saved.kind == "input":
            x = saved.tensors[0]
            assert x is not None
            return self.matrix_operand(Role.WGRAD_INPUT, x)
        role, operand = self.resolve(Role.WGRAD_INPUT)
        encoded = Encoded(saved.tensors)
        return operand.decode(encoded, dim=_contracted(role), shape=shape, dtype=self.dtype)


class SavedInput(NamedTuple):
    """What is saved of x [t c] for wgrad, by the operand that wgrad takes.

    | operand                       | saved                                                    |
    | direct, shared with fprop     | packed x, blocks along features                          |
    | direct, of its own            | packed x, blocks along tokens, quantized in forward      |
    | rotated (Hadamard)            | packed rotated x, padded to 16 tokens; rotated back in   |
    |                               | backward                                                 |
    | scaled per channel            | packed (x - shift) / scale; both are the plan's          |
    | quantized twice               | packed second quantization, as of its conditioner        |
    | rotated over its whole length | packed rotated x, not padded                             |
    | mean apart                    | packed rest, packed mean [1 c]                           |
    | spectral, shared or of its    | packed residual [t c], packed factors [t k] and [k c], k |
    | own                           | lengths; put together again in backward                  |
    | high precision                | x in the dtype of the GEMM, as nn.Linear does            |
    | another kind of conditioner   | shared: the dense operand; of its own: x, quantized in   |
    | or quantizer; no rows         | backward                                                 |
    | none: no weight is trained    | nothing                                                  |

    A packed NVFP4 matrix takes 4.5 bits an element, and 32 more; elements of six bits take a byte.
    Layers that read one tensor share one packed copy. Weights are saved as parameters, never
    densely beside them.
    """

    kind: str  # "encoded": `Operand.encode`; "dense": x_hat as `Quantized`; "input": (x,)
    tensors: tuple[Tensor | None, ...]


def _contracted(role: Role) -> int:
    """The dimension of x or dy along which the GEMM of that role sums."""
    return 0 if role in (Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT) else -1


def contract(a: Tensor, b: Tensor) -> Tensor:
    """a [m n] @ b [n p]; an operand without the other's padding along n gets zeros there."""
    missing = a.shape[1] - b.shape[0]
    if missing > 0:
        b = F.pad(b, (0, 0, 0, missing))
    elif missing < 0:
        a = F.pad(a, (0, -missing))
    return a @ b


def _multiply(a: Quantized, b: Quantized) -> Tensor:
    """`contract`, with the operands' tensor scales applied in fp32 and once."""
    out = contract(a.values, b.values)
    given = [scale for scale in (a.scale, b.scale) if scale is not None]
    if not given:
        return out
    return out.mul_(given[0] if len(given) == 1 else given[0] * given[1])


def _transposed(a: Quantized) -> Quantized:
    """What stands for the transpose; without the low-rank part."""
    return Quantized(a.values.T, a.scale)


def _by_rows(a: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Low-rank part of a [n p]: [n k], lengths [k], [k p]."""
    assert a.low is not None
    return a.low


def _by_columns(a: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the transpose of a [p n]."""
    assert a.low is not None
    return a.low.right.T, a.low.lengths, a.low.left.T


class QuantizedGemm(torch.autograd.Function):
    """y = x_hat @ w_hat.T + bias; see the module docstring."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, plan: GemmPlan, *params: Tensor) -> Tensor:
        # x [t i], bias [o] or None, params as plan.weight stores them
        with torch.autocast(x.device.type, enabled=False):
            x_hat, saved = plan.input_operand(x)
            w_hat = plan.weight_operand(Role.FPROP_WEIGHT, params)
            y = plan.fprop(x, x_hat, params, w_hat)
            if bias is not None:
                y += bias.to(plan.dtype)
        ctx.save_for_backward(*params, *saved.tensors)
        ctx.plan, ctx.saved_kind, ctx.x_dtype = plan, saved.kind, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # dy [t o]
        plan: GemmPlan = ctx.plan
        need_x, need_bias, _, *need_params = ctx.needs_input_grad
        tensors = ctx.saved_tensors  # once: checkpointing unpacks them but once
        params, saved = tensors[: len(need_params)], tensors[len(need_params) :]
        dx = dbias = None
        dparams: Sequence[Tensor | None] = [None] * len(params)
        with torch.autocast(dy.device.type, enabled=False):
            if need_x or (any(need_params) and plan.scheme.reuses(Role.WGRAD_GRAD_OUTPUT)):
                d_hat = plan.matrix_operand(Role.DGRAD_GRAD_OUTPUT, dy)
            if need_x:
                w_hat = plan.weight_operand(Role.DGRAD_WEIGHT, params)
                dx = plan.dgrad(dy, d_hat, params, w_hat).to(ctx.x_dtype)
            if any(need_params):
                if not plan.scheme.reuses(Role.WGRAD_GRAD_OUTPUT):
                    d_hat = plan.matrix_operand(Role.WGRAD_GRAD_OUTPUT, dy)
                shape = (dy.shape[0], params[-1].shape[1])
                x_hat = plan.wgrad_input(SavedInput(ctx.saved_kind, saved), shape)
                dw = plan.wgrad(dy, d_hat, x_hat)
                dparams = plan.weight.gradients(
                    params, dw, plan.scheme.fprop_weight, key=plan.keys[Role.FPROP_WEIGHT]
                )
                dparams = [g if need else None for g, need in zip(dparams, need_params)]
            if need_bias:
                dbias = dy.sum(0).to(ctx.bias_dtype)
        return dx, dbias, None, *dparams
