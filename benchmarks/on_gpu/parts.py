"""The parts that measure what exists: kernels, layers, training steps, fidelity, native GEMMs.

A part imports what it needs when it runs, so that a package that is missing fails that part alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import Row, interleave, summary
from torch import Tensor

from on_gpu.context import Context
from on_gpu.machine import FP4_CAPABILITIES
from on_gpu.record import FAILURES, Item, Skipped, free_memory

TOKENS = 8192  # of a layer's input
KERNEL_SHAPES = [(16384, 8192), (8192, 4096)]
QUICK_KERNEL_SHAPES = [(256, 256)]
DIRECTIONS = 46  # of an input of width 768 under `metis`
LARGE_LAYERS = [(TOKENS, 4096, 4096), (2 * TOKENS, 4096, 4096)]
MODEL_SIZES = ("130m", "1b1")  # whose layers are timed, names in metis_hf.experiments.sizes
STEP_SIZE, STEP_BATCHES = "130m", (16, 8, 4)  # sequences of a step, the first that fits
FIDELITY_SCHEMES = ("metis", "nvfp4-rne", "nvidia", "quartet2", "four-over-six")
# docs/native.md: each quantizes along the dimension that is contracted, or is made to.
NATIVE_SCHEMES = ("nvfp4-rne", "nvidia", "quartet2", "four-over-six", "mxfp4", "metis")
Case = tuple[Row, Callable[[], object]]
_BURST = 10e-3  # seconds: as many calls in a row hide what Python takes before each


# --- kernels --------------------------------------------------------------------------------------


def kernels(context: Context) -> Iterator[Item]:
    import quantizers

    names = list(quantizers.QUANTIZERS)[: 3 if context.quick else None]
    for dtype in quantizers.DTYPES:
        yield Item(f"bits, {_name(dtype)}", partial(equal_bits, names, dtype, context.device))
    for shape in QUICK_KERNEL_SHAPES if context.quick else KERNEL_SHAPES:
        for dtype in quantizers.DTYPES:
            key = f"{shape[0]} x {shape[1]}, {_name(dtype)}"
            yield Item(key, partial(bandwidth, names, shape, dtype, context))
    shape = QUICK_KERNEL_SHAPES[0] if context.quick else (2 * TOKENS, 3072)
    yield Item("around GEMMs", partial(around_gemms, shape, context))


def hard_tensors() -> dict[str, Tensor]:
    """Tensors on which kernels differ if they differ anywhere, fp32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(512, 768, generator=generator)
    exponents = torch.rand(512, 1, generator=generator) * 80 - 40
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(64, 12)
    return {
        "normal": normal,
        "rows from 2^-40 to 2^40": normal * torch.exp2(exponents),
        "ties": torch.where(normal[:64, :96] < 0, -ties, ties),
        "subnormal": normal[:64] * 1e-40,
        "zeros": torch.zeros(32, 32),
        "33 x 48": normal[:33, :48].contiguous(),
    }


