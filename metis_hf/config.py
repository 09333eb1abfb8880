"""MetisConfig: the options that decide how a model is quantized.

A config is frozen, validated on construction, and converts to and from JSON. `schemes/` defines
what each scheme does with the values.
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

from metis_hf.shared import patterns
from metis_hf.shared.messages import shown

DECOMPOSABLE: tuple[str, ...] = ("weight", "activation", "gradient")
PASSES: tuple[str, ...] = ("forward", "backward")
_CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "operand_mode": (None, "shared", "contraction"),
    "forward_rounding": (None, "nearest", "stochastic"),
    "backward_rounding": (None, "nearest", "stochastic"),
    "scale_rounding": (None, "nearest", "up", "floor", "even"),  # None: each format's own
    "outer_scale": ("tensor", "token"),
    "backend": ("emulated", "native", "auto"),
    "two_level": (True, False),
    "split_weight": (None, True, False, "side-branch"),
}
# Configs come from other people's checkpoints: no value may make a model run forever.
_LARGEST = 2**24  # exceeds any dimension of a weight and any number of blocks
_MOST_NAMES = 10_000  # in a list or a mapping: more than any model has linear layers
_MOST_CHARACTERS = 10_000  # in all regular expressions of a config; plain names do not count
# After 64 iterations, a ratio of .9 between neighboring singular values has become .9^129 = 1e-6.
_INTEGERS = {  # field -> least, most
    "rank": (1, _LARGEST), "rank_multiple": (1, _LARGEST),
    "keep_first_blocks": (0, _LARGEST), "keep_last_blocks": (0, _LARGEST), "n_iter": (0, 64),
    "subspace_interval": (1, 2**31 - 1), "subspace_refinements": (0, 64),
    "refresh_interval": (0, 2**63 - 1), "seed": (-(2**63), 2**63 - 1),
}  # fmt: skip
_OPTIONAL = {"rank", "rank_multiple", "gradient_rank_frac", "attention", "format", "decompose",
             "exclude_modules", "modules_to_not_convert"}  # fmt: skip
_TUPLES = ("decompose", "target_modules", "exclude_modules", "high_precision",
           "modules_to_not_convert", "layers_to_transform")  # fmt: skip
# `to_dict` omits these at their defaults, so that records made before they existed stay equal.
_NAMED_IF_CHOSEN = ("format", "attention", "gradient_rank_frac", "backend", "outer_scale",
                    "subspace_interval", "subspace_refinements")  # fmt: skip
_MAPPINGS = ("rank_pattern", "scheme_pattern")


@dataclass(frozen=True, kw_only=True)
class MetisConfig:
    """Configuration of a quantized model.

    Args:
        scheme: a registered scheme: "metis", "metis-paper", "nvidia", "nvfp4", "bf16", ...
        rank_frac: rank as a share of min(in_features, out_features) (paper: 1.5 %).
        rank: rank of every layer, instead of `rank_frac`; 1 to 2**24.
        rank_multiple: a rank from `rank_frac` is rounded up to a multiple of this (1 to 2**24).
            None takes the scheme's own: 16 (one block) and at least 48 for "metis"; 1 for
            "metis-paper"; 16 for a side branch; 32 for any other scheme, and for "metis", with
            `split_weight=True`.
        gradient_rank_frac: rank of output gradients as a share of the layer's rank, rounded up;
            None takes the scheme's own (a quarter for "metis", all for "metis-paper").
        sample_frac: rows, or sums of rows, from which the subspaces of activations and gradients
            are estimated, as a share of the tokens (paper: 1 % of sequences); at least
            4 (rank + 8), or 16 (rank + 8) under "metis".
        n_iter: power iterations of the range finder, 0 to 64. Each costs time in every call.
        subspace_interval: optimizer steps between searches for the subspaces of inputs and output
            gradients; layers reuse them in between, with MetisCallback or
            `layer_states.after_step`. 1 searches in every call (the paper's conference version: 8).
        subspace_refinements: multiplications of a reused subspace by each batch's Gram matrix,
            0 to 64.
        decompose: tensors that "metis", "metis-paper" and the released schemes split: any of
            "weight", "activation", "gradient"; None takes the scheme's own: activations and
            gradients for "metis", all three for the others.
        split_weight: True stores weights as trainable u, s, vh and residual, False as one matrix;
            "side-branch" stores the same factors, keeps them in high precision and applies them to
            the unquantized input, in parallel with the residual's GEMM. None takes the scheme's
            own: True for "metis-paper", "bf16-split" and "svdquant", "side-branch" for
            "metis-released" and "mean-released", False for the others.
        operand_mode: "shared", one quantized copy of a tensor for all its GEMMs (the paper), or
            "contraction", one per GEMM with blocks along its contraction dimension (hardware);
            None takes the scheme's own.
        format: number format of quantized operands, a name of `metis_hf.numerics.FORMATS`; None
            takes the scheme's own, mostly "nvfp4". A scheme that is defined by its format refuses
            another.
        forward_rounding: element rounding in the forward pass, overriding the scheme's.
        backward_rounding: element rounding of gradients, overriding the scheme's.
        scale_rounding: rounding of block scales, overriding the scheme's.
        high_precision: passes that run unquantized: any of "forward", "backward".
        attention: the scheme that quantizes the products of attention; None leaves them alone.
        two_level: an fp32 scale per tensor above block scales; without it, gradients underflow.
        outer_scale: "tensor" has one such fp32 scale per tensor, "token" one per row of inputs and
            output gradients, in copies whose blocks lie along the rows. Weights, and copies with
            blocks along tokens, keep one per tensor.
        target_modules: "all-linear", a regular expression for full names, or a list of name
            suffixes; as in PEFT. Lists and mappings have at most 10,000 entries. Regular
            expressions, here and below, are RE2: no look-arounds, no back-references.
        exclude_modules: layers to leave out, as a regular expression or a list. With "all-linear"
            or a regular expression in `target_modules`, the output head, routers and tied weights
            are left out too.
        modules_to_not_convert: names of modules, or regular expressions, to leave unconverted.
        layers_to_transform: indices of the transformer blocks to convert; needs a list in
            `target_modules`.
        layers_pattern: name of the list of blocks ("layers", "h"), for `layers_to_transform`.
        rank_pattern: name suffix or regular expression -> rank of the layers that match.
        scheme_pattern: name suffix or regular expression -> scheme of the layers that match:
            {"down_proj": "bf16"}.
        keep_first_blocks: transformer blocks at the start that stay in high precision.
        keep_last_blocks: the same at the end. The outermost list of blocks is counted; in
            hierarchical models (Swin) its entries are stages.
        refresh_interval: optimizer steps between re-decompositions of stored u, s, vh and
            residual by MetisCallback; 0 never refreshes, as in the paper.
        backend: what computes the GEMMs: "emulated", in the model's precision on any device;
            "native", the FP4 units of a GPU, or an error; "auto", native where possible and
            emulated elsewhere, as the conversion report says.
        seed: seed of all noise (stochastic rounding, sampled rows, signs, sketches); 64 bits.

    Raises:
        ValueError: a value out of range; the message names it and the choices.
    """

    scheme: str = "metis"
    rank_frac: float = 0.015
    rank: int | None = None
    rank_multiple: int | None = None
    gradient_rank_frac: float | None = None
    sample_frac: float = 0.01
    n_iter: int = 2
    subspace_interval: int = 1
    subspace_refinements: int = 0
    decompose: tuple[str, ...] | None = None
    split_weight: bool | str | None = None
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
        if _is_int(self.layers_to_transform):
            object.__setattr__(self, "layers_to_transform", (self.layers_to_transform,))
        for name in _TUPLES:
            value = getattr(self, name)
            if isinstance(value, list | set | frozenset):  # a set's order differs between processes
                values = value if isinstance(value, list) else sorted(value, key=repr)
                object.__setattr__(self, name, tuple(values))
        for name in _MAPPINGS:
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, dict(value))
        _check(self)
        if not self.two_level:
            warnings.warn(
                "two_level=False: E4M3 block scales of values below about 1e-2 underflow, so "
                "gradients become zero; keep two_level=True for training",
                stacklevel=3,
            )

    @property
    def schemes(self) -> tuple[str, ...]:
        """The names of all schemes in `scheme`, `scheme_pattern` and `attention`."""
        named = (self.scheme, *self.scheme_pattern.values(), self.attention)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def for_layer(self, name: str) -> MetisConfig:
        """Return the config of one layer, with the patterns applied to its name."""
        changes: dict[str, Any] = {}
        for key, values in (("scheme", self.scheme_pattern), ("rank", self.rank_pattern)):
            pattern = patterns.matching_pattern(values, name)
            if pattern is not None:
                changes[key] = values[pattern]
        return self.replace(**changes) if changes else self

    def for_attention(self) -> MetisConfig:
        """Return the config of the two products of attention, which have no stored weight."""
        assert self.attention is not None
        return self.replace(
            scheme=self.attention, operand_mode="contraction", outer_scale="tensor",
            split_weight=None, decompose=None, subspace_interval=1, subspace_refinements=0,
        )  # fmt: skip

    def replace(self, **changes: Any) -> MetisConfig:
        """Return a copy with some values changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict, with the keys of transformers' `quantization_config`."""
        values: dict[str, Any] = {
            "quant_method": self.quant_method,
            "format_version": self.format_version,
        }
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name not in _NAMED_IF_CHOSEN or value != each.default:
                values[each.name] = _jsonable(value)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MetisConfig:
        """Make a config from the mapping that `to_dict` returns.

        Raises:
            ValueError: `values` is no mapping, a field rejects its value, a key is unknown (the
                message names the nearest known one), or a newer version of this package wrote it.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a Metis config must be a mapping of options; got {shown(values)}")
        values = dict(values)
        method = values.pop("quant_method", cls.quant_method)
        if method != cls.quant_method:
            raise ValueError(f"quant_method={shown(method)}; expected 'metis'")
        version = values.pop("format_version", cls.format_version)
        if not _is_int(version) or version < 1:
            raise ValueError(
                f"format_version={shown(version)}; expected an integer from 1 to "
                f"{cls.format_version}"
            )
        if version > cls.format_version:
            raise ValueError(
                f"this config has format_version {shown(version)}, but the installed metis_hf "
                f"reads only versions up to {cls.format_version}; upgrade metis_hf"
            )
        if values.pop("oversample", 0):  # up to 0.2: extra columns, worth about one iteration
            values["n_iter"] = values.get("n_iter", 1) + 1
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
        """Make a config from the text that `to_json` returns; errors as in `from_dict`."""
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("a Metis config must be a flat JSON object, not nested") from None
        return cls.from_dict(values)


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _check(config: MetisConfig) -> None:
    for name, ok, expected in _rules(config):
        value = getattr(config, name)
        none = name in _OPTIONAL
        if not (ok or (none and value is None)):
            raise ValueError(f"{name}={shown(value)}; expected {'None or ' * none}{expected}")
    _check_blocks(config)
    _check_expressions(config)


def _rules(config: MetisConfig) -> Iterator[tuple[str, bool, str]]:
    """Yield (field, whether its value is valid, description of valid values)."""
    value: Any
    for name in ("scheme", "attention", "format"):
        kind = "format" if name == "format" else "scheme"
        ok = _is_name(getattr(config, name))
        yield name, ok, f"a {kind}'s name, at most 200 characters"
    for name in ("rank_frac", "sample_frac", "gradient_rank_frac"):
        value = getattr(config, name)
        ok = (_is_int(value) or isinstance(value, float)) and 0 < value <= 1
        yield name, ok, "a share, 0 < share <= 1"
    for name, (least, most) in _INTEGERS.items():
        value = getattr(config, name)
        yield name, _is_int(value) and least <= value <= most, f"an integer from {least} to {most}"
    value, kept = config.subspace_refinements, config.subspace_interval != 1
    yield (
        "subspace_refinements",
        not value or kept,
        "0, since subspace_interval=1 keeps no subspace",
    )
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        ok = any(value == choice and isinstance(value, type(choice)) for choice in choices)
        yield name, ok, f"one of {', '.join(map(str, choices))}"
    for name, several in (("decompose", DECOMPOSABLE), ("high_precision", PASSES)):
        value = getattr(config, name)
        ok = _is_names(value) and set(value) <= set(several)
        yield name, ok, f"a list of any of {', '.join(several)}"
    for name in ("target_modules", "exclude_modules", "modules_to_not_convert"):
        value = getattr(config, name)
        one = name != "modules_to_not_convert"
        ok = bool(value) and (_is_names(value) or (one and isinstance(value, str)))
        yield name, ok, f"{'a string or ' * one}a list of 1 to {_MOST_NAMES:,} names"
    for name, kind in (("rank_pattern", f"integers from 1 to {_LARGEST}"),
                       ("scheme_pattern", "names of schemes")):  # fmt: skip
        value = getattr(config, name)
        ok = isinstance(value, Mapping) and len(value) <= _MOST_NAMES
        for key, each in value.items() if ok else ():
            is_rank = _is_int(each) and 1 <= each <= _LARGEST
            right = is_rank if name == "rank_pattern" else _is_name(each)
            ok = ok and isinstance(key, str) and right
        expected = f"a mapping of at most {_MOST_NAMES:,} names or regular expressions to {kind}"
        yield name, ok, expected


def _check_blocks(config: MetisConfig) -> None:
    """Refuse invalid block indices, and ones that PEFT's matching would silently ignore."""
    layers, pattern = config.layers_to_transform, config.layers_pattern
    named = isinstance(pattern, str) and re.fullmatch(r"[\w.]{1,200}", pattern)
    if pattern is not None and not named:
        raise ValueError(
            f"layers_pattern={shown(pattern)}; expected None or the name of a list of blocks, "
            'such as "layers" or "transformer.h"'
        )
    if layers is None:
        if pattern is not None:
            raise ValueError(
                f"layers_pattern={pattern!r} has no effect without layers_to_transform; set "
                "layers_to_transform too"
            )
        return
    indices = isinstance(layers, tuple) and 0 < len(layers) <= _MOST_NAMES
    if not (indices and all(_is_int(index) and 0 <= index <= _LARGEST for index in layers)):
        raise ValueError(f"layers_to_transform={shown(layers)}; expected block indices >= 0")
    if isinstance(config.target_modules, str):
        raise ValueError(
            f"layers_to_transform={shown(list(layers))} has no effect with "
            f"target_modules={shown(config.target_modules)}: PEFT's matching looks at block "
            "indices only for a list of names. Give target_modules as a list, or put the "
            "indices into the regular expression"
        )


def _check_expressions(config: MetisConfig) -> None:
    """Refuse invalid regular expressions, and more than `_MOST_CHARACTERS` in all of them."""
    fields: dict[str, Callable[[str], Any]] = {
        "target_modules": patterns.name_pattern,
        "exclude_modules": patterns.name_pattern,
        "modules_to_not_convert": patterns.containing_pattern,
        "rank_pattern": patterns.ending_pattern,
        "scheme_pattern": patterns.ending_pattern,
    }
    characters = 0
    for name, matcher in fields.items():
        value = getattr(config, name)
        if isinstance(value, tuple) and name != "modules_to_not_convert":
            continue  # full names and suffixes, not expressions
        for text in (value,) if isinstance(value, str) else value or ():
            try:
                matcher(text)
            except ValueError as error:
                expected = "expected a regular expression"
                raise ValueError(f"{name}={shown(text)}; {expected}: {error}") from None
            characters += 0 if re.fullmatch(r"[\w.-]*", text) else len(text)
            if characters > _MOST_CHARACTERS:
                raise ValueError(
                    f"{name}={shown(text)}; with this one, the regular expressions have more than "
                    f"{_MOST_CHARACTERS:,} characters in total; use fewer or shorter ones (plain "
                    "names do not count)"
                )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200


def _is_names(value: object) -> bool:
    names = isinstance(value, tuple) and len(value) <= _MOST_NAMES
    return names and all(isinstance(each, str) for each in value)  # type: ignore[attr-defined]
