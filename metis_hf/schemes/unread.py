"""Finds fields of a config that its scheme does not read, so that a warning can name them."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from metis_hf.config import DECOMPOSABLE, MetisConfig
from metis_hf.schemes.base import Scheme
from metis_hf.schemes.registry import build_scheme

_FEATURES = 256  # of the layer that is tried
# At least one of the values changes any scheme that reads the field. `rank` is left out: every
# scheme has one, for measurements of its layers.
_TRIED: dict[str, tuple[Any, ...]] = {
    "rank_frac": (0.05, 0.4),
    "rank_multiple": (1, 64),
    "gradient_rank_frac": (0.1, 0.9),
    "sample_frac": (0.02, 0.9),
    "n_iter": (0, 3),
    "subspace_interval": (1, 2),
    "subspace_refinements": (0, 1),
    "decompose": ((), *((name,) for name in DECOMPOSABLE)),
    "operand_mode": ("shared", "contraction"),
    "format": ("nvfp4", "mxfp4", "int4"),
    "forward_rounding": ("nearest", "stochastic"),
    "backward_rounding": ("nearest", "stochastic"),
    "scale_rounding": ("nearest", "up", "floor", "even"),
    "two_level": (True, False),
    "outer_scale": ("tensor", "token"),
}


def unread_fields(config: MetisConfig) -> list[str]:
    """Return the fields that are not at their default, but change no scheme of the config.

    A scheme reads a field if another value gives another scheme or is refused.
    """
    names = {config.scheme, *config.scheme_pattern.values()}
    common = config.replace(scheme_pattern={}, high_precision=())
    configs = [common.replace(scheme=name, attention=None) for name in names]
    if config.attention is not None:
        configs.append(common)
    defaults = {field.name: field.default for field in dataclasses.fields(MetisConfig)}
    return [
        name
        for name in _TRIED
        if getattr(config, name) != defaults[name] and not any(_reads(c, name) for c in configs)
    ]


def _reads(config: MetisConfig, name: str) -> bool:
    own = _build(config)
    # A config that cannot be built is refused elsewhere.
    return own is None or any(_build(config, **{name: value}) != own for value in _TRIED[name])


def _build(config: MetisConfig, **changes: Any) -> Scheme | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            own = config.replace(**changes)
            own = own if own.attention is None else own.for_attention()
            return build_scheme(own, _FEATURES, _FEATURES)
        except ValueError:
            return None
