"""LoRA over a frozen converted model or a packed NVFP4 base, through PEFT.

`registration` imports this module once PEFT is imported. This module registers with PEFT a tuner
that supports quantized layers and a config that records the conversion; other models take PEFT's
own path. `get_peft_model(model, LoraConfig(...))`, `PeftModel.from_pretrained`, `AutoPeftModel` and
code built on them (TRL's `peft_config`) then accept converted models. The frozen base computes in
its scheme; the adapter computes in high precision.
"""

from __future__ import annotations

import re
import warnings
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from peft import LoraConfig, LoraModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.tuners_utils import (
    BaseTunerLayer,
    _maybe_include_all_linear_layers,
    check_adapters_to_merge,
)
from peft.utils import INCLUDE_LINEAR_LAYERS_SHORTHAND
from torch import Tensor, nn
from transformers import PreTrainedModel

from metis_hf.config import MetisConfig
from metis_hf.conversion.convert import convert, metis_layers
from metis_hf.conversion.hub import read_config
from metis_hf.conversion.lora_checks import check_experts, check_saved, names_of, put_names_back
from metis_hf.layers.linear import MetisLayer
from metis_hf.layers.packed import PackedLinear, PackedWeight, packed_layers
from metis_hf.numerics import relative_error
from metis_hf.shared.patterns import name_pattern

# Initializations that do not touch the base weight; the others write to it or factorize it.
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal")


class QuantizedLoraLinear(LoraLinear):
    """PEFT's LoRA layer around a frozen quantized layer: y = base(x) + scaling B A x."""

    kind = "a quantized layer"  # the base layer, in error messages

    def __init__(self, base_layer: nn.Module, adapter_name: str, *, config: LoraConfig, **kwargs):
        super().__init__(base_layer, adapter_name, config, **kwargs)
        self.fan_in_fan_out = False  # deltas are [o i]; merging handles transposed storage

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, MetisLayer | PackedLinear)
        return module.in_features, module.out_features

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs) -> LoraVariant | None:
        """Return None: only plain LoRA and rsLoRA are supported.

        Raises:
            ValueError: another variant, or an initialization that writes or factorizes the base
                weight.
        """
        if config.init_lora_weights not in _INITIALIZATIONS:
            choices = ", ".join(map(repr, _INITIALIZATIONS))
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} rewrites the base weight, which "
                f"{self.kind} stores quantized; choose one of {choices}"
            )
        try:
            variant = super().resolve_lora_variant(config=config, **kwargs)
        except ValueError as error:
            raise ValueError(f"{error}; {self.kind} supports no variants of LoRA") from error
        if variant is not None:
            raise ValueError(
                f"{type(variant).__name__} is not supported over {self.kind}; use plain LoRA "
                "(use_rslora works)"
            )
        return None

    def adapters_to_merge(self, adapter_names: list[str] | None) -> list[str]:
        """Return the requested adapters of this layer that are not merged yet."""
        names = check_adapters_to_merge(self, adapter_names) or []
        return [name for name in names if name in self.lora_A]

    def check_merge(self, name: str, bias: Tensor | None, safe_merge: bool) -> None:
        """Refuse an adapter that cannot be merged into a layer with this bias.

        With `safe_merge`, refuse NaN and inf too.
        """
        if self.lora_bias[name] and bias is None:
            raise ValueError(
                f"adapter {name!r} has a bias (lora_bias=True) that cannot be merged, because the "
                "layer has no bias. Keep the adapter unmerged"
            )
        if safe_merge and not bool(torch.isfinite(self.get_delta_weight(name)).all()):
            raise ValueError(f"adapter {name!r} has NaN or inf; nothing was merged")


class MetisLoraLinear(QuantizedLoraLinear):
    """LoRA over a converted layer.

    Merging adds scaling B A to the dense weight or to `weight_residual`. The represented weight is
    then W + scaling B A, with the factors unchanged; `metis_hf.refresh` recomputes the factors.
    """

    kind = "a Metis layer"

    @property
    def base(self) -> MetisLayer:
        """The quantized layer."""
        layer = self.get_base_layer()
        assert isinstance(layer, MetisLayer)
        return layer

    def row_mask(self, x: Tensor) -> Tensor | None:
        """Return the base layer's mask of the rows of x that hold tokens; experts read it."""
        return self.base.row_mask(x)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the stored weight (and bias).

        Args:
            safe_merge: refuse NaN and inf.
            adapter_names: default: the active adapters.

        Raises:
            ValueError: an adapter has a bias and the layer does not; with `safe_merge`, an adapter
                is not finite. The layer is then unchanged.
        """
        names = self.adapters_to_merge(adapter_names)
        for name in names:
            self.check_merge(name, self.base.bias, safe_merge)
        for name in names:
            self._add(name, sign=1)
            self.merged_adapters.append(name)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract merged adapters again; exact up to the rounding of the additions."""
        while self.merged_adapters:
            self._add(self.merged_adapters.pop(), sign=-1)

    def _add(self, name: str, sign: int) -> None:
        self.base.weight_params()[-1].add_(sign * self.get_delta_weight(name))
        if self.lora_bias[name]:
            assert self.base.bias is not None  # `merge` checked it
            self.base.bias.add_(sign * self.scaling[name] * self.lora_B[name].bias)


