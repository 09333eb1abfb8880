"""The layers that replace nn.Linear and transformers' Conv1D: QuantLinear and MetisLinear.

QuantLinear keeps one dense weight, in the layout of the layer it replaces. MetisLinear stores u, s,
vh and weight_residual; that name is distinct on purpose, so that loading a checkpoint without this
package reports missing weights instead of giving a plausible model without its dominant subspace.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from metis_hf.config import MetisConfig
from metis_hf.layers.gemm import GemmPlan, QuantizedGemm
from metis_hf.layers.noise_keys import CallKeys
from metis_hf.layers.token_mask import TokenMask
from metis_hf.layers.unsupported import refuse_unsupported
from metis_hf.noise import Key, key_of
from metis_hf.operands.weight_forms import (
    ClippedWeight,
    DenseWeight,
    HeldWeight,
    SplitWeight,
    WeightForm,
)
from metis_hf.schemes import Scheme, build_scheme, layer_rank


class MetisLayer(nn.Module):
    """What both layers share: scheme, noise and the forward pass. x [... i] -> [... o]."""

    weight_form: WeightForm
    rank: int | None = None  # of the stored factors
    state_names: tuple[str, ...] = ()  # of the buffers that the scheme's state lives in
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
        self.conv1d = conv1d
        self.set_config(config)
        self.name = name
        self.key = key_of("layer", config.seed, name)
        self.input_key = key_of("input", config.seed)
        self.token_mask: TokenMask | None = None
        self.held_weight: HeldWeight | None = None  # see `weight_reuse`

    def weight_params(self) -> tuple[Tensor, ...]:
        """The stored tensors, as `weight_form` takes them."""
        raise NotImplementedError

    def set_config(self, config: MetisConfig) -> None:
        """Takes another config for the same parameters; see `check_config`."""
        self.config = config
        self.scheme = build_scheme(config, self.in_features, self.out_features)
        self.eval_scheme = self.scheme.deterministic()
        if self._parameters:  # the layer is there already
            self._register_state()

    def _register_state(self) -> None:
        """Makes the buffers of the scheme's state; those that are there keep their contents."""
        state, initial = self.scheme.state, {}
        if state is not None:
            with torch.device(self.weight_params()[-1].device):
                initial = state.initial(self.in_features, self.out_features)
        for name in set(self.state_names) - initial.keys():
            delattr(self, name)
        for name, value in initial.items():
            if name not in self._buffers:
                self.register_buffer(name, value)
        self.state_names = tuple(initial)

    def state_buffers(self) -> dict[str, Tensor]:
        """The buffers of the scheme's state by name."""
        return {name: getattr(self, name) for name in self.state_names}

    def _apply(self, fn, recurse=True):
        # Casts of the model (.to(torch.bfloat16), .half()) leave the state in its own precision:
        # they pass over integers, and moves between devices do not.
        state = self.state_buffers()
        for name, buffer in state.items():
            self._buffers[name] = buffer.view(torch.int32)
        super()._apply(fn, recurse)
        for name, buffer in state.items():
            self._buffers[name] = getattr(self, name).view(buffer.dtype)
        return self

    def check_config(self, config: MetisConfig) -> None:
        """Refuses a config that this layer's parameters do not fit.

        Raises:
            ValueError: another rank, or a scheme that stores the weight in another form.
        """
        new = build_scheme(config, self.in_features, self.out_features)
        if self._form(new) != self._stored_form():
            raise ValueError(
                f"scheme {config.scheme!r} stores weights in another form than the one in which "
                'this model was converted. high_precision=("forward", "backward") runs the stored '
                "form unquantized, to_dense makes a plain model (split_weight=True or False at "
                "conversion gives all schemes one form)"
            )
        rank, stored = layer_rank(config, self.in_features, self.out_features), self.rank
        if stored is not None and rank != stored:
            raise ValueError(f"rank {rank} does not fit stored factors of rank {stored}")

    @staticmethod
    def _form(scheme: Scheme) -> tuple[bool, ...]:
        """How a scheme wants weights stored."""
        if scheme.split_weight:
            return (True, scheme.compensated, scheme.unit_rms, scheme.exact_factors)
        return (False, scheme.clipped_weight)

    def _stored_form(self) -> tuple[bool, ...]:
        return (False, isinstance(self.weight_form, ClippedWeight))

    def active_scheme(self) -> Scheme:
        """The scheme of the current mode: eval rounds to nearest everywhere."""
        return self.scheme if self.training else self.eval_scheme

    def noise_key(self) -> Key:
        """The static part of this layer's noise keys: config seed, layer name, process rank."""
        return self.key.fold(_process_rank())

    def input_noise_key(self) -> Key:
        """The same for inputs, which layers share: config seed, process rank."""
        return self.input_key.fold(_process_rank())

    def call_keys(self, x: Tensor, weight: Tensor | None = None) -> CallKeys:
        """The noise keys of a call with this input, and this stored weight if not the layer's."""
        weight = self.weight_params()[-1] if weight is None else weight
        return CallKeys(self.noise_key(), x, weight, self.input_noise_key())

    def forward(self, x: Tensor, row_mask: Tensor | None = None) -> Tensor:
        """x [... i] -> [... o]; row_mask [t] bool says which rows may be sampled (None: all)."""
        scheme = self.active_scheme()
        if scheme.is_high_precision:
            return self._high_precision(x)
        params = self.weight_params()
        refuse_unsupported(self.name or "a quantized layer", x, params)
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        if row_mask is None and scheme.samples_rows:
            row_mask = self.row_mask(x)
        keys = self.call_keys(x)
        plan = GemmPlan(
            scheme,
            self.weight_form,
            dtype,
            keys,
            row_mask,
            saves_input=torch.is_grad_enabled() and any(p.requires_grad for p in params),
            source=None if torch.compiler.is_compiling() else weakref.ref(x),
            state=self.call_state(x, keys, update=self.training),
            held=None if torch.compiler.is_compiling() else self.held_weight,
        )
        y = QuantizedGemm.apply(x.reshape(-1, self.in_features), self.bias, plan, *params)
        return y.view(*x.shape[:-1], self.out_features)

    @torch.no_grad()
    def call_state(self, x: Tensor, keys: CallKeys, *, update: bool = False) -> Any:
        """What a call with this input takes from the scheme's state; None if it has none.

        Without `update` (evaluation, measurements) the state stays as it is: asked again after a
        call in training, it gives what that call got.
        """
        state = self.scheme.state
        if state is None:
            return None
        buffers, rows = self.state_buffers(), x.detach().reshape(-1, self.in_features)
        if update:
            mark = keys.weight_key.data
            assert mark is not None
            state.update(buffers, rows, mark)
        return state.freeze(buffers, rows, self.weight_params()[-1].detach())

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
        dense.register_parameter("bias", self.bias)
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, scheme={self.config.scheme}"


