"""Train Hugging Face language models in four bits, emulated exactly on any device."""

import importlib
from typing import TYPE_CHECKING, Any

from metis_hf.config import MetisConfig
from metis_hf.registration import register_on_import

if TYPE_CHECKING:
    from metis_hf.callback import MetisCallback
    from metis_hf.linear import MetisLinear, QuantLinear
    from metis_hf.model import get_metis_model, metis_layers, to_dense
    from metis_hf.precision import PrecisionSchedule, set_precision
    from metis_hf.refreshing import refresh
    from metis_hf.schemes import register_scheme, scheme_names
    from metis_hf.trainer import MetisTrainer, MetisTrainerMixin
    from metis_hf.weight_reuse import reuse_weights

__version__ = "0.1.0"

__all__ = [
    "MetisCallback",
    "MetisConfig",
    "MetisLinear",
    "MetisTrainer",
    "MetisTrainerMixin",
    "PrecisionSchedule",
    "QuantLinear",
    "get_metis_model",
    "metis_layers",
    "refresh",
    "register_scheme",
    "reuse_weights",
    "scheme_names",
    "set_precision",
    "to_dense",
]

# Imported when first used: they need transformers' models and Trainer, which take seconds.
_LAZY = {
    "MetisCallback": "callback",
    "MetisLinear": "linear",
    "MetisTrainer": "trainer",
    "MetisTrainerMixin": "trainer",
    "PrecisionSchedule": "precision",
    "QuantLinear": "linear",
    "get_metis_model": "model",
    "metis_layers": "model",
    "refresh": "refreshing",
    "register_scheme": "schemes",
    "reuse_weights": "weight_reuse",
    "scheme_names": "schemes",
    "set_precision": "precision",
    "to_dense": "model",
}

register_on_import()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"metis_hf.{_LAZY[name]}"), name)
        globals()[name] = value  # the next time without this call
        return value
    raise AttributeError(f"module 'metis_hf' has no attribute {name!r}")
