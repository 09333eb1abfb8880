"""The formulation through Inductor: C++ with OpenMP on CPU, Triton on GPU.

Each variant is traced once with free sizes and compiled ahead of time, without Dynamo: a call
checks no guards, nothing is ever compiled again because a batch changed, and calls of several
threads do not meet. Compiled code is kept on disk (`kept`), from where a later process loads it in
hundredths of a second, once it has imported Inductor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics.kernels import byte_loads, formulation, kept, vector_units
from metis_hf.numerics.kernels.formulation import BLOCK, Noise, Specialization
from metis_hf.numerics.scaling import TRIED_SCALES

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Sizes that code is generated for; a call may have any. Large: small ones would give code
# without threads.
_ROWS, _COLUMNS = 4096, 64
_MAX_CACHED_KEYS = 4096
# On a GPU Inductor divides approximately and may flush subnormal numbers, unless it is told not to.
_EXACT = ("eager_numerics.division_rounding", "eager_numerics.disable_ftz")

# On a CPU nothing but what the formulation says is stored: Inductor would store what it counts as
# much work, as the errors of every scale that is tried, each a tensor of its own. Of its patterns
# none is in the formulation, and making them takes a second.
_ON_CPU = {
    "realize_reads_threshold": 10**4,
    "realize_opcount_threshold": 10**4,
    "pattern_matcher": False,
}


class Program(NamedTuple):
    """The key of one compilation: what it is for."""

    variant: Specialization
    ndim: int  # of the first tensor
    dtype: torch.dtype
    device: torch.device
    threads: int  # generated C++ starts a fixed number of them


class CompilationError(RuntimeError):
    """Raised where the compiler, or torch's way to it, failed."""


logger = logging.getLogger(__name__)

_NOTICE_AFTER = 5.0  # seconds of compiling in a process, more than reading kept code takes

_kernels: dict[Program, Callable[..., tuple[Tensor, ...]]] = {}
_seconds: dict[Program, float] = {}
_lock = threading.Lock()
_noticed = False


def compile_seconds() -> dict[Program, float]:
    """Return seconds by program that this process has compiled (or loaded from disk: few)."""
    return dict(_seconds)


def missing(device: torch.device) -> str | None:
    """Name the part that compiling for this device lacks; None if nothing."""
    if device.type == "cuda":
        return None if _has_triton() else "package triton, which comes with CUDA builds of torch"
    if device.type != "cpu":
        return f"code generator that is known to give equal results on {device.type!r} devices"
    if not _cpp_compiler():
        return (
            "C++ compiler (none of $CXX, g++, clang++ is found); install one, "
            'for example with "apt-get install g++" or "conda install cxx-compiler"'
        )
    folder = os.path.dirname(torch.__file__)
    if " " in folder and os.name != "nt":  # Inductor writes -L{folder}/lib without quotes
        return (
            f"C++ compiler that can be given torch's folder {folder}, which has a space; move the "
            "environment"
        )
    return None


@functools.cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()


@functools.cache
def _cpp_compiler() -> str | None:
    candidates = [os.environ.get("CXX", ""), "g++", "clang++", "cl"]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def run(
    variant: Specialization, key: noise.Key | None, x: Tensor, *others: Tensor | None
) -> tuple[Tensor, ...]:
    """Return one of the functions of `formulation`, compiled.

    Args:
        variant: which, and what it does.
        key: noise key, where the variant needs one.
        x: the first argument of the function.
        others: tensors after it and the noise, in their order; None is left out.
    """
    program = program_of(variant, x)
    kernel = _kernels.get(program)
    if kernel is None:
        kernel = compile_program(program)
    rest = [other for other in others if other is not None]
    return kernel(x, *([] if key is None else noise_of(key, x)), *rest)


def program_of(variant: Specialization, x: Tensor) -> Program:
    """Make the program that `run` takes."""
    threads = torch.get_num_threads() if x.device.type == "cpu" else 0
    return Program(variant, x.dim(), x.dtype, x.device, threads)


def is_compiled(program: Program) -> bool:
    """Return whether this process has compiled a program."""
    return program in _kernels


def traced(
    variant: Specialization, key: noise.Key | None, x: Tensor, *others: Tensor | None
) -> tuple[Tensor, ...]:
    """Run a program inside a graph that is being traced for another compilation."""
    source = [] if key is None else traced_noise(key, x)
    return call(variant, [x, *source, *(other for other in others if other is not None)])