def _process_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class QuantLinear(MetisLayer):
    """A linear layer with one dense weight whose GEMM operands are quantized.

    `weight` is [o i], or [i o] where it replaces a Conv1D. A scheme with clipped weights has
    `weight_clip` [o] beside it, which starts at zero.
    """

    weight_form: WeightForm = DenseWeight()

    def __init__(self, weight: Tensor, bias: Tensor | None, config: MetisConfig, **kwargs) -> None:
        conv1d = kwargs.get("conv1d", False)
        out_features, in_features = weight.T.shape if conv1d else weight.shape
        super().__init__(in_features, out_features, config, **kwargs)
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        if self.scheme.clipped_weight:
            self.weight_form = ClippedWeight()
            clip = weight.new_zeros(out_features)
            self.weight_clip = nn.Parameter(clip, requires_grad=weight.requires_grad)
        self._register_state()

    def weight_params(self) -> tuple[Tensor, ...]:
        weight = self.weight.T if self.conv1d else self.weight
        clipped = isinstance(self.weight_form, ClippedWeight)
        return (self.weight_clip, weight) if clipped else (weight,)

    def _high_precision(self, x: Tensor) -> Tensor:
        if self.conv1d and self.bias is not None:  # as Conv1D computes it, to the bit
            flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
            y = flat.view(*x.shape[:-1], self.out_features)
        else:
            y = super()._high_precision(x)
        if isinstance(self.weight_form, ClippedWeight):
            # Nothing is clipped; a gradient of zero, since DDP waits for that of each parameter.
            y = y + 0 * self.weight_clip.sum()
        return y


class MetisLinear(MetisLayer):
    """A linear layer whose weight is (u * s) @ vh + weight_residual, all four trainable.

    u [o k], s [k], vh [k i], weight_residual [o i], up to a constant that `weight_form` knows;
    `weight` gives the represented matrix.
    """

    weight_form: SplitWeight
    rank: int

    def __init__(self, weight: Tensor, bias: Tensor | None, config: MetisConfig, **kwargs) -> None:
        conv1d = kwargs.get("conv1d", False)
        w = weight.T if conv1d else weight
        super().__init__(w.shape[1], w.shape[0], config, **kwargs)
        gain = (w.shape[0] * w.shape[1]) ** -0.5 if self.scheme.unit_rms else 1.0
        exact = self.scheme.exact_factors
        self.weight_form = SplitWeight(self.scheme.compensated, gain, exact)
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
        self._register_state()

    def _stored_form(self) -> tuple[bool, ...]:
        form = self.weight_form
        return (True, form.compensated, form.gain != 1, form.exact_factors)

    @property
    def weight(self) -> Tensor:
        """The represented weight [o i] (read only; not in the state dict)."""
        return self.weight_form.dense(self.weight_params())

    def weight_params(self) -> tuple[Tensor, ...]:
        return self.u, self.s, self.vh, self.weight_residual

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


def full_tensor(param: Tensor) -> Tensor:
    """A parameter without its gradient, gathered from all processes if FSDP2 shards it.

    Every process has to call it.
    """
    param = param.detach()
    return param.full_tensor() if hasattr(param, "full_tensor") else param  # type: ignore[operator]


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
    layer = make_layer(
        module.weight,
        module.bias,
        config,
        name=name,
        conv1d=isinstance(module, Conv1D),
        token_mask=token_mask,
    )
    return layer.train(module.training)


def make_layer(
    weight: Tensor,
    bias: Tensor | None,
    config: MetisConfig,
    *,
    name: str,
    conv1d: bool = False,
    token_mask: TokenMask | None = None,
) -> MetisLayer:
    """The quantized layer for a weight [o i], or [i o] with `conv1d`."""
    out_features, in_features = weight.shape[::-1] if conv1d else weight.shape
    split = build_scheme(config, in_features, out_features).split_weight
    layer = (MetisLinear if split else QuantLinear)(weight, bias, config, name=name, conv1d=conv1d)
    layer.token_mask = token_mask
    return layer


def as_linear(module: nn.Module) -> nn.Linear | Conv1D:
    """The module itself, known to be one of the two kinds that can be converted."""
    assert isinstance(module, nn.Linear | Conv1D), type(module)
    return module


def linear_shape(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """(in_features, out_features) of an nn.Linear or Conv1D."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