def equal_bits(names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Row:
    """Whether all kernels here give the bits that the reference gives on the CPU."""
    import quantizers

    rows: list[Row] = []
    wrong: list[str] = []
    pairs = [
        (n, k) for n in names for k in quantizers.available(device) if quantizers.covered(n, k)
    ]
    with torch.no_grad():
        for name, kernel in pairs:
            differing = {}
            try:
                for title, values in hard_tensors().items():
                    x = values.to(dtype)
                    wanted = quantizers.ours(x, name, "reference")()
                    found = quantizers.ours(x.to(device), name, kernel)().cpu()
                    differing[title] = int((_bits(found) != _bits(wanted)).sum())
            except Exception as error:  # the others go on
                wrong.append(f"{name}, {kernel}: {_text(error)}")
                continue
            different = {title: count for title, count in differing.items() if count}
            rows.append({"name": name, "kernels": kernel, "differing": different})
            if different:
                where = ", ".join(f"{count} of {title}" for title, count in different.items())
                bits = "elements with other bits than the CPU's reference"
                wrong.append(f"{name}, {kernel}: {bits}: {where}")
    return {"rows": rows, "dtype": _name(dtype), FAILURES: wrong}


def bandwidth(
    names: Sequence[str], shape: tuple[int, int], dtype: torch.dtype, context: Context
) -> Row:
    """Times of quantizers over a copy's, and the rate at which x is read and written once."""
    import quantizers

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(context.device, dtype)
    return over_copy(x, quantizers.own_cases(x, names, quantizers.available(x.device)), context)


def around_gemms(shape: tuple[int, int], context: Context) -> Row:
    """Times of what a layer does to x before and after its GEMMs, but for quantizing."""
    import quantizers

    from metis_hf.noise import Key
    from metis_hf.numerics.kernels import use_kernels
    from metis_hf.numerics.kernels.epilogue import finish_product
    from metis_hf.transforms.products import thin_product
    from metis_hf.transforms.spectral import sum_rows

    device, generator = context.device, torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
    scale, bias = torch.ones((), device=device), torch.zeros(shape[1], device=device)
    directions = torch.randn(shape[1], DIRECTIONS, generator=generator).to(device)
    key = Key(3, torch.ones((), dtype=torch.int32, device=device))
    calls: dict[str, Callable[[], object]] = {
        "outer scale": lambda: finish_product(x, [scale]),
        "bias": lambda: finish_product(x, [], bias),
        "outer scale and bias": lambda: finish_product(x, [scale], bias),
        "sums of rows": lambda: sum_rows(x, max(2, shape[0] // 64), key),
        f"projection on {DIRECTIONS} directions": lambda: thin_product(x, directions),
    }

    def run(call: Callable[[], object], kernels: str) -> None:
        with use_kernels(kernels):
            call()

    chosen = [name for name in quantizers.available(device) if name != "compiled"]
    cases = [
        ({"name": name, "kernels": kernels, "dtype": "bfloat16"}, partial(run, call, kernels))
        for name, call in calls.items()
        for kernels in chosen
    ]
    return over_copy(x, cases, context)


def over_copy(
    x: Tensor, cases: Sequence[tuple[Row, Callable[[], object]]], context: Context
) -> Row:
    """Times of some calls that read x, over those of its copy."""
    device, target = context.device, torch.empty_like(x)
    row = {"name": "copy", "kernels": "torch", "dtype": _name(x.dtype)}
    everything = [(row, lambda: target.copy_(x)), *cases]
    kept, calls, lengths = [], [], []
    without: list[Row] = []
    wrong: list[str] = []
    with torch.no_grad():
        for row, call in everything:
            try:
                first, length = _first_calls(call, device)
            except torch.OutOfMemoryError:
                without.append({**row, "reason": "memory is too small"})
                free_memory()
                continue
            except Exception as error:  # the others go on
                wrong.append(f"{row['name']}, {row['kernels']}: {_text(error)}")
                continue
            kept.append({**row, "shape": list(x.shape), "first_call_s": first})
            calls.append(partial(_repeat, call, length))
            lengths.append(length)
        times = interleave(calls, context.rounds, budget=context.budget, device=device, cold=True)
    each = [[seconds / n for seconds in found] for found, n in zip(times, lengths)]
    for row, found in zip(kept, each):
        row |= summary(found, each[0])
        row["gb_per_s"] = 2 * x.nbytes / (row["ms"] / 1e3) / 1e9
    return {"rows": kept, "without": without, FAILURES: wrong}


def _text(error: Exception) -> str:
    """The kind and the text of an error, and of what caused it."""
    causes = [error, *filter(None, [error.__cause__])]
    return "; from ".join(f"{type(one).__name__}: {one}" for one in causes)


def _first_calls(call: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """(seconds of the first call, calls of a burst)."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return times[0], max(1, min(100, int(_BURST / times[1]))) if device.type == "cuda" else 1


def _repeat(call: Callable[[], object], length: int) -> None:
    for _ in range(length):
        call()


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[1]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- layers and steps -----------------------------------------------------------------------------


def layers(context: Context) -> Iterator[Item]:
    """Each shape with the fastest kernels first, so that a short call ends with those of all."""
    import layer
    import quantizers

    fastest, *others = reversed(quantizers.available(context.device))
    shapes = layer_shapes(context.quick)
    for kernels in (fastest, *others):
        # The reference is slow, and the same everywhere: one shape is enough.
        for title, shape in shapes[:1] if kernels == "reference" and others else shapes:
            measure = partial(
                layer.measure, shape, context.rounds, context.budget, context.device, None,
                [kernels], other_dtype=kernels == fastest,
            )  # fmt: skip
            key = f"{title}{' x '.join(map(str, shape))}, {kernels}"
            yield Item(key, lambda run=measure: {"rows": run()})


def layer_shapes(quick: bool) -> list[tuple[str, tuple[int, int, int]]]:
    """(model, (tokens, in_features, out_features)) of each layer that is timed."""
    from metis_hf.experiments.sizes import SIZES

    if quick:
        return [("", (128, 64, 64))]
    found = [("", shape) for shape in LARGE_LAYERS]
    for size in MODEL_SIZES:
        width = SIZES[size].config["n_embd"]
        for inputs, outputs in ((1, 3), (1, 4), (4, 1)):  # q, k and v; the two of the MLP
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
    from metis_hf.experiments.sizes import SIZES

    size = SIZES[STEP_SIZE]
    config = partial(transformers.AutoConfig.for_model, size.model_type, **size.config)
    shapes = [step.Shape(config, batch, size.sequence_length) for batch in STEP_BATCHES]
    yield Item(f"GPT-2 {STEP_SIZE}", partial(_steps, f"GPT-2 {STEP_SIZE}", shapes, context))


def _steps(name: str, shapes: Sequence[Any], context: Context) -> Row:
    """Rows of the first shape that fits into memory; the last one's error where none does."""
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
        raise Skipped("no model was given: --model DIR --text FILE")
    for scheme in FIDELITY_SCHEMES[: 1 if context.quick else None]:
        yield Item(scheme, partial(_fidelity, scheme, context))


def _fidelity(scheme: str, context: Context) -> Row:
    from metis_hf.fidelity.run import Settings
    from metis_hf.fidelity.run import fidelity as measure

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
    """GEMMs by the GPU's FP4 units, against emulated ones and nn.Linear."""
    obstacle = native_obstacle(context.device)
    if obstacle is not None:
        raise Skipped(obstacle)
    for _, shape in layer_shapes(context.quick)[:1]:
        yield Item(" x ".join(map(str, shape)), partial(native_layers, shape, context))


def native_obstacle(device: torch.device) -> str | None:
    """Why FP4 units cannot be measured here; None if they can."""
    if device.type != "cuda":
        return f"a {device.type} has no FP4 units"
    capability = torch.cuda.get_device_capability(device)
    if capability not in FP4_CAPABILITIES:
        needed = ", ".join(f"{major}.{minor}" for major, minor in FP4_CAPABILITIES)
        return (
            f"this GPU has no FP4 units: its compute capability is {capability[0]}.{capability[1]}"
            f", and they are in {needed}"
        )
    from metis_hf.numerics.native import obstacle_of_device

    return obstacle_of_device(device, "nvfp4")  # of torch, where the GPU has them


def native_layers(shape: tuple[int, int, int], context: Context) -> Row:
    """Steps of a layer with native and emulated GEMMs, in bf16, over nn.Linear's."""
    import layer

    from metis_hf import MetisConfig
    from metis_hf.layers.make import convert_linear

    tokens, inputs, outputs = shape
    device, low = context.device, torch.bfloat16
    x = layer.realistic(tokens, inputs, 0, device).to(low)
    dy = (layer.realistic(tokens, outputs, 1, device) * 1e-3).to(low)

    def linear() -> torch.nn.Linear:
        torch.manual_seed(0)
        return torch.nn.Linear(inputs, outputs, bias=False)

    found = [({"name": layer.NN_LINEAR}, layer.step_of(linear().to(device, low), x, dy, None))]
    without: list[Row] = []
    wrong: list[str] = []
    for scheme in NATIVE_SCHEMES:
        for backend in ("emulated", "native"):
            row = {"name": scheme, "backend": backend}
            options: dict[str, Any] = {
                "scheme": scheme, "backend": backend, "operand_mode": "contraction"
            }  # fmt: skip
            try:
                module = convert_linear(linear(), MetisConfig(**options), name="layer").train()
                call = layer.step_of(module.to(device, low), x, dy, None)
                call()
            except (ValueError, NotImplementedError) as error:  # what cannot run so says so
                without.append({**row, "reason": str(error)})
            except Exception as error:  # the others go on
                wrong.append(f"{scheme}, {backend}: {_text(error)}")
            else:
                found.append((row, call))
    calls = [call for _, call in found]
    times = interleave(calls, context.rounds, budget=context.budget, device=device)
    rows = [
        {**row, "shape": list(shape), **summary(seconds, times[0])}
        for (row, _), seconds in zip(found, times)
    ]
    return {"rows": rows, "without": without, FAILURES: wrong}
