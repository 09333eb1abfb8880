"""One training run as its records tell it: what `read` fills in and the pages show."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metis_hf.config import MetisConfig
from metis_hf.lab.run_report.checks import evaluation_losses
from metis_hf.schemes import CONTROL, Role, build_scheme
from metis_hf.training.gradient_noise import GradientNoise, noise_ratios
from metis_hf.training.health import nonfinite_layers

_RATE_ERROR = 0.5e-3  # steps a second
LayerStats = dict[str, dict[str, dict[str, float]]]  # layer -> tensor -> statistic -> value


@dataclass
class RunRecord:
    """One run as its files tell it.

    Attributes:
        path: its directory.
        name: what a picture calls it: the scheme, or the directory where no config was found.
        config: its MetisConfig as a dict; empty where none was found.
        summary: the conversion report as text.
        conversion: the conversion report as data (`ConversionReport.to_dict`).
        environment: versions and device.
        model: class of the model.
        history: one log entry with a loss for each logged step, ascending.
        evaluations: log entries with evaluation losses, one for each step, ascending.
        layers: measured step -> statistics of each layer.
        noise: measured step -> layer -> norms of the weight gradient and of the noise in it.
        refreshes: step -> layer -> "before" and "after" -> statistic -> value; nothing of a layer
            where health was not measured.
        switches: step -> what the precision was switched to.
        max_steps: that the run was to make; None where unknown.
        tokens: seen in training; None where unknown.
        runtime: seconds of the last call of Trainer; None where unknown.
        rate: steps a second of that call, of a resumed run those after the resume.
        ended: step that it ended at; None where unknown.
        notes: what was wrong with the files.
    """

    path: Path
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: str = ""
    conversion: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    layers: dict[int, LayerStats] = field(default_factory=dict)
    noise: dict[int, dict[str, GradientNoise]] = field(default_factory=dict)
    refreshes: dict[int, LayerStats] = field(default_factory=dict)
    switches: dict[int, dict[str, Any]] = field(default_factory=dict)
    max_steps: int | None = None
    tokens: int | None = None
    runtime: float | None = None
    rate: float | None = None
    ended: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step of which anything is known."""
        logged = [int(entry["step"]) for entry in (*self.history, *self.evaluations)]
        recorded = (*self.layers, *self.noise, *self.refreshes, *self.switches)
        return max([*logged, *recorded, self.ended or 0])

    @property
    def quantized(self) -> bool:
        """Return whether any tensor was measured on its way through a quantizer.

        Where none was measured, or all had NaN or inf, which have no SQNR, the config says.
        """
        measured = [
            stats
            for layers in self.layers.values()
            for tensors in layers.values()
            for stats in tensors.values()
        ]
        if all(stats.get("nonfinite") for stats in measured):
            return _quantizes(self.config)
        return any("sqnr_db" in stats for stats in measured)

    @property
    def fp4_share(self) -> float | None:
        """Share of the GEMM FLOPs in converted layers, 0 to 1; 0 where none is quantized."""
        if not self.quantized:
            return 0.0
        share = self.conversion.get("flops_share")
        return float(share) if isinstance(share, int | float) else None

    @property
    def seconds_per_step(self) -> float | None:
        """Return the median over steps that were not measured, else the mean of the last call."""
        timed = [entry for entry in self.history if "step_seconds" in entry]
        normal = [e["step_seconds"] for e in timed if "metis/nonfinite_tensors" not in e]
        if timed:
            return statistics.median(normal or [e["step_seconds"] for e in timed])
        if not (self.runtime and self.rate and self.ended):
            return None
        # Trainer rounds the rate to 0.001: a call that may have made all steps has made them.
        resumed = self.ended - self.runtime * self.rate > _RATE_ERROR * self.runtime
        return 1 / self.rate if resumed else self.runtime / self.ended

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of one figure of the log, where it was logged."""
        entries = [entry for entry in self.history if entry.get(name) is not None]
        return [int(e["step"]) for e in entries], [float(e[name]) for e in entries]

    def evaluation_series(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return (steps, losses) by the name of the evaluation set, "" where there is one alone."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for entry in self.evaluations:
            for name, key in evaluation_losses(entry).items():
                steps, losses = found.setdefault(name, ([], []))
                steps.append(int(entry["step"]))
                losses.append(float(entry[key]))
        return found

    def noise_series(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return (steps, |G| / (sqrt(3) noise)) for "all" layers together, then for each group."""
        found: dict[str, tuple[list[int], list[float]]] = {"all": ([], [])}
        order = {
            name: place for layers in self.layers.values() for place, name in enumerate(layers)
        }
        for step, per_layer in self.noise.items():
            by_place = sorted(per_layer, key=lambda name: order.get(name, 0))
            for key, value in noise_ratios({name: per_layer[name] for name in by_place}).items():
                group = key.removeprefix("noise/").removesuffix("ratio").removesuffix("/")
                steps, values = found.setdefault(group or "all", ([], []))
                steps.append(step)
                values.append(value)
        return found if found["all"][0] else {}


def events(run: RunRecord) -> list[tuple[int, str, str]]:
    """Return (step, what, details) of everything out of the ordinary, by step."""
    found: list[tuple[int, str, str]] = []
    for entry in run.history:
        for name in ("loss", "grad_norm"):
            value = entry.get(name)
            if value is not None and not math.isfinite(value):
                found.append((int(entry["step"]), "not finite", f"{name} is {value}"))
    for entry in run.evaluations:
        for name in evaluation_losses(entry).values():
            if not math.isfinite(entry[name]):
                found.append((int(entry["step"]), "not finite", f"{name} is {entry[name]}"))
    for step, layers in run.layers.items():
        bad = nonfinite_layers(layers)
        if bad:
            shown = ", ".join(bad[:6]) + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
            found.append((step, "not finite", f"NaN or inf in {shown} (likely origin first)"))
    for step, layers in run.refreshes.items():
        found.append((step, "refresh", f"{len(layers)} weights decomposed again"))
    for step, switch in run.switches.items():
        passes = switch.get("high_precision") or []
        how = "all passes in FP4"
        if switch.get("scheme") == CONTROL:
            how = "nothing is quantized"
        elif passes:
            how = f"high precision in the {' and '.join(passes)} pass"
        found.append((step, "switch", f"scheme {switch.get('scheme')}, {how}"))
    return sorted(found)


def _quantizes(config: dict[str, Any]) -> bool:
    """Return whether a config quantizes anything; True where it cannot be read."""
    try:
        scheme = build_scheme(MetisConfig.from_dict(config), 256, 256)
    except (TypeError, ValueError):
        return bool(config)
    return any(scheme.resolve(role)[1].quantizer is not None for role in Role)
