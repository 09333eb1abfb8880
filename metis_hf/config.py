"""MetisConfig: everything that decides how a model is quantized.

Frozen, checked once, JSON both ways. What a scheme does with these values is said in `schemes/`.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from metis_hf.config_checks import (
    DECOMPOSABLE,
    PASSES,
    check,
    containing_pattern,
    is_int,
    matching_pattern,
)
from metis_hf.shared.messages import shown

# Defined beside the checks, and known by this module's name.
__all__ = ["DECOMPOSABLE", "PASSES", "MetisConfig", "containing_pattern", "matching_pattern"]


_TUPLES = (
    "decompose",
    "target_modules",
    "exclude_modules",
    "high_precision",
    "modules_to_not_convert",
    "layers_to_transform",
)
_MAPPINGS = ("rank_pattern", "scheme_pattern")


@dataclass(frozen=True, kw_only=True)
class MetisConfig:
    """Configuration of a quantized model.

    Args:
        scheme: a registered scheme: "metis", "metis-paper", "nvidia", "nvfp4", "bf16", ...
        rank_frac: share of min(in_features, out_features) directions kept apart (paper: 1.5 %).
        rank: number of directions of every layer, instead of `rank_frac`; 1 to 2**24, which is
            more than any dimension of a weight.
        rank_multiple: a rank from `rank_frac` is rounded up to a multiple of this (1 to 2**24);
            None takes the scheme's own: at least 48 and a multiple of 16, one block, for "metis";
            32 where `split_weight` stores factors, under any scheme but "metis-paper"; there 1.
        gradient_rank_frac: directions of output gradients as a share of the rank, rounded up;
            None takes the scheme's own (a quarter for "metis", all for "metis-paper").
        sample_frac: rows, or sums of rows, that the activation and gradient subspaces are estimated
            from, as a share of the tokens (paper: 1 % of sequences); at least
            4 (rank + oversample), under `metis` 16.
        oversample: extra columns of the random sketch, 0 to 2**24.
        n_iter: power iterations of the range finder, 0 to 64. Directions whose singular values
            differ by a tenth are told apart to 1e-6 by then, and each iteration costs time in
            every call.
        decompose: which tensors "metis" and "metis-paper" split: any of "weight", "activation",
            "gradient"; None takes the scheme's own: all three for "metis-paper", activations and
            gradients for "metis".
        split_weight: store weights as trainable u, s, vh and residual (True) or as one matrix
            (False), under any scheme but "w4a4" and "w4a16"; None takes the scheme's own: True for
            "metis-paper", "bf16-split" and "svdquant", False for the others.
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
        attention: the scheme whose operands the two products of attention take, queries by keys
            and probabilities by values; None leaves them as they are (`layers.attention`).
        two_level: one fp32 scale per tensor above the block scales. False warns: without it,
            block scales underflow E4M3 and gradients become zero.
        outer_scale: what has that fp32 scale: "tensor", or "token": each row of inputs and output
            gradients, where blocks lie along the rows. Weights, and copies with blocks along
            tokens, keep one for the tensor.
        target_modules: "all-linear", a regular expression for full names, or a list of name
            suffixes; as in PEFT. Lists and mappings have at most 10,000 entries. Regular
            expressions, here and below, have at most 2,000 characters each and no
            backreferences, conditions, atomic groups or possessive repeats: all others are
            matched in bounded time (`metis_hf.shared.patterns`).
        exclude_modules: layers to leave out, in the same two forms. With "all-linear" or a regular
            expression the output head, routers and weights tied to others stay as they are too.
        modules_to_not_convert: names of modules, or regular expressions for them, that stay as
            they are with everything inside.
        layers_to_transform: indices of the transformer blocks to convert; needs a list in
            `target_modules`.
        layers_pattern: name of the list of blocks ("layers", "h"), for `layers_to_transform`;
            letters, digits, "_" and ".".
        rank_pattern: name suffix or regular expression -> rank, overriding `rank` for layers.
        scheme_pattern: the same -> scheme, overriding `scheme`: {"down_proj": "bf16"}.
        keep_first_blocks: transformer blocks at the start that stay in high precision.
        keep_last_blocks: transformer blocks at the end that stay in high precision. Counted is the
            outermost list: in hierarchical models (Swin) stages.
        refresh_interval: optimizer steps between re-decompositions of stored u, s, vh and
            residual by MetisCallback; 0 never refreshes, as the paper.
        backend: what computes the GEMMs: "emulated", in the model's precision on any device;
            "native", the FP4 units of a GPU that has them, an error where a layer or a device
            does not allow it; "auto", native where it can be and emulated elsewhere, as the report
            of the conversion says.
        seed: seed of all noise (stochastic rounding, sampled rows, signs, sketches); a signed
            integer of 64 bits.

    Raises:
        ValueError: a value out of range; the message names it and the choices.
    """

    scheme: str = "metis"
    rank_frac: float = 0.015
    rank: int | None = None
    rank_multiple: int | None = None
    gradient_rank_frac: float | None = None
    sample_frac: float = 0.01
    oversample: int = 8
    n_iter: int = 1
    decompose: tuple[str, ...] | None = None
    split_weight: bool | None = None
    operand_mode: str | None = None
    format: str | None = None
    forward_rounding: str | None = None
    backward_rounding: str | None = None
    scale_rounding: str | None = None
    high_precision: tuple[str, ...] = ()
    attention: str | None = None
    two_level: bool = True
    outer_scale: str = "tensor"
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: str | tuple[str, ...] | None = None
    modules_to_not_convert: tuple[str, ...] | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: str | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    scheme_pattern: Mapping[str, str] = field(default_factory=dict, hash=False)
    keep_first_blocks: int = 0
    keep_last_blocks: int = 0
    refresh_interval: int = 0
    backend: str = "emulated"
    seed: int = 0

    quant_method: ClassVar[str] = "metis"
    format_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if is_int(self.layers_to_transform):
            object.__setattr__(self, "layers_to_transform", (self.layers_to_transform,))
        for name in _TUPLES:
            value = getattr(self, name)
            if isinstance(value, list | set | frozenset):  # a set's order differs by process
                values = value if isinstance(value, list) else sorted(value, key=repr)
                object.__setattr__(self, name, tuple(values))
        for name in _MAPPINGS:
            value = getattr(self, name)
            if isinstance(value, Mapping):  # what becomes of the caller's is no matter of ours
                object.__setattr__(self, name, dict(value))
        check(self)
        if not self.two_level:
            warnings.warn(
                "two_level=False: E4M3 block scales of values under about 1e-2 underflow, and "
                "tensors the size of gradients become zero; leave two_level=True to train",
                stacklevel=3,
            )

    @property
    def schemes(self) -> tuple[str, ...]:
        """The names of all schemes: of most layers, of `scheme_pattern`, of attention."""
        named = (self.scheme, *self.scheme_pattern.values(), self.attention)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def for_layer(self, name: str) -> MetisConfig:
        """Return the config of one layer, with the patterns applied to its name."""
        changes: dict[str, Any] = {}
        for key, patterns in (("scheme", self.scheme_pattern), ("rank", self.rank_pattern)):
            pattern = matching_pattern(patterns, name)
            if pattern is not None:
                changes[key] = patterns[pattern]
        return self.replace(**changes) if changes else self

    def for_attention(self) -> MetisConfig:
        """Return the config of the products of attention: as of a layer without a weight."""
        assert self.attention is not None
        return self.replace(
            scheme=self.attention,
            operand_mode="contraction",
            split_weight=None,
            decompose=None,
            outer_scale="tensor",
        )

    def replace(self, **changes: Any) -> MetisConfig:
        """Return a copy with some values changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready, with the keys transformers looks for in `quantization_config`."""
        values = {
            field.name: _jsonable(getattr(self, field.name)) for field in dataclasses.fields(self)
        }
        # So that records read as they did before there was a choice.
        for name in ("format", "attention", "gradient_rank_frac"):
            if values[name] is None:
                del values[name]
        if self.backend == "emulated":
            del values["backend"]
        if self.outer_scale == "tensor":
            del values["outer_scale"]
        return {"quant_method": self.quant_method, "format_version": self.format_version, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MetisConfig:
        """Make a config of what `to_dict` gives.

        Raises:
            ValueError: no mapping, a value that its field does not take, an unknown key (the
                nearest known one is named), or a config written by a newer version of this package.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a Metis config is a mapping of options; got {shown(values)}")
        values = dict(values)
        method = values.pop("quant_method", cls.quant_method)
        if method != cls.quant_method:
            raise ValueError(f"quant_method={shown(method)} is no Metis config; expected 'metis'")
        version = values.pop("format_version", cls.format_version)
        if not is_int(version) or version < 1:
            raise ValueError(
                f"format_version={shown(version)}; expected an integer from 1 to "
                f"{cls.format_version}"
            )
        if version > cls.format_version:
            raise ValueError(
                f"this config has format_version {shown(version)}, the installed metis_hf reads "
                f"up to {cls.format_version}; upgrade metis_hf"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                short = isinstance(key, str) and len(key) <= 100
                near = difflib.get_close_matches(key, known, n=1) if short else []
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ValueError(f"unknown key {shown(key)} in a Metis config{hint}")
        return cls(**values)

    def to_json(self) -> str:
        """Return the config as a JSON object, keys in declaration order."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> MetisConfig:
        """Make a config of what `to_json` gives; errors as of `from_dict`."""
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("a Metis config is a flat JSON object; this one is nested") from None
        return cls.from_dict(values)


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
