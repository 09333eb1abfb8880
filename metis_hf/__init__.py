"""Train Hugging Face language models in four bits, emulated exactly on any device."""

import importlib
from typing import TYPE_CHECKING, Any

from metis_hf.config import MetisConfig
from metis_hf.hub import register as _register
from metis_hf.linear import MetisLinear, QuantLinear
from metis_hf.model import get_metis_model, metis_layers, to_dense
from metis_hf.refresh import refresh
from metis_hf.schemes import register_scheme, scheme_names

if TYPE_CHECKING:
    from metis_hf.callback import MetisCallback
    from metis_hf.precision import PrecisionSchedule, set_precision
    from metis_hf.trainer import MetisTrainer, MetisTrainerMixin

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
    "scheme_names",
    "set_precision",
    "to_dense",
]

# Trainer imports PEFT and more; who only loads a model need not wait for it.
_LAZY = {
    "MetisCallback": "callback",
    "MetisTrainer": "trainer",
    "MetisTrainerMixin": "trainer",
    "PrecisionSchedule": "precision",
    "set_precision": "precision",
}

_register()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"metis_hf.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'metis_hf' has no attribute {name!r}")
