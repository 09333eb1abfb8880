"""Scripts of benchmarks/ are imported by name, as they import each other."""

import sys

from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))
