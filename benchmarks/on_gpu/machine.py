"""The measured machine: the GPU, versions, and settings that affect speed or bits."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import timing
import torch
from timing import Row

PACKAGES = ("transformers", "accelerate", "triton", "pytest", "datasets", "pyarrow", "numpy")
# Results with different values of these do not belong in one record.
IDENTITY = (
    "device", "gpu", "torch", "transformers", "triton", "quick",
    "allow_tf32", "float32_matmul_precision",
)  # fmt: skip
# Compute capabilities of GPUs that multiply FP4: B200, B300, RTX 50.
FP4_CAPABILITIES = ((10, 0), (10, 3), (12, 0))


def facts(device: torch.device, quick: bool) -> Row:
    """Return the facts that every result depends on."""
    row = {**timing.machine(device), "device": device.type, "quick": quick, **packages()}
    row["allow_tf32"] = torch.backends.cuda.matmul.allow_tf32
    row["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row |= {
            "capability_of_gpu": list(torch.cuda.get_device_capability(device)),
            "memory_gb": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": driver(),
        }
    return row


def packages() -> dict[str, str]:
    """Return the versions of PACKAGES, or "not installed"."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            there = importlib.util.find_spec(name) is not None
            found[name] = "installed, version not known" if there else "not installed"
    return found


def driver() -> str:
    """Return the driver's version from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "not known: nvidia-smi did not answer"
    return done.stdout.split("\n")[0].strip() or "not known: nvidia-smi printed nothing"


def commit(root: Path) -> str | None:
    """Return the commit of a checkout, with "-dirty" if files differ from it; or None."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None


def name_of(device: torch.device) -> str:
    """Return a name for files, such as "nvidia-h200"."""
    found = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub(r"[^a-z0-9]+", "-", found.lower()).strip("-")
