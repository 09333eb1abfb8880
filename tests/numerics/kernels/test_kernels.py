"""Compiled kernels give the reference's bits: nearest, stochastic, any shape, stride and value."""

from __future__ import annotations

import platform
import threading

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from metis_hf import noise
from metis_hf.numerics import Quantizer, fake_quantize
from metis_hf.numerics.kernels import cpu, cpu_library, use_kernels
from metis_hf.numerics.kernels.layout import BLOCK, covers, form_of, has_form, padded_shape
from numerics.cases import assert_same_bits
from numerics.helpers import DTYPES, operators, seeded
from numerics.kernels.kernel_tools import (
    COMPILED,
    TENSORS,
    VARIANTS,
    both,
    needs_compiler,
    tensors,
)
from numerics.kernels.kernel_tools import check as check_packed


@needs_compiler
@pytest.mark.parametrize("name", TENSORS)
def test_every_choice_is_the_reference_to_the_bit(name) -> None:
    """In another dtype for the next tensor."""
    for turn, (quantizer, dim) in enumerate(VARIANTS, list(TENSORS).index(name)):
        both(quantizer, TENSORS[name].to(DTYPES[turn % len(DTYPES)]), dim=dim)


@needs_compiler
@settings(max_examples=100, derandomize=True)
@given(tensors())
def test_shapes_and_strides(case) -> None:
    x, quantizer, dim = case
    if (quantizer.tile == "square" and x.dim() < 2) or not has_form(x, quantizer.tile, dim):
        return
    both(quantizer, x, dim=dim)


@needs_compiler
@pytest.mark.parametrize("case", COMPILED)
def test_sizes_alignment_and_dtypes(case) -> None:
    quantizer, dim, dtype = COMPILED[case]
    for shape in [(1, 16), (3, 5), (1, 1), (16, 17), (500, 256), (2048, 32)]:
        x = torch.randn(shape, generator=seeded(1))
        both(quantizer, x, dim=dim, dtype=dtype)
        both(quantizer, x.t(), dim=dim, dtype=torch.float16)
        unaligned = torch.randn(x.numel() + 1, generator=seeded(2))[1:].view(shape)
        both(quantizer, unaligned, dim=dim, dtype=dtype)
    batches = torch.randn(3, 32, 48, generator=seeded(3))
    both(quantizer, batches, dim=-2 if dim == 0 else -1, dtype=dtype)
    with torch.inference_mode(), torch.autocast("cpu"):
        both(quantizer, TENSORS["normal"] + 1, dim=dim, dtype=dtype)


@needs_compiler
def test_several_threads() -> None:
    assert cpu_library.openmp()
    x = torch.randn(1024, 200, generator=seeded(4))  # 800 tiles of 16 x 16 or more
    x[700, 100] = 1e5
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for quantizer, dim, dtype in COMPILED.values():
            both(quantizer, x, dim=dim, dtype=dtype)
            check_packed(x, quantizer, dim, dtype)
        both_draw((300, 40))
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [["-mno-avx2", "-mno-avx512f"], ["-mno-avx512f"]],
)
def test_smaller_vectors(flags, tmp_path, monkeypatch) -> None:
    """The widths of registers of older x86 and of ARM, where this machine's are wider."""
    if platform.machine() not in ("x86_64", "AMD64"):
        flags = []
    library = cpu_library.build(tmp_path / "cpu.so", flags)
    monkeypatch.setattr(cpu_library, "load", lambda: library)
    for quantizer, dim, dtype in COMPILED.values():
        for x in TENSORS.values():
            both(quantizer, x.to(dtype), dim=dim, dtype=dtype)
    both_draw((5, 3, 33))


def both_draw(shape: tuple[int, ...]) -> None:
    """Noise of the library, which must be the reference's."""
    key = noise.Key(3, torch.tensor(-5, dtype=torch.int32))
    with use_kernels("reference"):
        wanted = noise.uniform(shape, key)
    assert torch.equal(cpu.uniform(torch.Size(shape), key, torch.device("cpu")), wanted)


