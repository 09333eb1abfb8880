"""Measurements that need a GPU, part by part: see benchmarks/gpu.py.

Importing this package makes this checkout's metis_hf importable without an installation.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(1, str(ROOT))  # after the script's own folder
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
