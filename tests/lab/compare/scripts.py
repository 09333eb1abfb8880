"""Scripts of eval/studies, loaded as modules."""

from __future__ import annotations

import importlib.util
import sys

from paths import ROOT


def script(name):
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"eval/studies/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module
