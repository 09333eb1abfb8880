"""The parts for layers, training steps, fidelity and native GEMMs.

Imports are inside functions, so that a missing package fails only the part that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import Row, interleave, summary

from on_gpu.context import TOKENS, Context
from on_gpu.machine import FP4_CAPABILITIES
from on_gpu.record import FAILURES, Item, Skipped, free_memory, text_of

LARGE_LAYERS = [(TOKENS, 4096, 4096), (2 * TOKENS, 4096, 4096)]
PEER_LAYERS = [(2 * TOKENS, 4096, 4096), (2 * TOKENS, 768, 3072)]
QUICK_LAYERS = [(128, 64, 64)]
MODEL_SIZES = ("130m", "1b1")  # models whose layers are timed: metis_hf.lab.compare.sizes
STEP_SIZE, STEP_BATCHES = "130m", (16, 8, 4)  # sequences of a step; the first that fits counts
FIDELITY_SCHEMES = ("metis", "nvfp4-rne", "nvidia", "quartet2", "four-over-six")
# docs/native.md: these quantize along the contracted dimension, if need be in contraction mode.
NATIVE_SCHEMES = ("nvfp4-rne", "nvidia", "quartet2", "four-over-six", "mxfp4", "metis")


# --- layers and steps -----------------------------------------------------------------------------


def layers(context: Context) -> Iterator[Item]:
    """Yield all shapes with the fastest kernels first, in case the time is short.

    Layers of other libraries come after these.
    """
    import layer
    import quantizers

    fastest, *others = reversed(quantizers.available(context.device))
    shapes = layer_shapes(context.quick)
    for kernels in (fastest, *others):
        # The reference is slow, so one shape must do.
        for title, shape in shapes[:1] if kernels == "reference" and others else shapes:
            measure = partial(
                layer.measure, shape, context.rounds, context.budget, context.device, None,
                [kernels], other_dtype=kernels == fastest,
            )  # fmt: skip
            key = f"{title}{' x '.join(map(str, shape))}, {kernels}"
            yield Item(key, lambda run=measure: {"rows": run()})
        if kernels == fastest and context.peers is not None:
            for shape in QUICK_LAYERS if context.quick else PEER_LAYERS:
                measure = partial(
                    layer.measure_peers, shape, context.rounds, context.budget, context.device,
                    context.peers,
                )  # fmt: skip
                yield Item(f"{' x '.join(map(str, shape))}, peers", measure)


def layer_shapes(quick: bool) -> list[tuple[str, tuple[int, int, int]]]:
    """Return (model, (tokens, in_features, out_features)) of each layer to time."""
    from metis_hf.lab.compare.sizes import SIZES

    if quick:
        return [("", shape) for shape in QUICK_LAYERS]
    found = [("", shape) for shape in LARGE_LAYERS]
    for size in MODEL_SIZES:
        width = SIZES[size].config["n_embd"]
        for inputs, outputs in ((1, 3), (1, 4), (4, 1)):  # fused q, k, v; both layers of the MLP
            found.append((f"{size}, ", (TOKENS, inputs * width, outputs * width)))
    return found


def steps(context: Context) -> Iterator[Item]:
    import step
    import transformers

    transformers.utils.logging.set_verbosity_error()
    if context.quick:
        for name, shape in step.QUICK_SHAPES.items():
            yield Item(name, partial(_steps, name, [shape], context))
        return
    from metis_hf.lab.compare.sizes import SIZES

    size = SIZES[STEP_SIZE]
    config = partial(transformers.AutoConfig.for_model, size.model_type, **size.config)
    shapes = [step.Shape(config, batch, size.sequence_length) for batch in STEP_BATCHES]
    yield Item(f"GPT-2 {STEP_SIZE}", partial(_steps, f"GPT-2 {STEP_SIZE}", shapes, context))


def _steps(name: str, shapes: Sequence[Any], context: Context) -> Row:
    """Return the rows of the first shape that fits into memory, or raise the last one's error."""
    import step

    step.load_compiler(context.device)
    too_large = []
    for shape in shapes:
        try:
            rows = step.measure(name, shape, context.rounds, context.budget, context.device)
        except torch.OutOfMemoryError:
            if shape is shapes[-1]:
                raise
            too_large.append(shape.batch)
        else:
            return {"rows": rows, "too_large": too_large}
        free_memory()
    raise AssertionError("no shape was given")


# --- fidelity -------------------------------------------------------------------------------------


