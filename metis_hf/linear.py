"""The layers that replace nn.Linear and transformers' Conv1D: QuantLinear and MetisLinear.

QuantLinear keeps one dense weight, in the layout of the layer it replaces. MetisLinear stores u, s,
vh and weight_residual; that name is distinct on purpose, so that loading a checkpoint without this
package reports missing weights instead of giving a plausible model without its dominant subspace.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from metis_hf.config import MetisConfig
from metis_hf.gemm import CallKeys, GemmPlan, QuantizedGemm
from metis_hf.noise import Key, key_of
from metis_hf.schemes import build_scheme, layer_rank
from metis_hf.token_mask import TokenMask
from metis_hf.weights import DenseWeight, SplitWeight, WeightForm


class MetisLayer(nn.Module):
    """What both layers share: scheme, noise and the forward pass. x [... i] -> [... o]."""

    weight_form: WeightForm
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: MetisConfig,
        *,
        name: str = "",
        conv1d: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.config = config
        self.conv1d = conv1d
        self.scheme = build_scheme(config, in_features, out_features)
        self.eval_scheme = self.scheme.deterministic()
        self.name = name
        self.key = key_of("layer", config.seed, name)
        self.token_mask: TokenMask | None = None

    def weight_params(self) -> tuple[Tensor, ...]:
        """The stored tensors, as `weight_form` takes them."""
        raise NotImplementedError

    def active_scheme(self):
        """The scheme of the current mode: eval rounds to nearest everywhere."""
        return self.scheme if self.training else self.eval_scheme

    def noise_key(self) -> Key:
        """The static part of this layer's noise keys: config seed, layer name, process rank."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return self.key.fold(rank)

    def forward(self, x: Tensor) -> Tensor:
        scheme = self.active_scheme()
        if scheme.is_high_precision:
            return self._high_precision(x)
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        params = self.weight_params()
        plan = GemmPlan(
            scheme,
            self.weight_form,
            dtype,
            CallKeys(self.noise_key(), x, params[-1]),
            self.row_mask(x),
        )
        y = QuantizedGemm.apply(x.reshape(-1, self.in_features), self.bias, plan, *params)
        return y.view(*x.shape[:-1], self.out_features)

    def row_mask(self, x: Tensor) -> Tensor | None:
        """Which rows of x [... i] are tokens, as [t] bool; None where all are, or nobody knows."""
        return None if self.token_mask is None else self.token_mask.rows(x, self.name)

    def _high_precision(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_form.dense(self.weight_params()), self.bias)

    def to_dense(self) -> nn.Module:
        """The nn.Linear or Conv1D with the represented weight."""
        weight = self.weight_form.dense(self.weight_params()).detach()
        has_bias = self.bias is not None
        with torch.device("meta"):
            if self.conv1d:
                dense: nn.Module = Conv1D(self.out_features, self.in_features)
                weight = weight.T.contiguous()
            else:
                dense = nn.Linear(self.in_features, self.out_features, bias=has_bias)
        dense.weight = nn.Parameter(weight, requires_grad=self.weight_params()[-1].requires_grad)
        if has_bias:
            dense.register_parameter("bias", self.bias)
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, scheme={self.config.scheme}"


class QuantLinear(MetisLayer):
    """A linear layer with one dense weight whose GEMM operands are quantized.

    `weight` is [o i], or [i o] where it replaces a Conv1D.
    """

    weight_form = DenseWeight()

    def __init__(self, weight: Tensor, bias: Tensor | None, config: MetisConfig, **kwargs) -> None:
        conv1d = kwargs.get("conv1d", False)
        out_features, in_features = weight.T.shape if conv1d else weight.shape
        super().__init__(in_features, out_features, config, **kwargs)
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)

    def weight_params(self) -> tuple[Tensor, ...]:
        return (self.weight.T if self.conv1d else self.weight,)

    def _high_precision(self, x: Tensor) -> Tensor:
        if self.conv1d:  # as Conv1D computes it, to the bit
            assert self.bias is not None  # Conv1D always has one
            flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
            return flat.view(*x.shape[:-1], self.out_features)
        return super()._high_precision(x)


class MetisLinear(MetisLayer):
    """A linear layer whose weight is (u * s) @ vh + weight_residual, all four trainable.

    u [o k], s [k], vh [k i], weight_residual [o i], up to a constant that `weight_form` knows;
    `weight` gives the represented matrix.
    """

    weight_form: SplitWeight

    def __init__(self, weight: Tensor, bias: Tensor | None, config: MetisConfig, **kwargs) -> None:
        conv1d = kwargs.get("conv1d", False)
        w = weight.T if conv1d else weight
        super().__init__(w.shape[1], w.shape[0], config, **kwargs)
        gain = (w.shape[0] * w.shape[1]) ** -0.5 if self.scheme.unit_rms else 1.0
        self.weight_form = SplitWeight(self.scheme.compensated, gain)
        self.rank = layer_rank(config, self.in_features, self.out_features)
        if w.is_meta:  # a checkpoint is about to be loaded into it
            shapes = ((w.shape[0], self.rank), (self.rank,), (self.rank, w.shape[1]), w.shape)
            factors = tuple(w.new_empty(shape) for shape in shapes)
        else:
            factors = self.weight_form.decompose(w, self.rank, self.key)
        requires_grad = weight.requires_grad
        self.u, self.s, self.vh, self.weight_residual = (
            nn.Parameter(f.to(w.dtype).contiguous(), requires_grad=requires_grad) for f in factors
        )
        self.bias = None if bias is None else _parameter(bias)

    @property
    def weight(self) -> Tensor:
        """The represented weight [o i] (read only; not in the state dict)."""
        return self.weight_form.dense(self.weight_params())

    def weight_params(self) -> tuple[Tensor, ...]:
        return self.u, self.s, self.vh, self.weight_residual

    @torch.no_grad()
    def refresh(self) -> float:
        """Decomposes the represented weight anew, in place.

        Returns:
            How far the represented weight moved (fp rounding), relative to its norm.
        """
        before = self.weight.float()
        for param, value in zip(
            self.weight_params(), self.weight_form.decompose(before, self.rank, self.key)
        ):
            param.copy_(value)
        drift = torch.linalg.vector_norm(self.weight.float() - before)
        return (drift / torch.linalg.vector_norm(before).clamp_min(1e-30)).item()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


def _parameter(tensor: Tensor) -> nn.Parameter:
    """The very Parameter if it is one, so that references to it stay valid."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def convert_linear(
    module: nn.Linear | Conv1D,
    config: MetisConfig,
    *,
    name: str,
    token_mask: TokenMask | None = None,
) -> MetisLayer:
    """The quantized layer for an nn.Linear or Conv1D; shares its bias (and its dense weight).

    Args:
        module: nn.Linear or Conv1D; a weight on the meta device gives empty factors.
        config: its scheme decides between QuantLinear and MetisLinear.
        name: full name in the model; noise differs between layers by it.
        token_mask: the model's, if any.
    """
    conv1d = isinstance(module, Conv1D)
    in_features, out_features = linear_shape(module)
    split = build_scheme(config, in_features, out_features).split_weight
    kind = MetisLinear if split else QuantLinear
    layer = kind(module.weight, module.bias, config, name=name, conv1d=conv1d)
    layer.token_mask = token_mask
    return layer.train(module.training)


def as_linear(module: nn.Module) -> nn.Linear | Conv1D:
    """The module itself, known to be one of the two kinds that can be converted."""
    assert isinstance(module, nn.Linear | Conv1D), type(module)
    return module


def linear_shape(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """(in_features, out_features) of an nn.Linear or Conv1D."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
