"""The device that a command runs on."""

from __future__ import annotations

import re

import torch


def device_of(name: str | None) -> torch.device:
    """Return the device of a name; without one the machine's accelerator, else the CPU.

    Raises:
        ValueError: torch knows no such device, or this machine has none that torch can use.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # fails where torch knows of a device it cannot use
    except (RuntimeError, AssertionError, ImportError) as error:  # by backend
        reason = re.split(r"\.\s|\n", str(error).strip())[0]
        raise ValueError(
            f"device={name!r} cannot be used here ({reason}); choose cpu, or leave it out to take "
            "the accelerator that there is"
        ) from None
    return device
