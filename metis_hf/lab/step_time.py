"""Estimate the time of a training step on a named device by scaling measured steps.

A step without quantizers takes its FLOPs over the rate that models of its width reach. Quantizers
add time per layer and micro-batch, forward and backward together: on a GPU at least the time that
Python needs to launch their kernels, unless the step is recorded as a CUDA graph. The measured
steps are predicted within a third (tests/lab/test_step_time.py); other sizes and schemes can be off
by a factor of two.
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
RECORDED, PYTHON = "recorded", "by Python"  # a replayed CUDA graph, or Python launches kernels


@dataclass(frozen=True)
class Added:
    """Milliseconds that quantizers add per layer and micro-batch, forward and backward."""

    python: float  # minimum where Python launches the kernels
    floor: float  # minimum in any case
    per_million: float  # per million elements of the layer's input, output and weight


@dataclass(frozen=True)
class Device:
    """A device and its calibration."""

    name: str  # to print
    memory: float | None  # GiB available to a process; None if unknown
    rates: Mapping[int, float]  # model width -> FLOP/s without quantizers, optimizer included
    added: Mapping[str, Added]  # measured scheme -> time that its quantizers add; see `timed_as`
    source: str  # of the numbers

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways to launch a step, the faster one first."""
        return (RECORDED, PYTHON) if any(each.python for each in self.added.values()) else (PYTHON,)


# Width 768: the steps of GPT-2 130M in benchmarks/gpu-nvidia-h200.md. `per_million` is the slope
# from its layers to one layer of 4096 x 4096 with 16,384 tokens. The rate of width 4096 is from
# Llama-3 8B with activation checkpointing. That layer and Llama-3 were measured by hand at commit
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
        source="scaled from steps measured on an H200, since no step was measured on an H100, with "
        "quantizers slowed by the ratio of peak memory bandwidths (4.8 and 3.35 TB/s), GEMMs "
        "in BF16",
    ),
    "h200": _H200,
    # Rates: the tiny model of eval/results/methods-tiny.json; Llama 60M and GPT-2 130M in
    # benchmarks/results/step.json. Added: Llama 60M, and the layer of width 64 in layer.json.
    "cpu": Device(
        name="two-core CPU",
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
    """Return the measured scheme whose time is used for a scheme; None if it quantizes nothing.

    Plain NVFP4 counts as `nvfp4`, NVFP4 with 16-wide Hadamard matrices as `nvidia`, and everything
    else as `metis`, the slowest measured scheme.
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
    """Return way to launch -> seconds of an optimizer step.

    Communication between processes, data and evaluation are not counted. Steps of schemes whose
    state changes with each step cannot be recorded. With several processes a recorded step computes
    the forward pass twice, as under FSDP2 (`training.block_graphs`).

    The converted model may be on the meta device; `flops` is the result of
    `training_plan.step_flops`.
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
    """Return the rate at a width by log-log interpolation, constant beyond the ends."""
    widths = sorted(rates)
    if width <= widths[0] or width >= widths[-1]:
        return rates[widths[0] if width <= widths[0] else widths[-1]]
    upper = next(w for w in widths if w >= width)
    lower = widths[widths.index(upper) - 1]
    share = math.log(width / lower) / math.log(upper / lower)
    return rates[lower] ** (1 - share) * rates[upper] ** share


def device_for(cpu_seconds: float) -> str:
    """Return the key in `DEVICES` of the local device; "h200" if its CPU would take over a day."""
    if not torch.cuda.is_available():
        return "cpu" if cpu_seconds <= DAY else "h200"
    return "h100" if "H100" in torch.cuda.get_device_name() else "h200"


def about(seconds: float) -> str:
    """Format a time with two significant digits as minutes, hours or days, such as "1.4 h"."""
    if math.isnan(seconds):
        return "not known"
    if seconds < 100 * 60:
        value, unit = max(1.0, seconds / 60), "min"
    elif seconds < 2 * DAY:
        value, unit = seconds / 3600, "h"
    else:
        value, unit = seconds / DAY, "days"
    return f"{float(f'{value:.2g}'):,g} {unit}"