def call(variant: Specialization, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Wrap a function of `formulation`, whose arguments then stand in a row without any None."""
    x, *rest = arguments
    source = None
    if variant.needs_noise:
        source, rest = Noise(*rest[:3]), rest[3:]

    def taken(wanted: bool) -> Tensor | None:
        return rest.pop(0) if wanted else None

    if variant.task == "unpack":
        scale = rest.pop(0)
        decode = taken(variant.two_level and variant.scaled)
        return formulation.unpack(x, variant, scale, decode, taken(variant.plus))
    amax, minus = taken(variant.given), taken(variant.minus)
    if variant.task == "pack":
        return formulation.pack(x, variant, source, amax, minus)
    plus = minus if variant.same else taken(variant.plus)
    return formulation.fake_quantize(x, variant, source, amax, minus, plus)


def noise_of(key: noise.Key, x: Tensor) -> Noise:
    """Return the key as tensors on the device of `x`, for quantizing it."""
    device = x.device
    words, zero = _static_words(key.static, device)
    return Noise(words, zero if key.data is None else key.data, _lanes(x))


def traced_noise(key: noise.Key, x: Tensor) -> Noise:
    """Return the key inside a graph that is being traced: no caches, and numbers for words.

    Tensors made of numbers would be copies from the CPU, and keep a graph from being recorded.
    """
    zero = torch.zeros((), dtype=torch.int32, device=x.device)
    words = noise.static_words(key)
    return Noise(words, zero if key.data is None else key.data, _lanes(x))


def _lanes(x: Tensor) -> Tensor:
    # Generated C++ loads int32 by way of a buffer, which costs more than all of the hash. Where
    # elements of 16 bits make vectors twice as long, converting from fp32 goes that way too.
    halves = x.device.type == "cpu" and x.dtype == torch.float32
    return noise.lane_halves(x.device) if halves else noise.lane_hashes(x.device)


@functools.partial(noise.constant, most=_MAX_CACHED_KEYS)
def _static_words(static: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # Kept: a copy to a GPU for each call would cost more than the kernel, and break CUDA graphs.
    numbers = noise.static_words(noise.Key(static))
    words = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    return words.to(device), torch.zeros((), dtype=torch.int32, device=device)


def load_program(program: Program) -> bool:
    """Return whether this process has a program now, once what is on disk has been read."""
    with _lock:
        return program in _kernels or _load(program)


def _load(program: Program) -> bool:
    # What was compiled for a GPU is left to Inductor's cache: loading it was never tried.
    if program.device.type != "cpu" or not kept.keeps_code():
        return False
    started = time.perf_counter()
    kernel = kept.load(program)
    if kernel is None:
        return False
    _seconds[program] = time.perf_counter() - started
    _kernels[program] = kernel
    return True


def compile_program(program: Program) -> Callable[..., tuple[Tensor, ...]]:
    """Compile a program for this process, or load it from disk.

    Raises:
        CompilationError: the compiler, or torch's way to it, failed.
    """
    with _lock:
        if program in _kernels or _load(program):
            return _kernels[program]
        started = time.perf_counter()
        kernel = _announced_build(program)
        if program.device.type == "cpu" and kept.keeps_code():
            kept.keep(program, kernel)
        _seconds[program] = time.perf_counter() - started
        _kernels[program] = kernel
        return kernel


def _announced_build(program: Program) -> Callable[..., tuple[Tensor, ...]]:
    """Build a program, and say so where a process waits for long."""
    wait = max(0.0, _NOTICE_AFTER - sum(_seconds.values()))
    kept.directory()  # imports what the timer needs: not there, beside other imports
    timer = threading.Timer(wait, announce, ["compiling quantizers for this machine"])
    timer.daemon = True
    timer.start()
    try:
        return _build(program)
    except Exception as error:
        raise failure(error) from error
    finally:
        timer.cancel()


def failure(error: Exception) -> CompilationError:
    """Return the error to raise where compiling met another one: what failed, and what to do."""
    what = f"compiling a quantizer failed: {error}"
    if isinstance(getattr(error, "inner_exception", error), OSError):  # Inductor wraps it
        what += "; set TORCHINDUCTOR_CACHE_DIR to a folder that can be written to"
    return CompilationError(what)


def announce(what: str) -> None:
    """Announce, once in a process, what is being compiled, and where it is kept."""
    global _noticed
    if not _noticed:
        _noticed = True
        logger.warning("%s, once: later runs read them from %s", what, kept.directory())


def _build(program: Program) -> Callable[..., tuple[Tensor, ...]]:
    if program.device.type != "cpu":
        return _compiled(program)
    if vector_units.may_be_trusted():
        try:
            with vector_units.chosen(), byte_loads.at_once():
                return _compiled(program)
        except Exception as error:
            logger.debug("a quantizer is compiled again, with vector units tried out: %s", error)
    with vector_units.chosen(tried=True):
        return _compiled(program)


def _compiled(program: Program) -> Callable[..., tuple[Tensor, ...]]:
    # Imported here: they take a second, and most uses of the package compile nothing.
    import torch._inductor
    import torch._inductor.config
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    device = program.device
    examples = _examples(program)
    # No size is taken for a constant because it is 0 or 1. Equal ones are one size: the examples
    # have equal ones only where calls have.
    shapes = ShapeEnv(specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=shapes)

    def traced(*arguments: Tensor) -> tuple[Tensor, ...]:
        return call(program.variant, arguments)

    def fake(index: int, example: Tensor) -> Tensor:
        dynamic = [
            DimDynamic.DUCK if size in (_ROWS, _COLUMNS) else DimDynamic.STATIC
            for size in example.shape
        ]
        return mode.from_tensor(
            example,
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
            source=ConstantSource(f"argument{index}"),
        )

    known = torch._inductor.config.get_config_copy()
    options: dict[str, Any] = {name: True for name in _EXACT if name in known}
    if device.type == "cpu":
        options |= _ON_CPU
    with (
        # Older versions of torch take code for another number of threads from their cache.
        kept.told_apart(f"metis_hf: {program.threads} threads" if device.type == "cpu" else ""),
        _loops_apart() if _has_loops_apart(program) else contextlib.nullcontext(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch._inductor.config.patch(options),
    ):
        fakes: list[Any] = [fake(index, example) for index, example in enumerate(examples)]
        with mode:
            graph = make_fx(traced)(*fakes)
        results: Any = graph.graph.output_node().args[0]
        for node in results:
            # By this name torch 2.8 finds the mode that the graph's tensors are of.
            node.meta.setdefault("example_value", node.meta["val"])
        _refuse_fixed_sizes(shapes)
        return torch._inductor.standalone_compile(graph, fakes, dynamic_shapes="from_graph")


def _has_loops_apart(program: Program) -> bool:
    """Return whether a search for scales is known to be of loops that cannot be joined.

    They can where one block after the other is read, searched and written: blocks of rows, with no
    outer scale that waits for the whole tensor.
    """
    variant = program.variant
    along_rows = variant.dims in ((1,), (2,)) and program.ndim < 4
    waits = variant.two_level and not variant.given
    return variant.rule in TRIED_SCALES and (waits or not along_rows)


@contextlib.contextmanager
def _loops_apart() -> Iterator[None]:
    """Keep Inductor from joining loops that share their outermost one alone, inside a block.

    It generates the code of such loops, finds that they cannot be joined, and generates all of it
    again: a quarter of the time that compiling a search takes.
    """
    from torch._inductor.codegen.cpp import CppScheduling

    asked = getattr(CppScheduling, "can_fuse_vertical_outer_loop", None)
    if asked is None:
        yield
        return
    CppScheduling.can_fuse_vertical_outer_loop = lambda *args: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppScheduling.can_fuse_vertical_outer_loop = asked  # type: ignore[method-assign]


def _examples(program: Program) -> list[Tensor]:
    """Make arguments of `call`; what is free in them has sizes that nothing else has."""
    variant, device = program.variant, program.device
    whole = {2: (_ROWS, BLOCK), 3: (_ROWS, 2, BLOCK), 4: (_ROWS, BLOCK, _COLUMNS, BLOCK)}
    unpacks = variant.task == "unpack"
    empty = functools.partial(torch.empty, dtype=torch.float32, device=device)
    first = whole[3 if unpacks and program.ndim == 2 else program.ndim]
    if unpacks:
        codes = (_ROWS, BLOCK) if program.ndim == 2 else (_ROWS, BLOCK // 2, _COLUMNS, BLOCK)
        blocks = [1 if dim in variant.dims else size for dim, size in enumerate(first)]
        examples = [
            torch.empty(codes, dtype=torch.uint8, device=device),
            torch.empty(blocks, dtype=torch.float8_e4m3fn, device=device),
        ]
        if variant.two_level and variant.scaled:
            examples.append(empty(blocks if variant.rows else ()))
    else:
        examples = [torch.empty(first, dtype=program.dtype, device=device)]
        if variant.needs_noise:
            examples += noise_of(noise.Key(0), examples[0])
        if variant.given:
            outer = [1 if dim in variant.dims else size for dim, size in enumerate(first)]
            examples.append(empty(outer if variant.rows else ()))
    dense = variant.minus + (variant.plus and not variant.same)
    return examples + [empty(first) for _ in range(dense)]


def _refuse_fixed_sizes(shapes: ShapeEnv) -> None:
    """Check that tracing took no size for a constant: nothing checks sizes at a call."""
    import sympy

    fixed = [str(guard.expr) for guard in shapes.guards if isinstance(guard.expr, sympy.Eq)]
    if fixed:
        raise RuntimeError(f"this version of torch fixed sizes while tracing: {', '.join(fixed)}")
