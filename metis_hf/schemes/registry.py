"""The registered schemes by name, and the scheme of one layer.

Tests, command-line choices and tables read the registry. Importing `metis_hf.schemes` registers the
schemes of this package. Schemes of other packages are imported when a lookup needs them: each entry
point of the group `metis_hf.schemes` names a module that registers schemes.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points

from metis_hf.config import MetisConfig
from metis_hf.numerics.formats import FORMATS, get_format, let_redefine
from metis_hf.schemes.base import Scheme

Builder = Callable[[MetisConfig, int], Scheme]

CONTROL = "bf16"  # the scheme that quantizes nothing
RANK_MULTIPLE = 32  # of stored factors: two blocks
BRANCH_MULTIPLE = 16  # of a side branch, as the authors of Metis train it
ENTRY_POINTS = "metis_hf.schemes"  # the entry point group of installed packages


@dataclass(frozen=True)
class SchemeInfo:
    """A registered scheme: the arguments of `register_scheme` and the decorated function."""

    name: str
    summary: str
    source: str
    rank_multiple: int | None
    least_rank: int
    formats: tuple[str, ...] | None
    builder: Builder

    @property
    def module(self) -> str:
        """The name of the module that registered it."""
        return getattr(self.builder, "__module__", None) or "an unknown module"

    def build(self, config: MetisConfig, rank: int) -> Scheme:
        """Return the scheme of layers of this rank.

        Raises:
            ValueError: the scheme does not support an option of the config.
            TypeError: the scheme's function does not return a `Scheme`.
        """
        if config.format is None:
            return self._built(config, rank)
        name = get_format(config.format).name
        refused = f"scheme {self.name!r} does not take format={name!r}"
        if self.formats is not None and name not in self.formats:
            raise ValueError(
                f"{refused}: it is defined only for {' or '.join(self.formats)}. Leave format "
                'unset, or choose a scheme that takes any format, such as "nvfp4-rne" or "metis"'
            )
        try:
            return self._built(config, rank)
        except ValueError as error:
            if not self._builds_in_its_own_format(config, rank):
                raise
            raise ValueError(f"{refused} in this configuration: {error}") from error

    def _builds_in_its_own_format(self, config: MetisConfig, rank: int) -> bool:
        """Return whether the scheme supports the config once its format is unset."""
        try:
            self._built(config.replace(format=None), rank)
        except ValueError:
            return False
        return True

    def _built(self, config: MetisConfig, rank: int) -> Scheme:
        scheme = self.builder(config, rank)
        if not isinstance(scheme, Scheme):
            raise TypeError(
                f"the function of scheme {self.name!r} (in {self.module}) returned {scheme!r}; "
                "it must return a Scheme"
            )
        return replace(scheme, rank=rank)


SCHEMES: dict[str, SchemeInfo] = {}  # registered so far, by name
# Entry points that have been imported -> why their schemes are missing, or None.
_tried: dict[EntryPoint, str | None] = {}


def register_scheme(
    name: str,
    *,
    summary: str,
    source: str,
    rank_multiple: int | None = None,
    least_rank: int = 1,
    formats: Sequence[str] | None = None,
) -> Callable[[Builder], Builder]:
    """Register a function (config, rank) -> Scheme under `name`.

    Args:
        name: the value of `MetisConfig.scheme`.
        summary: one line for tables.
        source: arXiv id, specification or code base.
        rank_multiple: the rank is rounded up to a multiple of this, unless the config has its own;
            None for schemes that split nothing by default.
        least_rank: the lowest rank from `rank_frac`, unless the config has a `rank_multiple` or
            `split_weight=True`.
        formats: names of the number formats that `MetisConfig.format` may select; None: any.

    Raises:
        ValueError: the name is taken.
    """

    def register(build: Builder) -> Builder:
        if name in SCHEMES:
            raise ValueError(
                f"a scheme named {name!r} is already registered, by {SCHEMES[name].module}; "
                "choose another name"
            )
        allowed = None if formats is None else tuple(formats)
        SCHEMES[name] = SchemeInfo(name, summary, source, rank_multiple, least_rank, allowed, build)
        return build

    return register


def scheme_names() -> list[str]:
    """Return the registered names, in order of registration; installed packages come last."""
    _find_installed()
    return list(SCHEMES)


def scheme_info(name: str) -> SchemeInfo:
    """Look up a scheme by name.

    Raises:
        ValueError: not registered; the message lists the names and the nearest one, and the
            installed packages whose schemes could not be imported.
    """
    missing = [] if name in SCHEMES else _find_installed()
    if name in SCHEMES:
        return SCHEMES[name]
    near = difflib.get_close_matches(name, SCHEMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(
        f"scheme {name!r} is not registered{hint} Registered: {', '.join(SCHEMES)}. "
        "Register your own scheme before you convert or load a model: pass its file with --import "
        "to the command or recipe, or call metis_hf.schemes.import_schemes."
        + "".join(f" {reason}." for reason in missing)
    )


def _find_installed() -> list[str]:
    """Import the modules that installed packages name; return reasons of failed imports.

    A failed import is a warning, not an error, since nobody may need its schemes.
    """
    installed = entry_points(group=ENTRY_POINTS)
    for entry in installed:
        if entry in _tried:
            continue
        _tried[entry] = None  # first: a package's module may look a scheme up
        try:
            with all_or_nothing():
                entry.load()
        except Exception as error:
            package = f"package {entry.dist.name!r}" if entry.dist else "an installed package"
            reason = (
                f"The schemes of {package} are missing: its entry point {entry.name!r} "
                f"({entry.value}) failed with {type(error).__name__}: {error}"
            )
            _tried[entry] = reason
            warnings.warn(f"{reason}. Repair or uninstall it", stacklevel=3)
    return [why for entry in installed if (why := _tried[entry])]


@contextmanager
def all_or_nothing() -> Iterator[None]:
    """Unregister the schemes that the block registers if it fails, so that it can be repeated.

    Formats stay registered, but may be redefined.
    """
    schemes, formats = set(SCHEMES), set(FORMATS)
    try:
        yield
    except BaseException:
        forget_since(schemes)
        let_redefine(set(FORMATS) - formats)
        raise


def forget_since(before: set[str]) -> None:
    """Unregister the schemes that an import registered, so that it can be repeated.

    Args:
        before: the names that were registered before the import.
    """
    for name in set(SCHEMES) - before:
        # Also forget the module, which Python would not run again otherwise.
        sys.modules.pop(SCHEMES.pop(name).module, None)


def kept_directions(config: MetisConfig, in_features: int, out_features: int) -> int:
    """Return `rank`, or `rank_frac` of the layer's smaller side, before `rank_multiple`."""
    if config.rank is not None:
        return config.rank
    return share_of(config.rank_frac, min(in_features, out_features))


