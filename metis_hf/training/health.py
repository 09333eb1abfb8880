"""Spectral and quantization statistics of tensors and layers, for the callback and for analyses.

Nothing here runs in an unmeasured training step. Statistics are floats by name:
  stable_rank   |x|_F^2 / sigma_1^2
  energy        share of |x|_F^2 in the kept low-rank part
  narrowing     max |x| / max |residual|: range reduction by the split
  orthogonality max of |u^T u - I| and |vh vh^T - I|, entrywise (split weights only)
  sqnr_db       signal-to-quantization-noise ratio of the GEMM operand
  zeroed        share of non-zero elements that are quantized to zero
  saturated     share of elements beyond the largest value their block can represent
  nonfinite     share of NaN and inf elements
If the low-rank part is the whole tensor, as for an expert with few tokens, energy and narrowing are
left out: the residual is only fp32 rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metis_hf.layers.gemm import GemmPlan
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.sharding import whole_params
from metis_hf.noise import Key, uniform
from metis_hf.numerics import Quantizer, sqnr_db
from metis_hf.operands import Operand, Spectral, SplitWeight
from metis_hf.schemes import Role
from metis_hf.shared.layer_names import group_of
from metis_hf.training.gradient_noise import GradientNoise, noise_ratios, weight_gradient_noise
from metis_hf.transforms import spectral_split

Stats = dict[str, float]
TENSORS = ("weight", "activation", "gradient")
# Means over all layers, always logged; details are optional.
LOGGED = (
    "weight/sqnr_db", "activation/sqnr_db", "gradient/sqnr_db",
    "activation/stable_rank", "gradient/zeroed", "noise/ratio",
)  # fmt: skip
DETAILS = ("kinds", "layers")
_POWER_STEPS = 12


def spectral_norm(x: Tensor) -> Tensor:
    """Return the largest singular value of x [t c], 0-dim, by power iteration from a fixed start.

    The result is a lower bound, within about 1 % if sigma_1/sigma_2 > 1.1.
    """
    # Scale to avoid overflow and underflow in fp32.
    largest = x.abs().amax().clamp_min(torch.finfo(x.dtype).tiny)
    x = x / largest
    v = uniform((x.shape[1],), Key(7), x.device).sub_(0.5).to(x.dtype)
    for _ in range(_POWER_STEPS):
        v = x.T @ (x @ v)
        v = v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.linalg.vector_norm(x @ v) * largest


def stable_rank(x: Tensor) -> Tensor:
    """Return |x|_F^2 / sigma_1^2 of x [t c]: between 1 and the rank; small means anisotropic."""
    x = x.float()
    x = x / x.abs().amax().clamp_min(torch.finfo(x.dtype).tiny)
    return (torch.linalg.vector_norm(x) / spectral_norm(x)).square()


def element_fates(
    x: Tensor, quantizer: Quantizer, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (zeroed, saturated), 0-dim: shares of elements below and above the format's range.

    Both use `Quantizer.deterministic`, so they have no noise. Blocks run along the last dimension
    of `x`; `amax` sets the tensor scale (None: the amax of `x`).
    """
    quantizer = quantizer.deterministic()
    x_hat = quantizer(x, amax=amax)
    zeroed = ((x_hat == 0) & (x != 0)).sum() / (x != 0).sum().clamp_min(1)
    return zeroed, quantizer.saturated(x, amax=amax)


def operand_health(
    x: Tensor, operand: Operand, *, rank: int, key: Key, row_mask: Tensor | None = None
) -> Stats:
    """Return statistics of an activation or gradient [t c] as a GEMM operand; {} if it is empty.

    Args:
        x: [t c]
        operand: quantizes x as in the scheme.
        rank: of the split for `energy` and `narrowing`, if the operand itself does not split.
        key: noise key.
    """
    if not x.numel():
        return {}
    x = x.detach().float()
    stats = _first_stats(x)
    if "stable_rank" not in stats:
        return _floats(stats)
    split = operand.conditioner if isinstance(operand.conditioner, Spectral) else None
    if _leaves_a_residual(x, rank if split is None else split.rank):
        if split is None:
            residual = spectral_split(x, rank, key=key, row_mask=row_mask).residual
        else:
            a, lam, v = split.split(x, key=key, row_mask=row_mask)
            residual = x - (a * lam) @ v.T
        stats |= _split_stats(x, residual)
    if operand.quantizer is not None:
        options: dict[str, Any] = {"dim": -1, "key": key, "row_mask": row_mask}
        x_hat = operand.conditioner(x, operand.quantizer, **options)
        stats["sqnr_db"] = sqnr_db(x, x_hat[: x.shape[0], : x.shape[1]])
        last = operand.conditioner.parts(x, operand.quantizer, **options)[-1]
        amax = operand.conditioner.tensor_amax()
        stats["zeroed"], stats["saturated"] = element_fates(last.before, operand.quantizer, amax)
    return _floats(stats)


def _floats(stats: dict[str, Tensor]) -> Stats:
    return {name: float(value) for name, value in stats.items()}


