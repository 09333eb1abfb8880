"""The real GEMM on FP4 units; these tests have not run yet, for want of such a GPU."""

from __future__ import annotations

import pytest
import torch
from design import cases
from layers.layer_tools import layer_of

from metis_hf.numerics import MXFP4, NVFP4, Quantizer
from metis_hf.numerics.native import multiply, obstacle_of_device, use_gemm
from native.slow_gemm import SlowGemm
from native.test_native_gemm import SHAPES, matrix_of, representable
from native.test_native_matrix import NATIVE


def obstacle(fmt: str) -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    return obstacle_of_device(torch.device("cuda", torch.cuda.current_device()), fmt)


pytestmark = [
    pytest.mark.blackwell,
    pytest.mark.skipif(obstacle("nvfp4") is not None, reason=str(obstacle("nvfp4"))),
]
FORMATS = [
    pytest.param(fmt, marks=pytest.mark.skipif(why is not None, reason=str(why)))
    for fmt in (NVFP4, MXFP4)
    for why in [obstacle(fmt.name)]
]


def on_gpu(matrix):
    return matrix._replace(
        **{
            name: value.cuda()
            for name, value in matrix._asdict().items()
            if isinstance(value, torch.Tensor)
        }
    )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("m", "p", "n"), [*SHAPES, (512, 1024, 128)])
def test_exact_where_scales_are_powers_of_two(m, p, n, fmt):
    quantizer = Quantizer(fmt, two_level=False)
    values = [representable(rows, n, fmt.block_size) for rows in (m, p)]
    a, b = (on_gpu(matrix_of(x, quantizer, -1)[0]) for x in values)
    out = multiply(a, b, torch.bfloat16).cpu()
    assert torch.equal(out, (values[0].double() @ values[1].double().T).bfloat16())


@cases({"m, p, n": SHAPES}, rotated={"dtype": [torch.float32, torch.bfloat16]})
def test_tensor_scales(m, p, n, dtype):
    quantizer = Quantizer()
    a, b = (
        matrix_of(torch.randn(rows, n) * size, quantizer, -1)[0]
        for rows, size in ((m, 1e-3), (p, 50))
    )
    with use_gemm(SlowGemm()):
        exact = multiply(a, b, torch.float32).double()
        sizes = multiply(*(x._replace(codes=x.codes & 0x77) for x in (a, b)), torch.float32)
    out = multiply(on_gpu(a), on_gpu(b), dtype).cpu().double()
    bound = n * 2.0**-23 * sizes.double() + torch.finfo(dtype).eps * exact.abs()
    assert ((out - exact).abs() <= bound).all()


@pytest.mark.parametrize("scheme", [scheme for scheme in NATIVE if "mxfp4" not in scheme])
def test_layers_compute_as_in_emulation(scheme):
    """Up to the order of sums, in fp32: within 1e-4 of each result's norm."""
    _, layer = layer_of(scheme, "contraction", i=256, o=192, rank=16)
    layer.cuda()
    x, dy = torch.randn(128, 256, device="cuda"), torch.randn(128, 192, device="cuda")
    results = []
    for backend in ("emulated", "native"):
        layer.set_config(layer.config.replace(backend=backend))
        for buffer in layer.state_buffers().values():
            buffer.zero_()
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        y = layer(inputs)
        y.backward(dy)
        results.append((y.detach(), inputs.grad, layer.weight.grad.clone()))
    for emulated, native in zip(*results):
        assert (emulated - native).norm() <= 1e-4 * emulated.norm()


@pytest.mark.slow
def test_torch_compile():
    _, layer = layer_of("nvidia", i=256, o=192, backend="native")
    layer.cuda()
    x = torch.randn(128, 256, device="cuda")
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
