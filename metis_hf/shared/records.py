"""Records of experiments: JSON files written atomically, and the environment of a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import torch

from metis_hf.shared.devices import device_of
from metis_hf.shared.texts import bounded

LARGEST_JSON = 1 << 26  # bytes; the largest JSON files are tokenizers, about half of this
SETTINGS_FILE = "settings.json"
PACKAGES = ("metis-hf", "torch", "transformers", "accelerate", "datasets", "lm_eval")


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file under a temporary name, then rename it."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process; links are not followed
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def give_usual_modes(directory: Path) -> None:
    """Add the umask's default permissions to the files under a directory.

    Libraries that write to temporary files leave them readable only by their owner (safetensors
    0.8).
    """
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode | path.stat().st_mode & 0o777)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    # A lone surrogate, as in a file name that is not UTF-8, becomes a JSON escape.
    content = text.encode(errors="backslashreplace")
    write_atomically(path, lambda file: file.write(content))


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: the file is truncated or otherwise not JSON, too large, or nested too deeply;
            the message names it.
    """
    bounded(path, LARGEST_JSON)
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:  # not UTF-8, not JSON, or an integer of thousands of digits
        raise ValueError(f"{path} is not a valid JSON file ({error})") from None
    except RecursionError:
        raise ValueError(f"{path} is JSON that is nested too deeply") from None


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one flat dict, with keys like "training.max_steps"."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def bf16_units(device: torch.device | None = None) -> bool:
    """Return whether a device multiplies bf16 natively; otherwise bf16 is slower than fp32.

    Without a device, it answers for the machine's accelerator, or its CPU.
    """
    kind = (device or device_of(None)).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if kind != "cpu":
        return True
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def device_name(device: torch.device | None = None) -> str:
    """Return the name of a device, by default of the machine's accelerator, or its CPU."""
    device = device or device_of(None)
    if device.type == "cpu":
        units = "with" if bf16_units(device) else "without"
        return f"{platform.machine()} CPU {units} bf16 units, {torch.get_num_threads()} threads"
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named else f"{platform.machine()} {device.type}"


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return versions, device (see `device_name`) and commit."""
    return {
        "versions": package_versions(),
        "python": platform.python_version(),
        "device": device_name(device),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this package's checkout, or None if git does not track this file."""
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    return _git("rev-parse", "--short", "HEAD") if tracked else None


def _git(*arguments: str) -> str | None:
    """Run git in this file's directory; return None if it fails or prints nothing."""
    command = ["git", *arguments]
    try:
        git = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:  # no git
        return None
    return git.stdout.strip() or None if git.returncode == 0 else None
