"""Registers Metis with transformers once transformers needs to know, not when metis_hf is imported.

transformers' quantizers take seconds to import, and who imports metis_hf may never load a model.
So the registration waits until something imports them, as every `from_pretrained` does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REGISTRY = "transformers.quantizers.auto"


def register_on_import() -> None:
    """Registers now if transformers' registry is loaded, else right after it will be."""
    if REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    import metis_hf.conversion.hub  # noqa: F401  registers at its end, also where it is being imported now


class _Finder(MetaPathFinder):
    """Finds the registry as the other finders do, with a loader that registers afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(Loader):
    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader  # what others see is as ever
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self._finder)
        _register()
