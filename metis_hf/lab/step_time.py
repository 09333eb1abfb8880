"""The time of a training step on a named device, about: measured steps, scaled by size.

A step without quantizers is FLOPs over the rate that models of its width reach. Quantizers add to
each layer and micro-batch, in forward and backward pass together: on a GPU at least the time that
Python takes to start their operations, unless the step is recorded as a CUDA graph. What was
measured is predicted within a third (tests/lab/test_step_time.py); other sizes and schemes can be
off by a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from metis_hf.conversion.convert import metis_layers
from metis_hf.lab.rank_memory import Workload
from metis_hf.operands import IDENTITY, Hadamard
from metis_hf.schemes import Role, Scheme

DAY = 86_400.0
WEEK = 7 * DAY
RECORDED, PYTHON = "recorded", "by Python"  # CUDA graphs play a step, or Python starts it


@dataclass(frozen=True)
class Added:
    """Milliseconds that quantizers add to a layer and micro-batch, forward and backward."""

    python: float  # at least so many where Python starts the operations
    floor: float  # at least so many in any case
    per_million: float  # elements of the layer's input, output and weight


@dataclass(frozen=True)
class Device:
    """A device and its calibration.

    Attributes:
        name: as in a sentence.
        memory: GiB that a process can have; None: not known.
        rates: width of a model -> FLOP/s of its steps without quantizers, optimizer included.
        added: by the scheme that was measured; see `timed_as`.
        source: where the numbers are from.
    """

    name: str
    memory: float | None
    rates: Mapping[int, float]
    added: Mapping[str, Added]
    source: str

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which a step can be started, the faster one first."""
        return (RECORDED, PYTHON) if any(each.python for each in self.added.values()) else (PYTHON,)

    @property
    def titles(self) -> list[str]:
        """Titles for times in the ways: "time" where there is only one."""
        return list(self.ways) if len(self.ways) > 1 else ["time"]


# Width 768: the steps of GPT-2 130M in benchmarks/gpu-nvidia-h200.md. What quantizers add for each
# million elements is from there to one layer of 4096 x 4096 with 16,384 tokens, and the rate of
# width 4096 is of Llama-3 8B with activation checkpointing; both were measured by hand at commit
# 431dd60.
_H200 = Device(
    name="H200",
    memory=139.8,
    rates={768: 181e12, 4096: 506e12},
    added={
        "nvfp4": Added(python=2.0, floor=0.5, per_million=0.0006),
        "nvidia": Added(python=3.0, floor=0.54, per_million=0.0153),
        "metis": Added(python=15.3, floor=2.26, per_million=0.0199),
    },
    source="scaled from steps measured on an H200 (benchmarks/gpu-nvidia-h200.md), GEMMs in BF16",
)
_BANDWIDTH = 4.8 / 3.35  # TB/s of an H200 and an H100 SXM; both multiply BF16 at 989 TFLOP/s
DEVICES = {
    "h100": replace(
        _H200,
        name="H100",
        memory=79.6,
        added={
            name: replace(each, per_million=_BANDWIDTH * each.per_million)
            for name, each in _H200.added.items()
        },
        source="no step was measured on an H100: an H200's, with quantizers slower by the peaks of "
        "their memories (4.8 and 3.35 TB/s), GEMMs in BF16",
    ),
    "h200": _H200,
    # Rates: the tiny model of eval/results/methods-tiny.json; Llama 60M and GPT-2 130M in
    # benchmarks/results/step.json. Added: Llama 60M, and the layer of width 64 in layer.json.
    "cpu": Device(
        name="CPU of two cores",
        memory=None,
        rates={96: 51e9, 512: 162e9, 768: 128e9},
        added={
            "nvfp4": Added(python=0.0, floor=1.3, per_million=2.0),
            "nvidia": Added(python=0.0, floor=1.7, per_million=3.0),
            "metis": Added(python=0.0, floor=5.1, per_million=6.7),
        },
        source="scaled from steps measured on two cores with AVX-512 "
        "(benchmarks/results/step.json), GEMMs in FP32",
    ),
}


