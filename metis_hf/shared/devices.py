"""Selection of the device that a command runs on."""

from __future__ import annotations

import re

import torch

# Subspaces and rotations are computed in fp64, and block scales are rounded to float8_e4m3fn.
_LACKS = {"mps": "it has no fp64 and no float8"}


def lacks(device: torch.device) -> str | None:
    """Return why a device type cannot compute schemes; None if it can."""
    return _LACKS.get(device.type)


def device_of(name: str | None) -> torch.device:
    """Return the named device; None: the accelerator if it can compute schemes, else the CPU.

    Raises:
        ValueError: torch does not know the device or cannot use it here, or it cannot compute
            schemes.
    """
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None or lacks(found) else found
    try:
        device = torch.device(name)
        if reason := lacks(device):
            raise RuntimeError(reason)
        torch.zeros(1, device=device).cpu()  # fails if torch cannot use the device
    except (RuntimeError, AssertionError, ImportError) as error:  # depends on the backend
        reason = re.split(r"\.\s|\n", str(error).strip())[0]
        raise ValueError(
            f"device={name!r} cannot be used here ({reason}); choose cpu, or omit the device to "
            "use the available accelerator"
        ) from None
    return device
