"""Train Hugging Face language models in four bits, emulated exactly on CPUs and CUDA GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

from metis_hf.config import MetisConfig
from metis_hf.conversion.registration import register_on_import

if TYPE_CHECKING:
    from metis_hf.conversion.convert import get_metis_model, metis_layers, to_dense
    from metis_hf.deploy.merge import merge_packed
    from metis_hf.deploy.packed import load_packed, packed_config
    from metis_hf.layers.linear import MetisLinear, QuantLinear
    from metis_hf.layers.packed import PackedLinear
    from metis_hf.schemes import register_scheme, scheme_names
    from metis_hf.training.calibration import calibrate, freeze_scales
    from metis_hf.training.callback import MetisCallback
    from metis_hf.training.distillation import DistillTrainer, DistillTrainerMixin
    from metis_hf.training.precision import high_precision, set_precision
    from metis_hf.training.precision_schedule import PrecisionSchedule
    from metis_hf.training.refresh import refresh
    from metis_hf.training.trainer import MetisTrainer, MetisTrainerMixin
    from metis_hf.training.weight_reuse import reuse_weights

__version__ = "0.3.0.dev0"

__all__ = [
    "DistillTrainer",
    "DistillTrainerMixin",
    "MetisCallback",
    "MetisConfig",
    "MetisLinear",
    "MetisTrainer",
    "MetisTrainerMixin",
    "PackedLinear",
    "PrecisionSchedule",
    "QuantLinear",
    "calibrate",
    "freeze_scales",
    "get_metis_model",
    "high_precision",
    "load_packed",
    "merge_packed",
    "metis_layers",
    "packed_config",
    "refresh",
    "register_scheme",
    "reuse_weights",
    "scheme_names",
    "set_precision",
    "to_dense",
]

# Imported on first use: these need transformers' models and Trainer, which load for seconds.
_LAZY = {
    "DistillTrainer": "training.distillation",
    "DistillTrainerMixin": "training.distillation",
    "MetisCallback": "training.callback",
    "MetisLinear": "layers.linear",
    "MetisTrainer": "training.trainer",
    "MetisTrainerMixin": "training.trainer",
    "PackedLinear": "layers.packed",
    "PrecisionSchedule": "training.precision_schedule",
    "QuantLinear": "layers.linear",
    "calibrate": "training.calibration",
    "freeze_scales": "training.calibration",
    "get_metis_model": "conversion.convert",
    "high_precision": "training.precision",
    "load_packed": "deploy.packed",
    "merge_packed": "deploy.merge",
    "metis_layers": "conversion.convert",
    "packed_config": "deploy.packed",
    "refresh": "training.refresh",
    "register_scheme": "schemes",
    "reuse_weights": "training.weight_reuse",
    "scheme_names": "schemes",
    "set_precision": "training.precision",
    "to_dense": "conversion.convert",
}

register_on_import()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"metis_hf.{_LAZY[name]}"), name)
        globals()[name] = value  # later lookups bypass __getattr__
        return value
    raise AttributeError(f"module 'metis_hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LAZY.keys())
