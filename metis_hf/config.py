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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from metis_hf.shared.messages import shown
from metis_hf.shared.patterns import MAX_STATES, Matcher, name_pattern

DECOMPOSABLE = ("weight", "activation", "gradient")
OPERAND_MODES = ("shared", "contraction")
PASSES = ("forward", "backward")
BACKENDS = ("emulated", "native", "auto")
ROUNDINGS = ("nearest", "stochastic")
SCALE_ROUNDINGS = ("nearest", "up")
# A config is read from other people's checkpoints: no value may make a model run for ever.
LARGEST_SIZE = 2**24  # more than any dimension of a weight, and than any number of blocks
MOST_ITERATIONS = 64  # a ratio .9 of neighbouring singular values has become .9^129 = 1e-6 by then
MOST_NAMES = 10_000  # in a list or a mapping: more than any model has linear layers
_INT64 = 2**63
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
        rank: number of directions of every layer, instead of `rank_frac`; 1 to 2**24, which is
            more than any dimension of a weight.
        rank_multiple: the rank is rounded up to a multiple of this (1 to 2**24); None takes the
            scheme's own (32 for "metis" and what is stored split, two blocks; 1 for "metis-paper").
        sample_frac: share of token rows that the activation and gradient subspaces are estimated
            from (paper: 1 % of sequences); at least 4 (rank + oversample) rows are used.
        oversample: extra columns of the random sketch, 0 to 2**24.
        n_iter: power iterations of the range finder, 0 to 64. Directions whose singular values
            differ by a tenth are told apart to 1e-6 by then, and each iteration costs time in
            every call.
        decompose: which tensors "metis" and "metis-paper" split: any of "weight", "activation",
            "gradient"; None takes the scheme's own: all three for "metis-paper", activations and
            gradients for "metis".
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
            suffixes; as in PEFT. Lists and mappings have at most 10,000 entries. Regular
            expressions, here and below, have at most 2,000 characters each and no
            backreferences, conditions, atomic groups or possessive repeats: all others are
            matched in bounded time (`metis_hf.shared.patterns`).
        exclude_modules: what to leave out, in the same two forms. With "all-linear" or a regular
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
        keep_last_blocks: transformer blocks at the end that stay in high precision.
        refresh_interval: optimizer steps between re-decompositions of stored u, s, vh and
            residual by MetisCallback; 0 never refreshes, as the paper.
        backend: what computes the GEMMs: "emulated", in the model's precision on any device;
            "native", the FP4 units of a GPU that has them, an error where a layer or a device
            does not allow it; "auto", native where it can be and emulated elsewhere, as the report
            of the conversion says.
        seed: seed of all noise (stochastic rounding, sampled rows, sketches, sign vectors); a
            signed integer of 64 bits.

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
    decompose: tuple[str, ...] | None = None
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
    backend: str = "emulated"
    seed: int = 0

    quant_method: ClassVar[str] = "metis"
    format_version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if _is_int(self.layers_to_transform):
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
                raise ValueError(f"{name}={shown(getattr(self, name))}; expected {expected}")

        def require_integer(
            name: str, least: int, most: int = LARGEST_SIZE, *, optional: bool = False
        ) -> None:
            value = getattr(self, name)
            ok = (optional and value is None) or (_is_int(value) and least <= value <= most)
            expected = f"{'None or ' * optional}an integer from {least} to {most}"
            require(ok, name, expected)

        names = {"scheme": "a scheme's name", "format": "None or a format's name"}
        for name, expected in names.items():
            value = getattr(self, name)
            named = isinstance(value, str) and 0 < len(value) <= 200
            optional = name == "format" and value is None
            require(named or optional, name, f"{expected}, at most 200 characters")
        for name in ("rank_frac", "sample_frac"):
            value = getattr(self, name)
            number = _is_int(value) or isinstance(value, float)
            require(number and 0 < value <= 1, name, "a share, 0 < share <= 1")
        for name in ("rank", "rank_multiple"):
            require_integer(name, 1, optional=True)
        for name in ("oversample", "keep_first_blocks", "keep_last_blocks"):
            require_integer(name, 0)
        require_integer("n_iter", 0, MOST_ITERATIONS)
        require_integer("refresh_interval", 0, _INT64 - 1)
        require_integer("seed", -_INT64, _INT64 - 1)
        require(isinstance(self.two_level, bool), "two_level", "True or False")
        split = self.split_weight
        require(split is None or isinstance(split, bool), "split_weight", "None, True or False")
        for name, choices in (("decompose", DECOMPOSABLE), ("high_precision", PASSES)):
            value = getattr(self, name)
            none = name == "decompose"
            ok = (none and value is None) or (_is_names(value) and set(value) <= set(choices))
            require(ok, name, f"{'None or ' * none}a list of any of {', '.join(choices)}")
        known = isinstance(self.backend, str) and self.backend in BACKENDS
        require(known, "backend", f"one of {BACKENDS}")
        for name, choices in (
            ("operand_mode", OPERAND_MODES),
            ("forward_rounding", ROUNDINGS),
            ("backward_rounding", ROUNDINGS),
            ("scale_rounding", SCALE_ROUNDINGS),
        ):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, str) and value in choices)
            require(ok, name, f"None or one of {choices}")
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            optional = name == "exclude_modules" and value is None
            require(
                optional or isinstance(value, str) or _is_names(value),
                name,
                f"a string or a list of at most {MOST_NAMES:,} names",
            )
            require(value not in ((), ""), name, "at least one name")
        keep = self.modules_to_not_convert
        require(
            keep is None or (_is_names(keep) and len(keep) > 0),
            "modules_to_not_convert",
            f"None or a list of 1 to {MOST_NAMES:,} names",
        )
        self._check_mappings()
        self._check_blocks()
        self._check_expressions()

    def _check_mappings(self) -> None:
        """Refuse mappings of layers to something that is no rank or no scheme."""
        ranks = f"integers from 1 to {LARGEST_SIZE}"
        for name, expected in (("rank_pattern", ranks), ("scheme_pattern", "names of schemes")):
            patterns = getattr(self, name)

            def is_value(value: Any, name: str = name) -> bool:
                if name == "rank_pattern":
                    return _is_int(value) and 1 <= value <= LARGEST_SIZE
                return isinstance(value, str) and 0 < len(value) <= 200

            if not (
                isinstance(patterns, Mapping)
                and len(patterns) <= MOST_NAMES
                and all(isinstance(k, str) and is_value(v) for k, v in patterns.items())
            ):
                raise ValueError(
                    f"{name}={shown(patterns)}; expected a mapping of at most {MOST_NAMES:,} names "
                    f"or regular expressions to {expected}"
                )

    def _check_blocks(self) -> None:
        """Refuse block indices that are none, or that PEFT's matching would silently ignore."""
        layers, pattern = self.layers_to_transform, self.layers_pattern
        named = isinstance(pattern, str) and re.fullmatch(r"[\w.]{1,200}", pattern)
        if pattern is not None and not named:
            raise ValueError(
                f"layers_pattern={shown(pattern)}; expected None or the name of a list of blocks, "
                'as "layers" or "transformer.h"'
            )
        if layers is None:
            if pattern is not None:
                raise ValueError(
                    f"layers_pattern={pattern!r} without layers_to_transform has no effect; give "
                    "layers_to_transform too"
                )
            return
        if not (
            isinstance(layers, tuple)
            and 0 < len(layers) <= MOST_NAMES
            and all(_is_int(index) and 0 <= index <= LARGEST_SIZE for index in layers)
        ):
            raise ValueError(f"layers_to_transform={shown(layers)}; expected block indices >= 0")
        if isinstance(self.target_modules, str):
            raise ValueError(
                f"layers_to_transform={shown(list(layers))} has no effect with "
                f"target_modules={shown(self.target_modules)}: PEFT's matching looks at block "
                "indices only for a list of names. Give target_modules as a list, or put the "
                "indices into the regular expression"
            )

    def _check_expressions(self) -> None:
        """Refuse what is no regular expression, or would take too long to match."""
        states = 0
        for name, text in self._expressions():
            try:
                states += getattr(_MATCHERS[name](text), "states", 0)
            except ValueError as error:
                raise ValueError(
                    f"{name}={shown(text)}; expected a regular expression: {error}"
                ) from error
            if states > MAX_STATES:
                raise ValueError(
                    f"{name}={shown(text)}; expected fewer or shorter regular expressions: with "
                    f"this one they need more than {MAX_STATES:,} states in all. Plain names count "
                    "for nothing"
                )

    def _expressions(self) -> Iterator[tuple[str, str]]:
        """Yield (field, text) of everything that is matched as a regular expression."""
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, str):
                yield name, value
        for name in ("modules_to_not_convert", "rank_pattern", "scheme_pattern"):
            for text in getattr(self, name) or ():
                yield name, text

    def for_layer(self, name: str) -> MetisConfig:
        """Return the config of one layer, with the patterns applied to its name."""
        changes: dict[str, Any] = {}
        for key, patterns in (("scheme", self.scheme_pattern), ("rank", self.rank_pattern)):
            pattern = matching_pattern(patterns, name)
            if pattern is not None:
                changes[key] = patterns[pattern]
        return self.replace(**changes) if changes else self

    def replace(self, **changes: Any) -> MetisConfig:
        """Return a copy with some values changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the keys transformers looks for in `quantization_config`."""
        values = {
            field.name: _jsonable(getattr(self, field.name)) for field in dataclasses.fields(self)
        }
        # So that records read as they did before there was a choice.
        if self.format is None:
            del values["format"]
        if self.backend == "emulated":
            del values["backend"]
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
        if not _is_int(version) or version < 1:
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


def matching_pattern(patterns: Mapping[str, Any], name: str) -> str | None:
    """Return the first pattern for a module name, by PEFT's rule: it fits the name's end."""
    return next((p for p in patterns if ending_pattern(p).match(name)), None)


def ending_pattern(text: str) -> Matcher:
    """Return the matcher of a key of `rank_pattern` or `scheme_pattern`, as PEFT writes it."""
    return name_pattern(text, before=r"(.*\.)?(", after=")$")


def containing_pattern(text: str) -> Matcher:
    """Return the matcher of an entry of `modules_to_not_convert`, as PEFT's `modules_to_save`."""
    return name_pattern(text, before=r"(^|.*\.)", after=r"($|\..*)")


_MATCHERS: dict[str, Callable[[str], Matcher]] = {
    "target_modules": name_pattern,
    "exclude_modules": name_pattern,
    "modules_to_not_convert": containing_pattern,
    "rank_pattern": ending_pattern,
    "scheme_pattern": ending_pattern,
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_names(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= MOST_NAMES
        and all(isinstance(item, str) for item in value)
    )


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
