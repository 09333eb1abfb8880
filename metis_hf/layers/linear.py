"""The layers that replace nn.Linear and transformers' Conv1D: QuantLinear and MetisLinear.

QuantLinear keeps one dense weight, in the layout of the layer it replaces. MetisLinear stores u, s,
vh and weight_residual. The residual is not called `weight` on purpose: loading a checkpoint without
this package then reports missing weights, instead of giving a plausible model without its dominant
subspaces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from metis_hf.config import MetisConfig
from metis_hf.layers.call_input import check_dtype, check_input, gemm_dtype
from metis_hf.layers.calls import Calls
from metis_hf.layers.casts import as_integers
from metis_hf.layers.gemm import GemmPlan, QuantizedGemm
from metis_hf.layers.initializers import apply_to_layer
from metis_hf.layers.native import NativePlan, obstacle, obstacle_of_call, refusal
from metis_hf.layers.tensor_parallel import ShardedPlan, Shards, shared_amax
from metis_hf.layers.tensor_parallel import obstacle as obstacle_of_shards
from metis_hf.layers.token_mask import TokenMask
from metis_hf.layers.unsupported import refuse_unsupported
from metis_hf.noise import Key, key_of
from metis_hf.operands import SplitWeight
from metis_hf.operands.kept_weight import KeptWeight, can_keep_in_evaluation
from metis_hf.schemes import Scheme, build_scheme
from metis_hf.schemes.noise_keys import CallKeys, process_rank


class MetisLayer(nn.Module):
    """Base class of both layers: scheme, noise and the forward pass. x [... i] -> [... o].

    Attributes:
        weight_form: the form of the stored parameters, chosen by the scheme at construction.
    """

    state_names: tuple[str, ...] = ()  # of the buffers of the scheme's state
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
        self.weight_form = self.scheme.weight
        self.name = name
        self.key = key_of("layer", config.seed, name)
        self.input_key = key_of("input", config.seed)
        self.token_mask: TokenMask | None = None
        self.shards: Shards | None = None  # under transformers' tensor parallelism
        self.reused_weight: KeptWeight | None = None  # see `weight_reuse`
        self.evaluation_weight = KeptWeight(in_evaluation=True)
        self.calls = Calls()
        self.origin: Any = None  # restores the original layer, if not a plain nn.Linear

    @property
    def rank(self) -> int | None:
        """Rank of the stored factors; None without factors."""
        return self.weight_form.rank

    def weight_params(self) -> tuple[Tensor, ...]:
        """Return the stored tensors in the order of `weight_form`; the last is a matrix [o i]."""
        return tuple(getattr(self, name) for name in self.weight_form.names)

    def set_config(self, config: MetisConfig) -> None:
        """Switch to another config with the same parameters; see `check_config`."""
        self.config = config
        self.scheme = build_scheme(config, self.in_features, self.out_features)
        self.eval_scheme = self.scheme.deterministic()
        asks = config.backend != "emulated" and not self.scheme.is_high_precision
        self.native_obstacle = obstacle(self.scheme) if asks else None
        if self._parameters:  # not in __init__
            if self.scheme.weight.fits(self.weight_form):
                self.weight_form = self.scheme.weight
            self.evaluation_weight.forget()
            self._register_state()

    def _register_state(self) -> None:
        """Register the buffers of the scheme's state; existing ones keep their contents."""
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
        """Return the buffers of the scheme's state by name."""
        return {name: getattr(self, name) for name in self.state_names}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MetisLayer:
        self.evaluation_weight.forget()
        buffers = self.state_buffers().items()
        with as_integers(self, [name for name, each in buffers if each.is_floating_point()]):
            super()._apply(fn, recurse)
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> MetisLayer:
        """Call `fn` as nn.Module does; initializers of nn.Linear initialize the weight."""
        apply_to_layer(self, fn)
        return self

    def check_config(self, config: MetisConfig) -> None:
        """Refuse a config that this layer's parameters do not fit.

        Raises:
            ValueError: the rank differs, the scheme stores the weight in another form, or
                `backend="native"` or tensor parallelism cannot run the scheme.
        """
        new, stored = build_scheme(config, self.in_features, self.out_features), self.weight_form
        if config.backend == "native" and not new.is_high_precision:
            reason = obstacle(new)
            if reason is not None:
                raise ValueError(refusal(config, reason))
        if self.shards is not None:
            reason = obstacle_of_shards(new, self.shards, (self.out_features, self.in_features))
            if reason is not None:
                raise ValueError(f"{config.scheme} cannot run under tensor parallelism: {reason}")
        if new.weight.fits(stored):
            return
        if isinstance(stored, SplitWeight) and replace(stored, rank=new.rank) == new.weight:
            raise ValueError(
                f"rank {new.rank} does not match the stored factors of rank {stored.rank}"
            )
        raise ValueError(
            f"scheme {config.scheme!r} stores weights in a different form from the one this model "
            'was converted to. high_precision=("forward", "backward") runs the stored form '
            "unquantized, and to_dense makes a plain model (converting with split_weight=True or "
            "False gives nearly all schemes the same form)"
        )

    def active_scheme(self) -> Scheme:
        """Return the scheme of the current mode: eval rounds to nearest everywhere."""
        return self.scheme if self.training else self.eval_scheme

    def noise_key(self) -> Key:
        """Return the static part of this layer's noise keys: seed, layer name, process rank."""
        return self.key.fold(self.batch_rank())

    def input_noise_key(self) -> Key:
        """Return the static part of inputs' noise keys, which layers share: seed, process rank."""
        return self.input_key.fold(self.batch_rank())

    def batch_rank(self) -> int:
        """Return the process rank, equal for processes that compute one batch together."""
        return process_rank() // (1 if self.shards is None else self.shards.size)

    def call_keys(self, x: Tensor, weight: Tensor | None = None) -> CallKeys:
        """Return the noise keys of a call with this input; `weight` defaults to the layer's.

        Of a split weight, noise depends on the residual, or on a factor if the residual is frozen.
        """
        if weight is None:
            params = self.weight_params()
            parts = params if self.weight_form.is_split else params[-1:]
            weight = next((p for p in reversed(parts) if p.requires_grad), params[-1])
        return CallKeys(
            self.noise_key(),
            x,
            weight,
            self.input_noise_key(),
            rank=self.batch_rank(),
            trains=any(getattr(self, name).requires_grad for name in self.weight_form.names),
        )

    def forward(self, input: Tensor, row_mask: Tensor | None = None) -> Tensor:
        """Map x [... i], the input, to [... o]; row_mask [t] bool marks rows that are tokens."""
        self.calls.note()
        x, scheme = input, self.active_scheme()
        if scheme.is_high_precision:
            return self._high_precision(x)
        params = self.weight_params()
        o, i = params[-1].shape  # of this process's part under tensor parallelism
        name = self.name or "a quantized layer"
        refuse_unsupported(name, x, params)
        check_input(name, x, i)
        check_dtype(name, x, params[-1])
        dtype = gemm_dtype(x)
        if row_mask is None and scheme.samples_rows:
            row_mask = self.row_mask(x)
        keys = self.call_keys(x)
        plan_type, shared = self._plan_type(x, dtype)
        form, multiplied = self.weight_form.in_gemm(params)
        plan = plan_type(
            scheme,
            form,
            dtype,
            keys,
            row_mask,
            saves_input=torch.is_grad_enabled() and any(p.requires_grad for p in multiplied),
            source=None if torch.compiler.is_compiling() else weakref.ref(x),
            state=self.call_state(x, keys, update=self.training),
            kept=None if torch.compiler.is_compiling() else self._kept(multiplied),
            **shared,
        )
        y = QuantizedGemm.apply(x.reshape(-1, i), self.bias, plan, *multiplied)
        y, beside = y.view(*x.shape[:-1], o), self.weight_form.beside(x, params)
        return y if beside is None else y + beside

    def _plan_type(self, x: Tensor, dtype: torch.dtype) -> tuple[type[GemmPlan], dict[str, Any]]:
        """Return (plan class, further arguments) for a call with x [... i] and GEMMs in `dtype`."""
        if self.shards is not None and self.shards.cut:
            amax = shared_amax(self.active_scheme(), self.shards, x, self.weight_params()[-1])
            return ShardedPlan, {"shards": self.shards, "amax": amax}
        if self.config.backend == "emulated" or x.numel() == 0:
            return GemmPlan, {}
        reason = self.native_obstacle or obstacle_of_call(self.scheme, x.device, dtype)
        if reason is None:
            return NativePlan, {}
        if self.config.backend == "native":
            raise ValueError(f"{self.name or 'a quantized layer'}: {refusal(self.config, reason)}")
        return GemmPlan, {}

    def _kept(self, params: Sequence[Tensor]) -> KeptWeight | None:
        """Return the cache of w_hat for a call with these parameters; None if it may have none."""
        if not (self.training or torch.is_grad_enabled() or self.shards is not None):
            return self.evaluation_weight if can_keep_in_evaluation(self) else None
        self.evaluation_weight.forget()
        if self.reused_weight is not None:
            self.reused_weight.called_with(params)
        return self.reused_weight

    def train(self, mode: bool = True) -> MetisLayer:
        if mode:
            self.evaluation_weight.forget()
        return super().train(mode)

    @torch.no_grad()
    def call_state(self, x: Tensor, keys: CallKeys, *, update: bool = False) -> Any:
        """Freeze the scheme's state for a call with this input; None if it has none.

        Without `update` (evaluation, measurements) the state does not change. After a training
        call, the same input then gives the same result as in that call.
        """
        state = self.scheme.state
        if state is None:
            return None
        buffers, rows = self.state_buffers(), x.detach().reshape(-1, self.in_features)
        weight = self.weight_params()[-1].detach()
        if not update:
            return state.freeze(buffers, rows, weight, keys)
        if not (keys.trains or state.follows_frozen_weights):
            return state.freeze(buffers, rows, weight, keys)
        return state.update_and_freeze(buffers, rows, weight, keys)

    def row_mask(self, x: Tensor) -> Tensor | None:
        """Return a mask [t] of the rows of x [... i] that are tokens; None: all, or unknown."""
        return None if self.token_mask is None else self.token_mask.rows(x, self.name)

    def _high_precision(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_form.dense(self.weight_params()), self.bias)

    def to_dense(self) -> nn.Module:
        """Return the nn.Linear or Conv1D with the represented weight.

        A dense weight keeps its Parameter, so that weights tied to other modules stay tied.
        """
        params = self.weight_params()
        represented = self.weight_form.dense(params)
        weight = represented.detach()
        has_bias = self.bias is not None
        with torch.device("meta"):
            if self.conv1d:
                dense: nn.Module = Conv1D(self.out_features, self.in_features)
                weight = weight.T.contiguous()
            else:
                dense = nn.Linear(self.in_features, self.out_features, bias=has_bias)
        if represented is params[-1]:
            dense.weight = self.get_parameter("weight")
        else:
            dense.weight = nn.Parameter(weight, requires_grad=params[-1].requires_grad)
        dense.register_parameter("bias", self.bias)
        return dense.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, scheme={self.config.scheme}"