def share_of(share: float, directions: int) -> int:
    """Return a share of a number of directions, rounded up, at least 1."""
    scaled = round(share * directions * 1e6)
    return max(1, -(-scaled // 10**6))  # ceil that tolerates 0.1 * 30 > 3


def most_directions(in_features: int, out_features: int) -> int:
    """Return the highest useful rank: half the layer's smaller side. Schemes may have a minimum."""
    return (min(in_features, out_features) + 1) // 2


def layer_rank(config: MetisConfig, in_features: int, out_features: int) -> int:
    """Return the rank of a layer: absolute, or a share rounded up; at most the smaller side."""
    smaller = min(in_features, out_features)
    kept = kept_directions(config, in_features, out_features)
    if config.rank is not None:
        return min(smaller, kept)
    multiple = config.rank_multiple
    if multiple is None:
        info = scheme_info(config.scheme)
        multiple, least = info.rank_multiple, info.least_rank
        if config.split_weight == "side-branch":
            multiple = multiple or BRANCH_MULTIPLE
        elif config.split_weight and (multiple is None or least > 1):
            # The same for stored factors of all schemes, so that they can be exchanged.
            multiple, least = RANK_MULTIPLE, 1
        kept, multiple = max(kept, least), multiple or 1
    return min(smaller, -(-kept // multiple) * multiple)


def build_scheme(config: MetisConfig, in_features: int, out_features: int) -> Scheme:
    """Return the scheme of one layer, with its rank and the form of its weight.

    Raises:
        ValueError: the scheme or format does not exist, or the scheme does not support an option of
            the config.
    """
    rank = layer_rank(config, in_features, out_features)
    scheme = scheme_info(config.scheme).build(config, rank)
    if config.split_weight is not None:
        scheme = scheme.storing(split=config.split_weight)
    asked = ""
    try:
        if config.outer_scale == "token":
            asked = 'outer_scale="token"'
            scheme = scheme.with_token_scales()
        if config.subspace_interval > 1:
            asked = f"subspace_interval={config.subspace_interval}"
            steps = config.subspace_interval, config.subspace_refinements
            scheme = scheme.with_kept_subspaces(*steps)
    except ValueError as error:
        raise ValueError(f"scheme {config.scheme!r} does not take {asked}: {error}") from error
    scheme = replace(scheme, weight=scheme.weight.sized(out_features, in_features))
    return scheme.in_high_precision(config.high_precision) if config.high_precision else scheme
