"""Memory that the calls of layers use in turn changes no bit, and nothing kept lies in it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numerics.cases import assert_same_bits
from numerics.kernels.kernel_tools import needs_compiler
from torch._subclasses import FakeTensorMode

from layers.layer_tools import STRUCTURES, layer_of, matrix, record
from metis_hf.numerics.kernels import use_kernels, workspace
from metis_hf.numerics.kernels.workspace import Workspace

TOKENS, WIDTH = 640, 416  # an operand of more than a megabyte in fp32
SHAPE = (TOKENS, WIDTH)


def results(
    scheme: str, mode: str | None, dtype: torch.dtype, codes: bool = True
) -> list[torch.Tensor]:
    """What two layers return, and their gradients; their calls overlap.

    Without `codes` they save the values of their inputs.
    """
    torch.manual_seed(0)
    sizes = {"i": WIDTH, "o": WIDTH, "dtype": dtype}
    layers = [layer_of(scheme, mode, name=name, **sizes)[1] for name in "ab"]
    if not codes:
        for layer in layers:
            record(layer)
    with torch.inference_mode():
        found = [layer(matrix(*SHAPE, dtype)) for layer in layers]
    inputs = [matrix(*SHAPE, dtype).requires_grad_() for _ in layers]
    outputs = [layer(x) for layer, x in zip(layers, inputs)]
    for y in outputs:
        y.backward(torch.randn(SHAPE, dtype=dtype))
    found += [*outputs, *(x.grad for x in inputs)]
    found += [p.grad for layer in layers for p in layer.parameters()]
    return [t.detach() for t in found]


def in_new_thread(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a thread of its own, which has no memory yet."""

    def run() -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(test).result()

    return run


CASES = [(*pair, torch.float32, True) for pair in STRUCTURES]
CASES += [(*pair, torch.bfloat16, True) for pair in STRUCTURES[::4]]
CASES += [(scheme, None, torch.float32, False) for scheme in ("nvfp4", "nvidia")]


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_give_the_same_bits_in_new_memory(case, monkeypatch) -> None:
    with use_kernels("compiled"):
        found = results(*case)
        monkeypatch.setattr(workspace, "take", lambda shape, dtype: None)
        wanted = results(*case)
    for a, b in zip(found, wanted, strict=True):
        assert_same_bits(a, b)


@needs_compiler
def test_a_layer_takes_the_memory_of_the_one_before(monkeypatch) -> None:
    taken, take = [], workspace.take

    def note(shape, dtype):
        memory = take(shape, dtype)
        taken.append((memory.data_ptr(), shape) if memory is not None else None)
        return memory

    monkeypatch.setattr(workspace, "take", note)
    for name in "ab":
        _, layer = layer_of("nvfp4-rne", i=WIDTH, o=WIDTH, name=name)
        with use_kernels("compiled"):
            layer(torch.randn(SHAPE))
    large = [place for place in taken if place]
    assert len(large) == 2
    assert large[0] == large[1]


def place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@in_new_thread
def test_memory_is_lent_again_once_it_is_released() -> None:
    x, first = torch.zeros(1), Workspace(torch.zeros(1))
    with first:
        a, b = workspace.take(SHAPE, torch.float32), workspace.take(SHAPE, torch.float32)
        assert workspace.take((16, 16), torch.float32) is None  # small
        assert workspace.own(a.T[:3]).data_ptr() == a.data_ptr()
        assert workspace.own(x) is None
    assert workspace.take(SHAPE, torch.float32) is None  # outside
    assert workspace.own(a) is None
    assert place(a) != place(b)
    kept = b[1:]
    first.release([None, kept, x])
    second = Workspace(x)
    with second:
        again = workspace.take((2 * TOKENS, WIDTH), torch.bfloat16)
        other = workspace.take(SHAPE, torch.float32)
    assert again.shape == (2 * TOKENS, WIDTH)
    assert again.dtype is torch.bfloat16
    assert place(again) == place(a)
    assert place(other) not in (place(a), place(b))
    second.release()


@in_new_thread
def test_larger_memory_replaces_smaller_memory() -> None:
    sizes = []
    for rows in (1024, 4096, 2048, 512):
        call = Workspace(torch.zeros(1))
        with call:
            memory = workspace.take((rows, 1024), torch.float32)
        call.release()
        sizes.append(memory.untyped_storage().nbytes() >> 20)
    assert sizes == [4, 16, 16, 16]


def test_blocks_nest() -> None:
    outer, inner = Workspace(torch.zeros(1)), Workspace(torch.zeros(1))
    with outer:
        with inner:
            a = workspace.take(SHAPE, torch.float32)
            assert not outer.holds(a)
        b = workspace.take(SHAPE, torch.float32)
    assert outer.holds(b)
    assert not inner.holds(b)


def test_tensors_without_plain_memory_lend_none() -> None:
    with Workspace(torch.zeros(1, device="meta")):
        assert workspace.take(SHAPE, torch.float32) is None
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(1))
    with Workspace(fake):
        assert workspace.take(SHAPE, torch.float32) is None


@in_new_thread
def test_memory_from_inference_is_usable_in_training() -> None:
    call = Workspace(torch.zeros(1))
    with torch.inference_mode(), call:
        memory = workspace.take(SHAPE, torch.float32)
    call.release()
    with Workspace(torch.zeros(1)):
        again = workspace.take(SHAPE, torch.float32)
    assert place(again) == place(memory)
    assert not again.is_inference()
    torch.mul(torch.ones(SHAPE), 2.0, out=again)