class QuantLinear(MetisLayer):
    """A linear layer with one dense weight whose GEMM operands are quantized.

    `weight` is [o i], or [i o] where it replaces a Conv1D. The weight form may add parameters, such
    as `weight_clip` [o].
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, config: MetisConfig, **kwargs: Any
    ) -> None:
        conv1d = kwargs.get("conv1d", False)
        out_features, in_features = weight.T.shape if conv1d else weight.shape
        super().__init__(in_features, out_features, config, **kwargs)
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        *others, _ = self.weight_form.decompose(weight.T if conv1d else weight, self.key)
        for name, value in zip(self.weight_form.names, others):
            self.register_parameter(name, nn.Parameter(value, weight.requires_grad))
        self._register_state()

    def weight_params(self) -> tuple[Tensor, ...]:
        *others, weight = super().weight_params()
        return (*others, weight.T if self.conv1d else weight)

    def _high_precision(self, x: Tensor) -> Tensor:
        if self.conv1d and self.bias is not None:  # the same bits as Conv1D
            flat = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
            y = flat.view(*x.shape[:-1], self.out_features)
        else:
            y = super()._high_precision(x)
        for name in self.weight_form.names[:-1]:
            # Unused parameters get zero gradients, since DDP waits for all.
            y = y + 0 * getattr(self, name).sum()
        return y


class MetisLinear(MetisLayer):
    """A linear layer whose weight is (u * s) @ vh + weight_residual, all four trainable.

    u [o k], s [k], vh [k i], weight_residual [o i]. The product also has the constant factor
    `weight_form.gain`. `weight` is the represented matrix.
    """

    weight_form: SplitWeight
    u: nn.Parameter
    s: nn.Parameter
    vh: nn.Parameter
    weight_residual: nn.Parameter

    def __init__(
        self, weight: Tensor, bias: Tensor | None, config: MetisConfig, **kwargs: Any
    ) -> None:
        conv1d = kwargs.get("conv1d", False)
        w = weight.T if conv1d else weight
        super().__init__(w.shape[1], w.shape[0], config, **kwargs)
        if w.is_meta:  # a checkpoint is about to be loaded into it
            factors = tuple(w.new_empty(shape) for shape in self.weight_form.shapes(*w.shape))
        else:
            factors = self.weight_form.stored(w, self.key, w.dtype)
        for name, factor in zip(self.weight_form.names, factors):
            param = nn.Parameter(_owned(factor), weight.requires_grad)
            self.register_parameter(name, param)
        self.bias = None if bias is None else _parameter(bias)
        self._register_state()

    @property
    def rank(self) -> int:
        return self.weight_form.rank

    @property
    def weight(self) -> Tensor:
        """The represented weight [o i] (read only; not in the state dict)."""
        return self.weight_form.dense(self.weight_params())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


def _owned(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that fills its storage: safetensors refuses views of larger ones.

    A slice would keep the whole tensor in memory, and `torch.save` would write all of it.
    """
    tensor = tensor.contiguous()
    fills = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if fills else tensor.clone(memory_format=torch.contiguous_format)


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Wrap a tensor; a Parameter is returned unchanged, so that references to it stay valid."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
