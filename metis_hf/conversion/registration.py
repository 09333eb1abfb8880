"""Registers Metis with transformers and PEFT when they are imported, not when metis_hf is.

Both look only into tables of their own (neither reads entry points), so somebody has to write into
these before `from_pretrained` looks. Importing transformers' quantizers here, to write at once,
takes 4 to 6 seconds of CPU time and PEFT 7, for every `metis-hf --help` and every process that only
reads a config; `import metis_hf` itself takes .04. So a hook waits for these two modules, adds
nothing to any other import, leaves both as their own loaders made them, and then removes itself.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Module of another package -> modules of ours that register themselves there when imported.
REGISTRARS = {
    "transformers.quantizers.auto": ("metis_hf.conversion.hub", "metis_hf.deploy.packed_loader"),
    "peft": ("metis_hf.conversion.lora",),
}


def register_on_import() -> None:
    """Register where the other package is imported already, else right after it will be."""
    waiting = set()
    for name in REGISTRARS:
        if name in sys.modules:
            _register(name)
        else:
            waiting.add(name)
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(waiting))


def _register(name: str) -> None:
    """Import our modules for another package's; they may be on their way in already."""
    try:
        for registrar in REGISTRARS[name]:
            importlib.import_module(registrar)
    except ImportError as error:
        # A version of the other package that we do not know must stay usable without us.
        warnings.warn(f"metis_hf could not register with {name}: {error}", stacklevel=2)


class _Finder(MetaPathFinder):
    """Finds the awaited modules as other finders do, with a loader that registers afterwards."""

    def __init__(self, waiting: set[str]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)  # finders of Python 3.3 may have none
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def imported(self, name: str) -> None:
        """Register with a module that has just been imported; stop waiting after the last one."""
        self._waiting.discard(name)
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        _register(name)


class _Loader(Loader):
    """Loads a module with its own loader and tells the finder."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for those who look at the spec and do not import

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader  # what others see is as ever
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.imported(module.__name__)
