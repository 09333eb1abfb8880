"""The three GEMMs of a linear layer with quantized operands, as one autograd function.

    fprop   y  = x_hat @ w_hat.T        [t i] @ [i o] -> [t o]
    dgrad   dx = dy_hat @ w_hat         [t o] @ [o i] -> [t i]
    wgrad   dw = dy_hat.T @ x_hat       [o t] @ [t i] -> [o i]

A scheme may add the rounding error of one operand to a GEMM; see `corrections`.

Quantizers are straight-through, so dw reaches the stored parameters by the chain rule through
w_hat alone. Autograd saves parameters, never their quantized copies: backward quantizes w again.
Of x it saves codes and scales, from which backward restores the same bits of x_hat; see
`SavedInput`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metis_hf.layers.corrections import by_columns, by_rows, term_of
from metis_hf.layers.saved_input import SavedInput, encode_once
from metis_hf.layers.unsupported import differentiable_once, refuse_batched_gradients
from metis_hf.numerics.kernels.epilogue import finish_product
from metis_hf.numerics.kernels.workspace import Workspace
from metis_hf.operands import Encoded, LowRank, Operand, Quantized
from metis_hf.operands.kept_weight import KeptWeight
from metis_hf.operands.weight_forms import DenseWeight, WeightForm
from metis_hf.schemes.base import Scheme
from metis_hf.schemes.noise_keys import CallKeys
from metis_hf.schemes.roles import Role, contracted_dim


@dataclass(frozen=True)
class GemmPlan:
    """The plan of one call of a layer: the settings, noise keys and caches of its three GEMMs."""

    scheme: Scheme
    weight: WeightForm
    dtype: torch.dtype  # of the GEMMs and the output
    keys: CallKeys
    row_mask: Tensor | None = None
    saves_input: bool = True  # a backward pass with wgrad may follow
    source: weakref.ref[Tensor] | None = None  # the layer's input, which other layers may read
    state: Any = None  # the scheme's `LayerState` as frozen for this call
    kept: KeptWeight | None = None  # cache of w_hat from earlier calls

    def resolve(self, role: Role) -> tuple[Role, Operand]:
        """Call `Scheme.resolve`, and bind the operand to the call's state."""
        role, operand = self.scheme.resolve(role)
        return role, operand if self.state is None else operand.bind(self.state)

    def weight_operand(self, role: Role, params: Sequence[Tensor]) -> Quantized:
        """Return w_hat [o i] for fprop (blocks along i) or dgrad (along o)."""
        role, operand = self.resolve(role)
        options: dict[str, Any] = {
            "dim": contracted_dim(role),
            "key": self.keys[role],
            "dtype": self.dtype,
        }
        if self.kept is not None and self._comes_again(role, operand):
            return self.kept.operand(self.weight, params, operand, **options)
        return self.weight.quantize(params, operand, **options)

    def _comes_again(self, role: Role, operand: Operand) -> bool:
        """Return whether the next call's operand equals this call's, so that it can be cached."""
        if role is Role.DGRAD_WEIGHT and not self.keys.trains and operand.draws:
            return False  # a frozen weight's key depends on the call
        return operand.conditioner.comes_again or operand == self.scheme.resolve(role)[1]

    def expect(self, *operands: tuple[Role, Tensor]) -> None:
        """Let kernels compute the amax of these operands, which come next, in one launch."""
        scratch = self.keys.scratch
        if scratch is None:
            return
        found = []
        for role, x in operands:
            role, operand = self.resolve(role)
            found.append(operand.measured(x, dim=contracted_dim(role), key=self.keys[role]))
        scratch.expect(*(each for each in found if each is not None))

    def fprop(
        self,
        x: Tensor,
        x_hat: Quantized,
        params: Sequence[Tensor],
        w_hat: Quantized,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return y [t o]."""
        corrected, terms = self._corrected(x), []
        if Role.FPROP_INPUT in corrected:
            terms.append(self._term(Role.FPROP_INPUT, x, x_hat, by_columns(w_hat)))
        if Role.FPROP_WEIGHT in corrected:
            exact, far = self._exact_weight(params), by_columns(x_hat)
            terms.append(self._term(Role.FPROP_WEIGHT, exact, w_hat, far, on_right=True))
        return self.multiply(x_hat, w_hat.transposed(), bias, terms)

    def dgrad(
        self, dy: Tensor, d_hat: Quantized, params: Sequence[Tensor], w_hat: Quantized
    ) -> Tensor:
        """Return dx [t i]."""
        corrected, terms = self._corrected(dy), []
        if Role.DGRAD_GRAD_OUTPUT in corrected:
            terms.append(self._term(Role.DGRAD_GRAD_OUTPUT, dy, d_hat, by_rows(w_hat)))
        if Role.DGRAD_WEIGHT in corrected:
            exact, far = self._exact_weight(params).T, by_columns(d_hat)
            w_hat_t = w_hat.transposed()
            terms.append(self._term(Role.DGRAD_WEIGHT, exact, w_hat_t, far, on_right=True))
        return self.multiply(d_hat, w_hat, terms=terms)

    def wgrad(self, dy: Tensor, d_hat: Quantized, x_hat: Quantized) -> Tensor:
        """Return dw [o i]."""
        d_hat_t, terms = d_hat.transposed(), []
        if Role.WGRAD_GRAD_OUTPUT in self._corrected(dy):
            terms.append(self._term(Role.WGRAD_GRAD_OUTPUT, dy.T, d_hat_t, by_rows(x_hat)))
        return self.multiply(d_hat_t, x_hat, terms=terms)

    def multiply(
        self,
        a: Quantized,
        b: Quantized,
        bias: Tensor | None = None,
        terms: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """Run `scaled_product`; `NativePlan` overrides it."""
        return scaled_product(a, b, bias, terms)

    def _corrected(self, x: Tensor) -> frozenset[Role]:
        return self.scheme.corrected if x.numel() > 0 else frozenset()

    def _exact_weight(self, params: Sequence[Tensor]) -> Tensor:
        return self.weight.dense([p.detach() for p in params])

    def _term(
        self,
        role: Role,
        x: Tensor,
        x_hat: Quantized,
        other: LowRank,
        *,
        on_right: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the correction term of the operand at `role`; see `corrections.term_of`."""
        _, operand = self.resolve(role)
        assert operand.quantizer is not None
        key = self.keys.of_correction(role)
        options: dict[str, Any] = {"on_right": on_right, "key": key, "dtype": self.dtype}
        return term_of(x, x_hat, other, operand.quantizer, **options)

    def matrix_operand(self, role: Role, x: Tensor) -> Quantized:
        """Return x_hat or dy_hat for the GEMM that `role` names."""
        role, operand = self.resolve(role)
        return operand(
            x,
            dim=contracted_dim(role),
            key=self.keys[role],
            dtype=self.dtype,
            row_mask=self.row_mask,
        )

    def input_operand(self, x: Tensor) -> tuple[Quantized, SavedInput]:
        """Return x_hat for fprop, and the saved form of x for wgrad."""
        role, operand = self.resolve(Role.WGRAD_INPUT)
        shared = role is Role.FPROP_INPUT
        if self.saves_input and operand.has_codes(x):
            dim = contracted_dim(role)
            encoded = encode_once(
                operand,
                x,
                self.source,
                dim=dim,
                key=self.keys[role],
                row_mask=self.row_mask,
                dtype=self.dtype if shared else None,
            )
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

    def wgrad_input(self, saved: SavedInput, shape: tuple[int, int]) -> Quantized:
        """Return x_hat for wgrad from the saved form of x."""
        if saved.kind == "dense":
            x_hat, scale, *low = saved.tensors
            assert x_hat is not None
            return Quantized(x_hat, scale, LowRank(*low) if low else None)  # type: ignore[arg-type]
        if saved.kind == "input":
            x = saved.tensors[0]
            assert x is not None
            return self.matrix_operand(Role.WGRAD_INPUT, x)
        role, operand = self.resolve(Role.WGRAD_INPUT)
        factors = Role.WGRAD_GRAD_OUTPUT in self.scheme.corrected
        options: dict[str, Any] = {"dim": contracted_dim(role), "shape": shape}
        return operand.decode(Encoded(saved.tensors), dtype=self.dtype, factors=factors, **options)


def scaled_product(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None = None,
    terms: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Run `contract`, apply the outer scales once in fp32, then add terms and a bias."""
    a, b = a.factored(-1), b.factored(-2)
    out = contract(a.values, b.values)
    finish_product(out, [scale for scale in (a.scale, b.scale) if scale is not None], bias, terms)
    return out


def contract(a: Tensor, b: Tensor) -> Tensor:
    """Return a [.. m n] @ b [.. n p], after zero-padding the shorter n to the longer one."""
    missing = a.shape[-1] - b.shape[-2]
    if missing > 0:
        b = F.pad(b, (0, 0, 0, missing))
    elif missing < 0:
        a = F.pad(a, (0, -missing))
    return a @ b


def _without_padding(x: Tensor, rows: int, columns: int) -> Tensor:
    """Crop to [rows columns]: a copy that two GEMMs share may be padded."""
    return x if x.shape == (rows, columns) else x[:rows, :columns]


class QuantizedGemm(torch.autograd.Function):
    """y = x_hat @ w_hat.T + bias; see the module docstring."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, plan: GemmPlan, *params: Tensor
    ) -> Tensor:
        # x [t i], bias [o] or None, params as plan.weight stores them
        with torch.autocast(x.device.type, enabled=False):
            matrices = [(Role.FPROP_INPUT, x)]
            if plan.kept is None and isinstance(plan.weight, DenseWeight):
                matrices.append((Role.FPROP_WEIGHT, params[0].detach()))
            plan.expect(*matrices)
            memory = Workspace(x)
            with memory:
                x_hat, saved = plan.input_operand(x)
            w_hat = plan.weight_operand(Role.FPROP_WEIGHT, params)
            plan.expect()
            y = plan.fprop(x, x_hat, params, w_hat, bias)
            memory.release(saved.tensors)
        ctx.save_for_backward(*params, *saved.tensors)
        ctx.plan, ctx.saved_kind, ctx.x_dtype = plan, saved.kind, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # dy [t o]
        refuse_batched_gradients(dy)
        plan: GemmPlan = ctx.plan
        need_x, need_bias, _, *need_params = ctx.needs_input_grad
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks them only once
        params, saved = tensors[: len(need_params)], tensors[len(need_params) :]
        dx = dbias = None
        dparams: Sequence[Tensor | None] = [None] * len(params)
        memory = Workspace(dy)
        with torch.autocast(dy.device.type, enabled=False):
            if need_x and any(need_params) and not plan.scheme.reuses(Role.WGRAD_GRAD_OUTPUT):
                plan.expect((Role.WGRAD_GRAD_OUTPUT, dy))
            if need_x or (any(need_params) and plan.scheme.reuses(Role.WGRAD_GRAD_OUTPUT)):
                with memory:
                    d_hat = plan.matrix_operand(Role.DGRAD_GRAD_OUTPUT, dy)
            if need_x:
                w_hat = plan.weight_operand(Role.DGRAD_WEIGHT, params)
                dx = plan.dgrad(dy, d_hat, params, w_hat)
                dx = _without_padding(dx, dx.shape[0], params[-1].shape[1]).to(ctx.x_dtype)
            if any(need_params):
                with memory:
                    if not plan.scheme.reuses(Role.WGRAD_GRAD_OUTPUT):
                        d_hat = plan.matrix_operand(Role.WGRAD_GRAD_OUTPUT, dy)
                        plan.expect()
                    shape = (dy.shape[0], params[-1].shape[1])
                    x_hat = plan.wgrad_input(SavedInput(ctx.saved_kind, saved), shape)
                dw = _without_padding(plan.wgrad(dy, d_hat, x_hat), *params[-1].shape)
                dparams = plan.weight.gradients(
                    params, dw, plan.scheme.fprop_weight, key=plan.keys[Role.FPROP_WEIGHT]
                )
                dparams = [g if need else None for g, need in zip(dparams, need_params)]
            memory.release()
            if need_bias:
                dbias = dy.sum(0).to(ctx.bias_dtype)
        return dx, dbias, None, *dparams
