"""Train Hugging Face language models in four bits, emulated exactly on any device."""

from typing import TYPE_CHECKING, Any

from metis_hf.config import MetisConfig
from metis_hf.hub import register as _register
from metis_hf.linear import MetisLinear, QuantLinear
from metis_hf.model import get_metis_model, metis_layers, to_dense
from metis_hf.schemes import register_scheme, scheme_names

if TYPE_CHECKING:
    from metis_hf.callback import MetisCallback

__version__ = "0.1.0"

__all__ = [
    "MetisCallback",
    "MetisConfig",
    "MetisLinear",
    "QuantLinear",
    "get_metis_model",
    "metis_layers",
    "register_scheme",
    "scheme_names",
    "to_dense",
]

_register()


def __getattr__(name: str) -> Any:
    # Trainer's callback module imports PEFT and more; who only loads a model need not wait for it.
    if name == "MetisCallback":
        from metis_hf.callback import MetisCallback

        return MetisCallback
    raise AttributeError(f"module 'metis_hf' has no attribute {name!r}")
