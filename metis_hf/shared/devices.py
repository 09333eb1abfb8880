"""The device that a command runs on."""

from __future__ import annotations

import re

import torch

# Subspaces and rotations are made in fp64, and block scales round to float8_e4m3fn.
_LACKS = {"mps": "it has no fp64 and no float8"}


def lacks(device: torch.device) -> str | None:
    """Return the reason why a kind of device cannot compute schemes; None if there is none."""
    return _LACKS.get(device.type)


def device_of(name: str | None) -> torch.device:
    """Return the device of a name; without one the machine's accelerator, else the CPU.

    An accelerator that cannot compute schemes does not count.

    Raises:
        ValueError: torch knows no such device, this machine has none that torch can use, or it
            cannot compute schemes.
    """
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None or lacks(found) else found
    try:
        device = torch.device(name)
        if reason := lacks(device):
            raise RuntimeError(reason)
        torch.zeros(1, device=device).cpu()  # fails where torch knows of a device it cannot use
    except (RuntimeError, AssertionError, ImportError) as error:  # by backend
        reason = re.split(r"\.\s|\n", str(error).strip())[0]
        raise ValueError(
            f"device={name!r} cannot be used here ({reason}); choose cpu, or leave it out to take "
            "the accelerator that there is"
        ) from None
    return device
