"""The models that a command evaluates: checkpoints, converted dense models, the control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from metis_hf.config import MetisConfig
from metis_hf.conversion.hub import read_config
from metis_hf.lab.checkpoint import DENSE, Checkpoint
from metis_hf.lab.evaluate.table import row_name
from metis_hf.lab.model_source import open_checkpoints, open_model
from metis_hf.shared.records import read_json


def read_conversions(schemes: Sequence[str], file: Path | None) -> tuple[MetisConfig, ...]:
    """Return one config for each conversion that `--scheme` and `--config` ask for.

    Args:
        schemes: names, each combined with the rest of the config. Empty: the config's own scheme.
        file: JSON of a MetisConfig, or the config.json of a checkpoint that has one.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not JSON of a MetisConfig, or a scheme is named twice.
    """
    twice = sorted({name for name in schemes if list(schemes).count(name) > 1})
    if twice:
        raise ValueError(f"scheme named twice: {', '.join(twice)}")
    if file is None:
        return tuple(MetisConfig(scheme=name) for name in schemes)
    if not file.is_file():
        raise FileNotFoundError(f"config {file} is missing; give a JSON file of a MetisConfig")
    values = read_json(file)
    try:
        if not isinstance(values, dict):
            raise ValueError("expected a JSON object of MetisConfig's fields")
        config = read_config(values.get("quantization_config", values))
    except ValueError as error:
        raise ValueError(f"config {file}: {error}") from None
    return tuple(config.replace(scheme=name) for name in schemes) or (config,)


def choose_models(
    names: Sequence[str | Path],
    conversions: Sequence[MetisConfig] = (),
    *,
    precision: str = "scheme",
    control: str | None = None,
) -> tuple[list[Checkpoint], str | None]:
    """Open the checkpoints to evaluate, dense ones once per conversion.

    Args:
        names: checkpoints, runs, or hub names.
        conversions: configs for dense checkpoints; other checkpoints are not converted.
        precision: "scheme": the conversions alone, "dense": the dense models alone, or "both".
        control: the row that differences are relative to: its name, its checkpoint's label, or
            another checkpoint. A dense control also gets a row without conversion.

    Returns:
        The checkpoints in the order of the table, and the control as a label or a row's name.
    """
    found = open_checkpoints(names)
    if conversions and all(one.scheme != DENSE for one in found):
        shown = ", ".join(f"{one.label} ({one.scheme})" for one in found)
        raise ValueError(
            f"--scheme and --config convert dense models, but none was given: {shown}; omit "
            "these options, or export a checkpoint to dense weights first"
        )
    if control is None:
        return _converted(found, conversions, precision), None
    if Path(control).is_dir():
        place = open_model(control).place.resolve()
        if place not in [one.place.resolve() for one in found]:
            *found, own = open_checkpoints([*names, control])
            return [*_converted(found, conversions, precision), own], own.label
        control = next(one.label for one in found if one.place.resolve() == place)
    chosen = _converted(found, conversions, precision)
    rows = [
        row_name(one.label, one.scheme, each, converted=one.conversion is not None)
        for one in chosen
        for each in one.precisions(precision)
    ]
    if control in rows:
        return chosen, control
    named = next((one for one in found if one.label == control), None)
    if named is not None:
        missing = named.scheme == DENSE and named not in chosen  # converted only
        return [named, *chosen] if missing else chosen, control
    try:
        own = open_model(control)
    except FileNotFoundError as error:
        raise ValueError(
            f"control={control!r} is neither a row ({', '.join(rows)}) nor another model: {error}"
        ) from None
    return [*chosen, own], own.label


def _converted(
    found: Sequence[Checkpoint], conversions: Sequence[MetisConfig], precision: str
) -> list[Checkpoint]:
    chosen = []
    for one in found:
        dense = one.scheme == DENSE and bool(conversions)
        if not dense or precision != "scheme":
            chosen.append(one)
        if dense and precision != "dense":
            chosen += [replace(one, conversion=config) for config in conversions]
    return chosen
