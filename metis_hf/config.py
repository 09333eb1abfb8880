"""MetisConfig: everything that decides how a model is quantized.

Frozen, checked once, JSON both ways. What a scheme does with these values is said in `schemes/`.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

DECOMPOSABLE = ("weight", "activation", "gradient")
OPERAND_MODES = ("shared", "contraction")
PASSES = ("forward", "backward")
ROUNDINGS = ("nearest", "stochastic")
SCALE_ROUNDINGS = ("nearest", "up")
_TUPLES = (
    "decompose",
    "target_modules",
    "exclude_modules",
    "high_precision",
    "modules_to_not_convert",
    "layers_to_transform",
)


@dataclass(frozen=True, kw_only=True)
class MetisConfig:
    """Configuration of a quantized model.

    Args:
        scheme: a registered scheme: "metis", "metis-paper", "nvidia", "nvfp4", "bf16", ...
        rank_frac: share of min(in_features, out_features) directions kept apart (paper: 1.5 %).
        rank: number of directions of every layer, instead of `rank_frac`.
        rank_multiple: the rank is rounded up to a multiple of this; None takes the scheme's own
            (32 for "metis" and what is stored split, two blocks; 1 for "metis-paper").
        sample_frac: share of token rows that the activation and gradient subspaces are estimated
            from (paper: 1 % of sequences); at least 4 (rank + oversample) rows are used.
        oversample: extra columns of the random sketch.
        n_iter: power iterations of the range finder.
        decompose: which tensors "metis" and "metis-paper" split: any of "weight", "activation",
            "gradient".
        split_weight: store weights as trainable u, s, vh and residual (True) or as one matrix
            (False), under any scheme; None takes the scheme's own: True for "metis-paper",
            "bf16-split" and "svdquant", False for the others.
        operand_mode: "shared", one quantized copy of a tensor for all its GEMMs (the paper), or
            "contraction", one per GEMM with blocks along its contraction dimension (hardware);
            None takes the scheme's own.
        format: number format of quantized operands ("mxfp8-e4m3", "int4", ...), a name of
            `metis_hf.numerics.FORMATS`; None takes the scheme's own, mostly "nvfp4". A scheme that
            is defined by its format refuses another.
        forward_rounding: element rounding in the forward pass, overriding the scheme's.
        backward_rounding: element rounding of gradients, overriding the scheme's.
        scale_rounding: rounding of block scales, overriding the scheme's.
        high_precision: passes that run unquantized: any of "forward", "backward".
        two_level: one fp32 scale per tensor above the block scales. False warns: without it,
            block scales underflow E4M3 and gradients become zero.
        target_modules: "all-linear", a regular expression for full names, or a list of name
            suffixes; as in PEFT.
        exclude_modules: what to leave out, in the same two forms. With "all-linear" or a regular
            expression the output head, routers and weights tied to others stay as they are too.
        modules_to_not_convert: names of modules that stay as they are with everything inside.
        layers_to_transform: indices of the transformer blocks to convert; needs a list in
            `target_modules`.
        layers_pattern: name of the list of blocks ("layers", "h"), for `layers_to_transform`.
        rank_pattern: name suffix or regular expression -> rank, overriding `rank` for layers.
        scheme_pattern: the same -> scheme, overriding `scheme`: {"down_proj": "bf16"}.
        keep_first_blocks: transformer blocks at the start that stay in high precision.
        keep_last_blocks: transformer blocks at the end that stay in high precision.
        refresh_interval: optimizer steps between re-decompositions of stored u, s, vh and
            residual by MetisCallback; 0 never refreshes, as the paper.
        seed: seed of all noise (stochastic rounding, sampled rows, sketches, sign vectors).

    Raises:
        ValueError: a value out of range; the message names it and the choices.
    """

    scheme: str = "metis"
    rank_frac: float = 0.015
    rank: int | None = None
    rank_multiple: int | None = None
    sample_frac: float = 0.01
    oversample: int = 8
    n_iter: int = 1
    decompose: tuple[str, ...] = DECOMPOSABLE
    split_weight: bool | None = None
    operand_mode: str | None = None
    format: str | None = None
    forward_rounding: str | None = None
    backward_rounding: str | None = None
    scale_rounding: str | None = None
    high_precision: tuple[str, ...] = ()
    two_level: bool = True
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: str | tuple[str, ...] | None = None
    modules_to_not_convert: tuple[str, ...] | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: str | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    scheme_pattern: Mapping[str, str] = field(default_factory=dict)
    keep_first_blocks: int = 0
    keep_last_blocks: int = 0
    refresh_interval: int = 0
    seed: int = 0

    quant_method: ClassVar[str] = "metis"
    format_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if isinstance(self.layers_to_transform, int):
            object.__setattr__(self, "layers_to_transform", (self.layers_to_transform,))
        for name in _TUPLES:
            value = getattr(self, name)
            if isinstance(value, list | set):
                object.__setattr__(self, name, tuple(value))
        self._check()
        if not self.two_level:
            warnings.warn(
                "two_level=False: E4M3 block scales of values under about 1e-2 underflow, and "
                "tensors the size of gradients become zero; leave two_level=True to train",
                stacklevel=3,
            )

    def _check(self) -> None:
        def require(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected {expected}")

        def is_int(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        require(isinstance(self.scheme, str) and bool(self.scheme), "scheme", "a scheme's name")
        named = isinstance(self.format, str) and bool(self.format)
        require(self.format is None or named, "format", "None or the name of a number format")
        for name in ("rank_frac", "sample_frac"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            require(number and 0 < value <= 1, name, "a share, 0 < share <= 1")
        require(
            self.rank_multiple is None or (is_int(self.rank_multiple) and self.rank_multiple >= 1),
            "rank_multiple",
            "None or an integer >= 1",
        )
        require(
            self.rank is None or (is_int(self.rank) and self.rank >= 1),
            "rank",
            "None or an integer >= 1",
        )
        for name in (
            "oversample",
            "n_iter",
            "keep_first_blocks",
            "keep_last_blocks",
            "refresh_interval",
        ):
            value = getattr(self, name)
            require(is_int(value) and value >= 0, name, "an integer >= 0")
        require(is_int(self.seed), "seed", "an integer")
        require(isinstance(self.two_level, bool), "two_level", "True or False")
        split = self.split_weight
        require(split is None or isinstance(split, bool), "split_weight", "None, True or False")
        require(
            isinstance(self.decompose, tuple) and set(self.decompose) <= set(DECOMPOSABLE),
            "decompose",
            f"any of {', '.join(DECOMPOSABLE)}",
        )
        require(
            isinstance(self.high_precision, tuple) and set(self.high_precision) <= set(PASSES),
            "high_precision",
            f"any of {', '.join(PASSES)}",
        )
        for name, choices in (
            ("operand_mode", OPERAND_MODES),
            ("forward_rounding", ROUNDINGS),
            ("backward_rounding", ROUNDINGS),
            ("scale_rounding", SCALE_ROUNDINGS),
        ):
            value = getattr(self, name)
            require(value is None or value in choices, name, f"None or one of {choices}")
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            names = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
            optional = name == "exclude_modules" and value is None
            require(
                optional or isinstance(value, str) or names, name, "a string or a list of names"
            )
            require(value not in ((), ""), name, "at least one name")
        self._check_selection()

    def _check_selection(self) -> None:
        """Refuses what PEFT's matching would silently ignore."""
        for name, kind in (("rank_pattern", int), ("scheme_pattern", str)):
            pattern = getattr(self, name)
            if not isinstance(pattern, Mapping) or not all(
                isinstance(key, str) and isinstance(value, kind) for key, value in pattern.items()
            ):
                raise ValueError(
                    f"{name}={pattern!r}; expected names or regular expressions to {kind.__name__}"
                )
        keep = self.modules_to_not_convert
        if keep is not None and not (
            isinstance(keep, tuple) and keep and all(isinstance(item, str) for item in keep)
        ):
            raise ValueError(f"modules_to_not_convert={keep!r}; expected a list of names")
        layers = self.layers_to_transform
        if layers is None:
            if self.layers_pattern is not None:
                raise ValueError(
                    f"layers_pattern={self.layers_pattern!r} without layers_to_transform has no "
                    "effect; give layers_to_transform too"
                )
            return
        if not layers or not all(isinstance(item, int) and item >= 0 for item in layers):
            raise ValueError(f"layers_to_transform={layers!r}; expected block indices >= 0")
        if isinstance(self.target_modules, str):
            raise ValueError(
                f"layers_to_transform={list(layers)} has no effect with "
                f"target_modules={self.target_modules!r}: PEFT's matching looks at block indices "
                "only for a list of names. Give target_modules as a list, or put the indices into "
                "the regular expression"
            )

    def for_layer(self, name: str) -> MetisConfig:
        """The config of one layer: `scheme_pattern` and `rank_pattern` applied to its name."""
        changes: dict[str, Any] = {}
        for key, patterns in (("scheme", self.scheme_pattern), ("rank", self.rank_pattern)):
            pattern = matching_pattern(patterns, name)
            if pattern is not None:
                changes[key] = patterns[pattern]
        return self.replace(**changes) if changes else self

    def replace(self, **changes: Any) -> MetisConfig:
        """A copy with some values changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the keys transformers looks for in `quantization_config`."""
        values = {
            field.name: _jsonable(getattr(self, field.name)) for field in dataclasses.fields(self)
        }
        if self.format is None:  # so that records read as they did before there was a choice
            del values["format"]
        return {"quant_method": self.quant_method, "format_version": self.format_version, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MetisConfig:
        """The inverse of `to_dict`.

        Raises:
            ValueError: an unknown key (the nearest known one is named), or a config written by a
                newer version of this package.
        """
        values = dict(values)
        method = values.pop("quant_method", cls.quant_method)
        if method != cls.quant_method:
            raise ValueError(f"quant_method={method!r} is not a Metis config; expected 'metis'")
        version = values.pop("format_version", cls.format_version)
        if version > cls.format_version:
            raise ValueError(
                f"this config has format_version {version}, the installed metis_hf reads up to "
                f"{cls.format_version}; upgrade metis_hf"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ValueError(f"unknown key {key!r} in a Metis config{hint}")
        return cls(**values)

    def to_json(self) -> str:
        """The config as a JSON object, keys in declaration order."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> MetisConfig:
        """The inverse of `to_json`; errors as in `from_dict`."""
        return cls.from_dict(json.loads(text))


def matching_pattern(patterns: Mapping[str, Any], name: str) -> str | None:
    """The first pattern for a module name, by PEFT's rule: a suffix, as a regular expression."""
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", name)), None)


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
