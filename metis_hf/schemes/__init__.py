"""The published methods, one short file each; importing this package registers them.

`base` defines a scheme, `registry` finds one by name, scheme files import `parts`, and `discovery`
imports users' files.
"""

import importlib
import pkgutil

from metis_hf.schemes.base import Scheme
from metis_hf.schemes.discovery import absolute_source, import_schemes, source_digests
from metis_hf.schemes.registry import (
    CONTROL,
    SchemeInfo,
    build_scheme,
    kept_directions,
    layer_rank,
    most_directions,
    register_scheme,
    scheme_info,
    scheme_names,
)
from metis_hf.schemes.roles import Role

__all__ = [
    "CONTROL",
    "Role",
    "Scheme",
    "SchemeInfo",
    "absolute_source",
    "build_scheme",
    "import_schemes",
    "kept_directions",
    "layer_rank",
    "most_directions",
    "register_scheme",
    "scheme_info",
    "scheme_names",
    "source_digests",
]

# Modules of this folder without schemes. The others are imported, and so registered, with the
# control first: the order in lists and figures.
_TOOLS = {"base", "channel_ranges", "discovery", "listing", "parts", "registry", "states", "unread"}
_files = (module.name for module in pkgutil.iter_modules(__path__))
for _file in sorted(_files, key=lambda name: (name != CONTROL, name)):
    if _file not in _TOOLS:
        importlib.import_module(f"{__name__}.{_file}")
