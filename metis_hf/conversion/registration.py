"""Registers Metis with transformers and PEFT when they are imported, not when metis_hf is.

Both read only their own registries (neither reads entry points), so Metis must be in them before
`from_pretrained` looks. Registering at once would import transformers' quantizers (4 to 6 seconds
of CPU time) and PEFT (7 seconds) for every `metis-hf --help` and every process that only reads a
config; `import metis_hf` itself takes .04 seconds. So an import hook waits for these two modules.
It does not affect other imports, leaves both modules as their own loaders made them, and then
removes itself.
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

# Module of another package -> metis_hf modules that register themselves there when imported.
REGISTRARS = {
    "transformers.quantizers.auto": ("metis_hf.conversion.hub", "metis_hf.deploy.packed_loader"),
    "peft": ("metis_hf.conversion.lora",),
}


def register_on_import() -> None:
    """Register with each package now if it is imported, else right after its import."""
    waiting = set()
    for name in REGISTRARS:
        if name in sys.modules:
            _register(name)
        else:
            waiting.add(name)
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(waiting))


def _register(name: str) -> None:
    """Import the metis_hf modules that register with the named module; warn on failure."""
    try:
        for registrar in REGISTRARS[name]:
            importlib.import_module(registrar)
    except ImportError as error:
        # An unsupported version of the other package must stay usable without metis_hf.
        warnings.warn(f"metis_hf could not register with {name}: {error}", stacklevel=2)


class _Finder(MetaPathFinder):
    """Wraps the loaders of the awaited modules, so that they register afterwards."""

    def __init__(self, waiting: set[str]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)  # old-style finders may not have it
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
    """Loads a module with its own loader, then notifies the finder."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for code that inspects the spec without importing

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader  # leave no trace for other code
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.imported(module.__name__)