def _first_stats(x: Tensor) -> dict[str, Tensor]:
    """Return the share of NaN and inf in x [t c], and the stable rank if it is defined."""
    finite = torch.isfinite(x)
    stats = {"nonfinite": 1 - finite.float().mean()}
    if bool(finite.all()) and x.any():  # undefined for x = 0
        stats["stable_rank"] = stable_rank(x)
    return stats


def _leaves_a_residual(x: Tensor, rank: int) -> bool:
    """Return whether x [t c] has more than `rank` non-zero rows and columns."""
    return min(int(x.any(dim=0).sum()), int(x.any(dim=1).sum())) > rank


def _split_stats(x: Tensor, residual: Tensor) -> dict[str, Tensor]:
    total = x.square().sum()
    tiny = torch.finfo(x.dtype).tiny
    return {
        "energy": 1 - residual.square().sum() / total.clamp_min(tiny),
        "narrowing": x.abs().amax() / residual.abs().amax().clamp_min(tiny),
    }


@torch.no_grad()
def weight_health(layer: MetisLayer, state: Any = None) -> Stats:
    """Return statistics of a layer's weight. If it is sharded, every process must call this.

    Args:
        layer: converted.
        state: the scheme's frozen state in a call (`plan_of_call`); without it, figures under a
            scheme with channel scales are of the unscaled weight.
    """
    params = whole_params(layer)
    weight = layer.weight_form.dense(params).float()
    stats = _first_stats(weight)
    if "stable_rank" not in stats:
        return _floats(stats)
    if isinstance(layer.weight_form, SplitWeight):
        residual = params[-1].float()
        stats |= _stored_split_stats(layer.weight_form, params, weight)
    else:
        if _leaves_a_residual(weight, layer.scheme.rank):
            stats |= _split_stats(weight, spectral_split(weight, layer.scheme.rank).residual)
        residual = weight
    operand = layer.active_scheme().fprop_weight
    quantizer = operand.quantizer
    if quantizer is not None:
        if state is not None:
            operand = operand.bind(state)
        key, form = layer.noise_key(), layer.weight_form
        w_hat = form.quantize(params, operand, dim=-1, key=key, dtype=torch.float32)
        values = w_hat.values if w_hat.scale is None else w_hat.values * w_hat.scale
        stats["sqnr_db"] = sqnr_db(weight, values[: weight.shape[0], : weight.shape[1]])
        amax = None
        if not isinstance(form, SplitWeight) or form.exact_factors:  # else quantized unconditioned
            parts = operand.conditioner.parts(residual, quantizer, dim=-1, key=key)
            residual, amax = parts[-1].before, operand.conditioner.tensor_amax()
        stats["zeroed"], stats["saturated"] = element_fates(residual, quantizer, amax)
    return _floats(stats)


@torch.no_grad()
def split_health(layer: MetisLayer) -> Stats:
    """Return energy, narrowing and orthogonality of a stored split, which a refresh changes.

    If the weight is sharded, every process must call this.
    """
    params = whole_params(layer)
    weight = layer.weight_form.dense(params).float()
    assert isinstance(layer.weight_form, SplitWeight)
    return _floats(_stored_split_stats(layer.weight_form, params, weight))


def _stored_split_stats(
    form: SplitWeight, params: list[Tensor], weight: Tensor
) -> dict[str, Tensor]:
    u, vh = (p.float() for p in form.orthonormal(params))
    eye = torch.eye(form.rank, device=u.device)
    drift = torch.maximum((u.T @ u - eye).abs().amax(), (vh @ vh.T - eye).abs().amax())
    return _split_stats(weight, params[-1].float()) | {"orthogonality": drift}