def timed_as(scheme: Scheme) -> str | None:
    """Name the measured scheme whose time a scheme is given; None: it quantizes nothing.

    NVFP4 as it is counts as `nvfp4`, with 16-wide Hadamard matrices as `nvidia`; all else as
    `metis`, the slowest that was measured.
    """
    operands = [o for role in Role if (o := scheme.operand(role)) is not None and o.quantizer]
    if not operands:
        return None
    formats = {o.quantizer.fmt.name for o in operands if o.quantizer}
    rotated = {type(o.conditioner) for o in operands if o.conditioner != IDENTITY}
    if scheme.weight.is_split or formats != {"nvfp4"} or rotated - {Hadamard}:
        return "metis"
    return "nvidia" if rotated else "nvfp4"


def step_seconds(
    model: PreTrainedModel, flops: Mapping[str, float], load: Workload, device: Device
) -> dict[str, float]:
    """Return the seconds of an optimizer step by the way in which it is started.

    Communication between processes, data and evaluation are not counted. Schemes whose state
    changes with each step are not recorded. In several processes a recording computes the forward
    pass twice, as under FSDP2 (`training.block_graphs`).

    Args:
        model: the converted model, maybe without values.
        flops: of a step over all processes, as `training_plan.step_flops` counts them.
        load: what is trained.
        device: one of `DEVICES`.
    """
    layers = list(metis_layers(model))
    rate = _interpolate(device.rates, model.config.hidden_size)
    dense = sum(flops.values()) / load.world_size / rate
    again = 1.5 if load.checkpointing else 1.0  # quantizers of the forward pass run twice
    tokens = load.device_batch * load.sequence_length
    added = dict.fromkeys(device.ways, 0.0)
    kinds: dict[Scheme, str | None] = {}
    for _, layer in layers:
        if layer.scheme not in kinds:
            kinds[layer.scheme] = timed_as(layer.scheme)
        if (kind := kinds[layer.scheme]) is None:
            continue
        i, o, each = layer.in_features, layer.out_features, device.added[kind]
        least = each.floor + each.per_million * (tokens * (i + o) + i * o) / 1e6
        for way in added:
            added[way] += max(least, each.python) if way == PYTHON else least
    states = (x.scheme.state for _, x in layers if x.state_names)
    if any(state and not state.can_be_recorded for state in states):
        added = {PYTHON: added[PYTHON]}
    seconds = {way: dense + again * load.accumulation * ms / 1e3 for way, ms in added.items()}
    if RECORDED in seconds and load.world_size > 1 and not load.checkpointing:
        seconds[RECORDED] = dense * 4 / 3 + 1.5 * load.accumulation * added[RECORDED] / 1e3
    return seconds


def _interpolate(rates: Mapping[int, float], width: int) -> float:
    """Return the rate at a width: a straight line between logarithms, constant beyond the ends."""
    widths = sorted(rates)
    if width <= widths[0] or width >= widths[-1]:
        return rates[widths[0] if width <= widths[0] else widths[-1]]
    upper = next(w for w in widths if w >= width)
    lower = widths[widths.index(upper) - 1]
    share = math.log(width / lower) / math.log(upper / lower)
    return rates[lower] ** (1 - share) * rates[upper] ** share


def device_for(cpu_seconds: float) -> str:
    """Return this machine's entry of `DEVICES`; an H200's for what its CPU takes over a day for."""
    if not torch.cuda.is_available():
        return "cpu" if cpu_seconds <= DAY else "h200"
    return "h100" if "H100" in torch.cuda.get_device_name() else "h200"


def about(seconds: float) -> str:
    """Return a time in at most two digits, in minutes, hours or days: "1.4 h", "1,600 days"."""
    if math.isnan(seconds):
        return "not known"
    if seconds < 100 * 60:
        value, unit = max(1.0, seconds / 60), "min"
    elif seconds < 2 * DAY:
        value, unit = seconds / 3600, "h"
    else:
        value, unit = seconds / DAY, "days"
    return f"{float(f'{value:.2g}'):,g} {unit}"
