"""torch.compile passes the FP4 GEMM by: one graph, Inductor included."""

from __future__ import annotations

import pytest
import torch
from layers.layer_tools import layer_of
from tensors import assert_same
from torch._dynamo.testing import CompileCounterWithBackend

from metis_hf.numerics import Quantizer
from metis_hf.numerics.kernels import pack
from metis_hf.numerics.native import NativeMatrix, multiply, native_matrix, use_gemm
from native.slow_gemm import SlowGemm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]


def test_inductor_calls_the_operator():
    """Inductor's own lowering of `scaled_mm` refuses swizzled scales."""
    quantizer, matrices = Quantizer(), []
    for rows in (20, 40):
        packed = pack(torch.randn(rows, 64), quantizer)
        options = {"dim": -1, "shape": (rows, 64), "contracted": -1}
        matrices.append(native_matrix(packed, quantizer, **options))
    rows, length = (20, 40), 64
    tensors = [matrix[:3] for matrix in matrices]

    def product(tensors):
        a, b = (NativeMatrix(*fields, n, length) for fields, n in zip(tensors, rows))
        return (2 * multiply(a, b, torch.float32)).relu()

    slow = SlowGemm()
    with use_gemm(slow):
        expected = product(tensors)
        assert torch.equal(torch.compile(product, fullgraph=True)(tensors), expected)
    assert len(slow.calls) == 2


def test_a_layer_is_one_graph():
    """Forward and backward, and no more than one graph for all other numbers of tokens."""
    _, layer = layer_of("nvidia", backend="native")

    def step(call, tokens):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, 48, generator=generator, requires_grad=True)
        layer.zero_grad()
        y = call(x)
        y.square().sum().backward()
        return y.detach(), x.grad, layer.weight.grad

    counter, slow = CompileCounterWithBackend("eager"), SlowGemm()
    with use_gemm(slow):
        expected = [step(layer, tokens) for tokens in (48, 37, 20)]
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        for tokens, values in zip((48, 37, 20), expected):
            assert_same(step(compiled, tokens), values)
    assert counter.frame_count == 2
    assert len(slow.calls) == 2 * 3 * 3