class LayerProbe:
    """Measures inputs and output gradients of layers during one step.

    Each layer is measured once, at its first call and first backward pass after `attach`: with
    gradient accumulation in the first micro-batch, and not again in a recomputed pass.

    Attributes:
        stats: layer -> tensor kind -> statistics.
        noise: layer -> norms of its weight gradient and of the quantization noise in it; only
            trained layers with a quantized wgrad GEMM.
        states: layer -> the scheme's frozen state in the measured call.
    """

    def __init__(self) -> None:
        self.stats: dict[str, dict[str, Stats]] = {}
        self.states: dict[str, Any] = {}
        self.noise: dict[str, GradientNoise] = {}
        self._handles: list = []

    def attach(self, layers: dict[str, MetisLayer]) -> None:
        """Start measuring."""
        self.detach()
        self.stats, self.noise, self.states = {name: {} for name in layers}, {}, {}
        for name, layer in layers.items():
            hook = _ProbeHook(name, self)
            self._handles.append(layer.register_forward_hook(hook, with_kwargs=True))

    def detach(self) -> None:
        """Stop measuring; keep the statistics."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _ProbeHook:
    def __init__(self, name: str, probe: LayerProbe) -> None:
        self.name, self.stats = name, probe.stats[name]
        self.noise, self.states = probe.noise, probe.states
        self.armed = True

    @torch.compiler.disable  # a measured step of a compiled model runs its measurements eagerly
    def __call__(
        self, layer: MetisLayer, args: tuple[Tensor], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        x = args[0] if args else kwargs["input"]
        if not (layer.training and x.numel()):  # an expert without tokens may get some later
            return
        mask = kwargs.get("row_mask")  # passed to experts
        mask = layer.row_mask(x) if mask is None else mask
        plan = plan_of_call(layer, x, mask, output.dtype)
        if "activation" not in self.stats:
            self.states[self.name] = plan.state
            self.stats["activation"] = self._measure(layer, x, Role.FPROP_INPUT, plan)
        if not output.requires_grad:
            return
        # Always save x: a recomputed pass must save the same tensors as the first pass.
        held = _Held.apply(x, torch.zeros((), requires_grad=True))
        if self.armed:
            self.armed = False
            output.register_hook(lambda grad: self._on_gradient(layer, grad, plan, held))

    def _on_gradient(self, layer: MetisLayer, grad: Tensor, plan: GemmPlan, held: Tensor) -> None:
        stats = self._measure(layer, grad, Role.DGRAD_GRAD_OUTPUT, plan)
        self.stats.setdefault("gradient", stats)
        if not layer.weight_params()[-1].requires_grad:
            return
        (x,) = held.grad_fn.saved_tensors  # type: ignore[union-attr]
        with torch.autocast(x.device.type, enabled=False):
            noise = weight_gradient_noise(
                plan, x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            )
        if noise is not None:
            self.noise[self.name] = noise

    @torch.no_grad()
    def _measure(self, layer: MetisLayer, x: Tensor, role: Role, plan: GemmPlan) -> Stats:
        with torch.autocast(x.device.type, enabled=False):
            return operand_health(
                x.reshape(-1, x.shape[-1]),
                plan.resolve(role)[1],
                rank=layer.scheme.rank,
                key=layer.noise_key(),
                row_mask=plan.row_mask,
            )


class _Held(torch.autograd.Function):
    """Saves a tensor for backward through autograd, so that it can be recomputed or offloaded."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # pragma: no cover  # nothing depends on the output
        return None, None


def plan_of_call(layer: MetisLayer, x: Tensor, mask: Tensor | None, dtype: torch.dtype) -> GemmPlan:
    """Return the plan, with noise keys, of the call that just received x [... i]."""
    weight = layer.weight_params()[-1]
    weight = weight.to_local() if hasattr(weight, "to_local") else weight  # type: ignore[operator]
    keys = layer.call_keys(x.detach(), weight.detach())
    state = layer.call_state(x.detach(), keys)
    return GemmPlan(layer.active_scheme(), layer.weight_form, dtype, keys, mask, state=state)


def logged_health(
    per_layer: dict[str, dict[str, Stats]],
    noise: dict[str, GradientNoise],
    details: str | None = None,
) -> Stats:
    """Return figures for the log: the means in `LOGGED` over all layers, and requested details.

    Args:
        per_layer: layer -> tensor kind -> statistics.
        noise: layer -> norms of its weight gradient and of the noise in it.
        details: "kinds" adds "<tensor>/<kind>/<statistic>", the mean over the layers of a kind, and
            "noise/<kind>/ratio"; "layers" adds both for each layer, with its name as the kind.
    """
    overall = group_means(per_layer, lambda name: "") | noise_ratios(noise)
    found = {name: overall[name] for name in LOGGED if name in overall}
    if details is not None:
        group = group_of if details == "kinds" else str
        found |= group_means(per_layer, group) | noise_ratios(noise, group)
    return found


def group_means(
    per_layer: dict[str, dict[str, Stats]], group: Callable[[str], str] = group_of
) -> Stats:
    """Return means over the layers of each group, named "<tensor>/<group>/<statistic>".

    By default the group is the last part of a layer's name that is not an index: q_proj, c_attn,
    ... A mean is NaN if the statistic is missing for a layer of the group because of NaN or inf.
    """
    groups: dict[tuple[str, str], list[Stats]] = {}
    for name, kinds in per_layer.items():
        for kind, stats in kinds.items():
            groups.setdefault((kind, group(name)), []).append(stats)
    means = {}
    for parts, members in groups.items():
        for stat in dict.fromkeys(stat for stats in members for stat in stats):
            values = [
                stats.get(stat, math.nan)
                for stats in members
                if stat in stats or stats.get("nonfinite", 0) > 0
            ]
            means["/".join(filter(None, (*parts, stat)))] = sum(values) / len(values)
    return means


def nonfinite_layers(per_layer: dict[str, dict[str, Stats]]) -> list[str]:
    """Return "layer (tensor)" for each tensor with NaN or inf, the likely origin first.

    Activations in forward order, then gradients in the order of the backward pass, then weights.
    """
    forward = list(per_layer)
    order = [("activation", forward), ("gradient", forward[::-1]), ("weight", forward)]
    return [
        f"{name} ({kind})"
        for kind, names in order
        for name in names
        if per_layer[name].get(kind, {}).get("nonfinite", 0) > 0
    ]