def fidelity(context: Context) -> Iterator[Item]:
    if context.model is None or context.text is None:
        raise Skipped("no model was given; pass --model DIR --text FILE")
    for scheme in FIDELITY_SCHEMES[: 1 if context.quick else None]:
        yield Item(scheme, partial(_fidelity, scheme, context))


def _fidelity(scheme: str, context: Context) -> Row:
    from metis_hf.lab.fidelity.measurements import fidelity as measure
    from metis_hf.lab.fidelity.settings import Settings

    assert context.model is not None
    assert context.text is not None
    sizes = {"sequences": 3, "length": 32, "batch": 1} if context.quick else {}
    settings = Settings(
        model=context.model,
        text=context.text,
        schemes=(scheme,),
        alone=(),
        device=str(context.device),
        **sizes,
    )
    (found,) = measure(settings, context.work / "fidelity")
    if found.note:
        return {"scheme": scheme, "reason": found.note}
    estimates = {
        "loss_rise_percent": found.rise,
        "kl_nats": found.mean("kl"),
        "same_top_token": found.mean("top1"),
        "gradient_error": found.gradient("error"),
        "gradient_cosine": found.gradient("cosine"),
    }
    row = {name: [value.mean, value.se] for name, value in estimates.items()}
    return {
        "scheme": scheme,
        "model": Path(context.model).name,
        "extra_multiply_adds": found.cost,
        **row,
    }


# --- real FP4 GEMMs -------------------------------------------------------------------------------


def native(context: Context) -> Iterator[Item]:
    """Compare GEMMs on the GPU's FP4 units with emulated ones and nn.Linear."""
    obstacle = native_obstacle(context.device)
    if obstacle is not None:
        raise Skipped(obstacle)
    for _, shape in layer_shapes(context.quick)[:1]:
        yield Item(" x ".join(map(str, shape)), partial(native_layers, shape, context))


def native_obstacle(device: torch.device) -> str | None:
    """Return the reason why FP4 units cannot be measured here; None if they can."""
    if device.type != "cuda":
        return f"a {device.type} has no FP4 units"
    capability = torch.cuda.get_device_capability(device)
    if capability not in FP4_CAPABILITIES:
        needed = ", ".join(f"{major}.{minor}" for major, minor in FP4_CAPABILITIES)
        return (
            "this GPU has no FP4 units: its compute capability is "
            f"{capability[0]}.{capability[1]}, and FP4 units need {needed}"
        )
    from metis_hf.numerics.native import obstacle_of_device

    return obstacle_of_device(device, "nvfp4")  # torch may lack support for the GPU


def native_layers(shape: tuple[int, int, int], context: Context) -> Row:
    """Time a layer's step with native and emulated GEMMs, in bf16, relative to nn.Linear."""
    import layer

    from metis_hf import MetisConfig
    from metis_hf.layers.make import convert_linear

    tokens, inputs, outputs = shape
    device, low = context.device, torch.bfloat16
    x = layer.realistic(tokens, inputs, 0, device).to(low)
    dy = (layer.realistic(tokens, outputs, 1, device) * 1e-3).to(low)

    plain = layer.linear(inputs, outputs).to(device, low)
    found = [({"name": layer.NN_LINEAR}, layer.step_of(plain, x, dy, None))]
    without: list[Row] = []
    wrong: list[str] = []
    for scheme in NATIVE_SCHEMES:
        for backend in ("emulated", "native"):
            row = {"name": scheme, "backend": backend}
            options: dict[str, Any] = {
                "scheme": scheme, "backend": backend, "operand_mode": "contraction"
            }  # fmt: skip
            try:
                linear = layer.linear(inputs, outputs)
                module = convert_linear(linear, MetisConfig(**options), name="layer").train()
                call = layer.step_of(module.to(device, low), x, dy, None)
                call()
            except (ValueError, NotImplementedError) as error:  # refused combinations
                without.append({**row, "reason": str(error)})
            except Exception as error:  # continue with the other schemes
                wrong.append(f"{scheme}, {backend}: {text_of(error)}")
            else:
                found.append((row, call))
    calls = [call for _, call in found]
    times = interleave(calls, context.rounds, budget=context.budget, device=device)
    rows = [
        {**row, "shape": list(shape), **summary(seconds, times[0])}
        for (row, _), seconds in zip(found, times)
    ]
    return {"rows": rows, "without": without, FAILURES: wrong}
