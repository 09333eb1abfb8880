"""Schemes from outside this package: a user's file or module, imported by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from metis_hf.numerics.formats import OWN_FORMATS, get_format
from metis_hf.schemes import registry

_PACKAGE = Path(__file__).parents[1]
_imported: dict[str, tuple[str, ...]] = {}  # source, as `absolute_source` gives it -> schemes


def absolute_source(source: str | Path) -> str:
    """Return a source that every process can find: absolute path of a file, or module name."""
    text = str(source)
    is_file = isinstance(source, Path) or text.endswith(".py") or "/" in text or "\\" in text
    return str(Path(text).expanduser().resolve()) if is_file else text


def import_schemes(source: str | Path) -> list[str]:
    """Import a Python file or module that registers schemes; a second import does nothing.

    A file that is imported already, as a module or by another path, is not run again.

    Args:
        source: path of a file (it ends in .py or has a slash), or the dotted name of a module.

    Returns:
        The names of the schemes that it registers.

    Raises:
        ValueError: the file or module does not exist, its code fails, it registers no scheme, or a
            name is taken. Its schemes are then unregistered, so that a repaired file can be
            imported, with other definitions of its schemes and formats.
    """
    source = absolute_source(source)
    if source in _imported and registry.SCHEMES.keys() >= set(_imported[source]):
        return list(_imported[source])
    try:
        with registry.all_or_nothing():
            names = _import_and_name(source)
    except Exception as error:
        reason = str(error)
        if not isinstance(error, _Unusable):
            reason = f"its code raised {type(error).__name__}: {error}"
        raise ValueError(f"cannot import schemes from {source}: {reason}") from error
    _imported[source] = tuple(names)
    return names


def _import_and_name(source: str) -> list[str]:
    """Import a source unless it is already imported; return the names of its schemes."""
    before = set(registry.SCHEMES)
    loaded = _loaded(source)
    module = loaded or _import(source)
    names = [
        name
        for name, info in registry.SCHEMES.items()
        if name not in before or f"{info.module}.".startswith(f"{module.__name__}.")
    ]
    if not names:
        if loaded is None:  # otherwise Python would not run it again
            sys.modules.pop(module.__name__, None)
        raise _Unusable(
            "it registers no scheme. Decorate a function (config, rank) -> Scheme with "
            "metis_hf.register_scheme(name, summary=..., source=...)"
        )
    return names


def source_digests(names: Iterable[str], number_format: str | None = None) -> dict[str, str]:
    """Return scheme name -> SHA-256 of its source file, without this package's own schemes.

    Results of a user's scheme are stored with this digest, because the file may change under the
    same name. A user's number format is included as "format <name>", with the SHA-256 of its
    definition.

    Args:
        names: of schemes.
        number_format: name of the format that a config asks for.
    """
    digests = {name: _source_digest(name) for name in names}
    if number_format is not None:
        digests[f"format {number_format}"] = _format_digest(number_format)
    return {name: digest for name, digest in digests.items() if digest is not None}


def _format_digest(name: str) -> str | None:
    try:
        found = get_format(name)
    except ValueError:  # unknown: building the scheme raises
        return None
    return None if found in OWN_FORMATS else hashlib.sha256(repr(found).encode()).hexdigest()


def _source_digest(name: str) -> str | None:
    try:
        path = Path(inspect.getsourcefile(registry.scheme_info(name).builder) or "").resolve()
    except TypeError:  # a callable without a file
        return None
    if _PACKAGE in path.parents or not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Unusable(Exception):
    """The reason why a source gives no schemes although its code does not fail."""


def _loaded(source: str) -> ModuleType | None:
    """Return the module of that name or file if it is already imported."""
    path = Path(source)
    if not path.is_absolute():
        return sys.modules.get(source)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        same = file is not None and Path(file).name == path.name and Path(file).resolve() == path
        if same and name != "__main__":  # still running: it may register more
            return module
    return None


def _import(source: str) -> ModuleType:
    path = Path(source)
    if not path.is_absolute():
        return _import_module(source)
    if not path.is_file():
        raise _Unusable("the file does not exist")
    name = f"metis_hf_user_{path.stem}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _Unusable("it is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent fails, or the name is empty or relative
        spec = None
    if spec is None:
        raise _Unusable(
            "Python finds no module with that name; give the path of a .py file, or install the "
            "package"
        )
    path = Path(spec.origin).resolve() if spec.has_location and spec.origin else None
    return (path and _loaded(str(path))) or importlib.import_module(name)