class PackedLoraLinear(QuantizedLoraLinear):
    """LoRA over a packed layer. The adapter reads the unquantized x, even if the base quantizes it.

    Attributes:
        requantize: the encode scale [1] with which `merge` requantizes W + scaling B A; set by
            `merge_packed`. If None, merging into a packed layer raises an error.
    """

    kind = "a packed layer"
    requantize: Tensor | None = None

    @torch.no_grad()
    def merged_weight(self, adapter_names: list[str] | None = None) -> Tensor:
        """Return W + scaling B A, fp32 [o i]."""
        base = self.get_base_layer()
        assert isinstance(base, PackedLinear)
        weight = base.packed.dense(torch.float32)
        for name in self.adapters_to_merge(adapter_names):
            weight += self.get_delta_weight(name).float()
        return weight

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Requantize W + scaling B A under the scale `requantize`; merge into an unpacked layer.

        Raises:
            ValueError: the layer is packed and `requantize` is None.
        """
        base = self.get_base_layer()
        if not isinstance(base, PackedLinear):  # to_dense has unpacked it
            return super().merge(safe_merge, adapter_names)
        names = self.adapters_to_merge(adapter_names)
        if not names:
            return None
        for name in names:
            self.check_merge(name, base.bias, safe_merge)
        weight = self.merged_weight(names)
        if self.requantize is None:
            error = relative_error(weight, PackedWeight.of(weight).dense(torch.float32))
            before = base.packed.dense(torch.float32)
            raise ValueError(
                f"merging into {base.name or 'a packed layer'} would quantize its weight to NVFP4 "
                f"again, with an error of {float(error):.2%} of the merged weight; the adapter "
                f"makes up {float(relative_error(weight, before)):.2%} of it. Keep the adapter "
                "separate (save_pretrained; vLLM serves both), accept the error "
                "(metis_hf.merge_packed(model, requantize=True), which reports it for each "
                "layer), or unpack the base first (metis_hf.to_dense(model), then "
                "merge_and_unload)"
            )
        base.packed = PackedWeight.of(weight, self.requantize)
        for name in names:
            if self.lora_bias[name]:
                base.bias.data += self.scaling[name] * self.lora_B[name].bias  # type: ignore
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Subtract merged adapters from an unpacked layer.

        Raises:
            ValueError: the layer is packed, so the codes before the merge are lost.
        """
        if self.merged and isinstance(self.get_base_layer(), PackedLinear):
            raise ValueError(
                "an adapter that was merged into a packed base cannot be removed again; reload "
                "the base"
            )
        super().unmerge()


_LAYERS = {MetisLayer: MetisLoraLinear, PackedLinear: PackedLoraLinear}


@dataclass
class MetisLoraConfig(LoraConfig):
    """PEFT's LoRA config plus the MetisConfig of the base that the adapter was trained over.

    It is saved in `adapter_config.json`. Without metis_hf, PEFT warns about the unknown key
    `metis_config` and runs the adapter over the base it loads.
    """

    metis_config: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "MetisConfig of the base model; None if not converted"},
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict, without `metis_config` if the base is plain."""
        values = super().to_dict()
        if values["metis_config"] is None:
            del values["metis_config"]
        return values


class MetisLoraModel(LoraModel):
    """PEFT's LoRA tuner, for models with and without quantized layers."""

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Add adapters as PEFT does, to quantized layers too.

        "all-linear" includes quantized layers and converted experts. A plain base is converted
        first if the adapter's config says that it was trained over a converted base.
        """
        config: Any = self.peft_config[adapter_name]
        recorded = getattr(config, "metis_config", None)
        if recorded is not None:
            _reconcile(model, read_config(recorded))
        check_saved(config, model)
        if _quantized_names(model):
            config = _recording(config, model)
            config._register_custom_module(_LAYERS)
            if isinstance(config.target_modules, str):
                # Expand before PEFT does: for models with fused experts, PEFT would expand to names
                # of fused parameters, which conversion has replaced with layers.
                config.target_modules = _targets(config, model)
            self.peft_config[adapter_name] = config
        self._asked = names_of(config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Check the names of experts; PEFT has rewritten them by now."""
        if _quantized_names(model):
            put_names_back(peft_config, self._asked, model)
            check_experts(peft_config, model)
        super()._prepare_model(peft_config, model)