@needs_compiler
def test_keys_of_every_kind() -> None:
    quantizer, dim, _ = COMPILED["columns, stochastic"]
    x = TENSORS["normal"]
    data = noise.fingerprint(x)
    seen = set()
    for key in (3, noise.Key(4), noise.key_of("a", 1), noise.Key(3, data), noise.Key(3, data + 1)):
        with use_kernels("reference"):
            wanted = quantizer(x, dim=dim, key=key)
        with use_kernels("compiled"):
            assert_same_bits(quantizer(x, dim=dim, key=key), wanted)
        seen.add(wanted.sum().item())
    assert len(seen) == 5
    with use_kernels("compiled"), pytest.raises(ValueError, match="needs a noise key"):
        quantizer(x, dim=dim)


@needs_compiler
def test_gradients_threads_and_checkpointing() -> None:
    """As part of an autograd graph, recomputed, and from several threads at once."""
    x = TENSORS["normal"].clone().requires_grad_()
    with use_kernels("compiled"):
        fake_quantize(x).square().sum().backward()
        out = torch.utils.checkpoint.checkpoint(fake_quantize, x, use_reentrant=False)
    assert torch.equal(x.grad, 2 * out.detach())
    results: list[Tensor] = []
    tall = [torch.randn(64 * (i + 1), 64, generator=seeded(i)) for i in range(4)]

    def work(x: Tensor) -> None:
        results.extend(Quantizer()(x) for _ in range(20))

    with use_kernels("compiled"):
        threads = [threading.Thread(target=work, args=(x,)) for x in tall]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 80
    for x in tall:
        with use_kernels("reference"):
            wanted = Quantizer()(x)
        assert sum(r.shape == x.shape and torch.equal(r, wanted) for r in results) == 20


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_inside_a_compiled_function(rounding) -> None:
    """One graph, a node for each quantizer in it, and no break for the key."""
    quantizer = Quantizer(rounding=rounding)
    layer = noise.key_of("layer")

    def call(x: Tensor) -> Tensor:
        key = layer.with_data(noise.fingerprint(x))
        return quantizer(x, key=key) @ quantizer(x.t(), dim=0, key=key)

    counter = CompileCounterWithBackend("aot_eager")
    whole = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for rows in (32, 48, 64):
        x = torch.randn(rows, 64, generator=seeded(rows))
        with use_kernels("reference"):
            wanted = call(x)
        with use_kernels(None):
            assert torch.equal(whole(x), wanted)
    assert operators(counter) == ["fingerprint", "quantize", "quantize"]


# --- layouts -------------------------------------------------------------------------------------


def test_forms_cover_whole_blocks() -> None:
    x = torch.randn(3, 20, 33)
    assert has_form(x, Quantizer().tile, -1)
    assert not has_form(x, Quantizer().tile, 0)
    assert not has_form(x, Quantizer().tile, 1)  # padded rows would move the noise
    rows = form_of(x, Quantizer().tile, -1)
    assert torch.equal(rows.view(3, 20, 48)[..., :33], x)
    matrix = form_of(x[0], Quantizer().tile, 0)
    assert matrix.shape == (2, BLOCK, 3, BLOCK)
    assert torch.equal(matrix.view(32, 48)[:20, :33], x[0])
    assert padded_shape((20, 33), Quantizer().tile, 0) == (32, 48)


@pytest.mark.parametrize(
    ("shape", "covered"),
    [
        ((5,), True),
        ((0, 4), True),
        ((2**27 - 2**10, 15), True),
        ((2**27 + 1, 15), False),
        ((2**21, 17, 15), True),
        ((2**23 - 1, 1, 1), False),
        ((2**22, 3, 33), False),
    ],
)
def test_a_tensor_that_padding_makes_too_large_is_left_to_the_reference(shape, covered):
    """Places have 32 bits; the last two dimensions end with whole blocks."""
    x = torch.empty(shape, device="meta")
    assert x.numel() < 2**31
    assert covers(x, Quantizer(), -1, torch.float32, None, None) == covered