def _recording(config: LoraConfig, model: nn.Module) -> LoraConfig:
    """Return the adapter's config with the MetisConfig of its base, unless one is recorded."""
    if config.inference_mode and getattr(config, "metis_config", None) is not None:
        return config
    converted = getattr(getattr(model, "config", None), "quantization_config", None)
    if not isinstance(converted, MetisConfig):
        if not config.inference_mode and any(metis_layers(model)):
            warnings.warn(
                "the adapter's config does not say that its base is converted, because the config "
                f"of the {type(model).__name__} does not say so: only part of the model was "
                "converted, or it is not a transformers model. Before you load the adapter, "
                "convert its base in the same way; or convert the whole model here, and choose its "
                "layers with target_modules",
                stacklevel=3,
            )
        return config
    values = {item.name: getattr(config, item.name) for item in fields(config) if item.init}
    recording = MetisLoraConfig(**{**values, "metis_config": converted.to_dict()})
    recording._custom_modules = config._custom_modules
    return recording


def _reconcile(model: nn.Module, trained: MetisConfig) -> None:
    """Convert the base to the config the adapter was trained with, or warn of the difference."""
    first = next(metis_layers(model), None)
    if first is not None:
        current = getattr(getattr(model, "config", None), "quantization_config", None)
        if isinstance(current, MetisConfig) and current != trained.replace(backend=current.backend):
            ours, theirs = current.to_dict(), trained.to_dict()
            other = ", ".join(
                f"{key}={ours.get(key)!r} (adapter: {theirs.get(key)!r})"
                for key in ours | theirs
                if ours.get(key) != theirs.get(key)
            )
            warnings.warn(
                f"the adapter was trained over a base that was converted differently: this base "
                f"has {other}. The adapter runs over this base as it is",
                stacklevel=3,
            )
        return
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        warnings.warn(
            f"the adapter was trained over a base converted to scheme {trained.scheme!r}; this "
            "base is not converted and cannot be, because it already has adapters. To run as in "
            "training, load this adapter first",
            stacklevel=3,
        )
        return
    convert(model, trained, check_names=False)  # checked before training
    state = any(layer.state_names for _, layer in metis_layers(model))
    fresh = (
        " The state that the scheme keeps from training is reset, which changes results; to keep "
        "it, save the converted base and load the adapter over it."
    )
    warnings.warn(
        f"the adapter was trained over a base converted to scheme {trained.scheme!r}, so this base "
        f"has been converted too.{fresh * state} To run the adapter over the unconverted base, set "
        "metis_config=None in its config: config = PeftConfig.from_pretrained(adapter); "
        "config.metis_config = None; PeftModel.from_pretrained(base, adapter, config=config)",
        stacklevel=3,
    )


def _targets(config: LoraConfig, model: nn.Module) -> set[str]:
    """Return the full names of the modules that "all-linear" or a regular expression selects."""
    pattern = config.target_modules
    assert isinstance(pattern, str)
    if pattern.lower() != INCLUDE_LINEAR_LAYERS_SHORTHAND:
        # A loaded adapter is untrusted: `re` can take minutes on its pattern.
        matcher = name_pattern(pattern) if config.inference_mode else re.compile(pattern)
        return {name for name, _ in model.named_modules() if matcher.fullmatch(name)}
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    plain: Any = _maybe_include_all_linear_layers(copy(config), model)
    # PEFT itself finds layers that already have an adapter, by the adapter's class name.
    return plain.target_modules | {
        name
        for name, layer in _quantized_names(model).items()
        if layer is not head and not name.endswith(".base_layer")
    }


def _quantized_names(model: nn.Module) -> dict[str, nn.Module]:
    """Return the converted and packed layers by name; PEFT does not know them."""
    return {**dict(metis_layers(model)), **packed_layers(model)}


PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.LORA] = MetisLoraConfig
PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = MetisLoraModel
