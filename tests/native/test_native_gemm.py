"""Products of native operands: the arguments of torch's `scaled_mm`, and its numbers."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from design import cases
from torch._subclasses.fake_tensor import FakeTensorMode

from metis_hf.noise import Key
from metis_hf.numerics import MXFP4, NVFP4, Quantizer
from metis_hf.numerics.kernels import pack
from metis_hf.numerics.native import DTYPES, call_gemm, multiply, native_matrix, use_gemm
from metis_hf.operands import Operand, Spectral
from metis_hf.operands.native_operand import NativeOperand, product
from native.slow_gemm import SlowGemm

SHAPES = [(64, 32, 64), (1, 1, 1), (37, 24, 40), (129, 17, 200)]  # m, p, n
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def matrix_of(x, quantizer, contracted):
    """x [m n] or [n m] laid out for a GEMM that contracts n, and its emulated values."""
    packed = pack(x, quantizer, dim=contracted)
    native = native_matrix(
        packed, quantizer, dim=contracted, shape=tuple(x.shape), contracted=contracted
    )
    return native, quantizer(x, dim=contracted)


def representable(m: int, n: int, block: int) -> torch.Tensor:
    """[m n] of codes times powers of two, with a 6 in each block: quantizing changes nothing."""
    values = torch.cat([E2M1, -E2M1])[torch.randint(0, 16, (m, n))]
    values[:, ::block] = 6.0
    scale = 2.0 ** torch.randint(-2, 3, (m, -(-n // block)))
    return values * scale.repeat_interleave(block, 1)[:, :n]


@cases(
    {"fmt": [NVFP4, MXFP4], "m, p, n": SHAPES},
    rotated={"contracted": [(-1, -1), (-1, 0), (0, 0)]},
)
def test_exact_where_scales_are_powers_of_two(m, p, n, fmt, contracted):
    """Products of multiples of 2^-6 up to 24^2, n of them: exact in fp32 and in any order."""
    quantizer = Quantizer(fmt, two_level=False)
    matrices, values = [], []
    for rows, dim in zip((m, p), contracted):
        x = representable(rows, n, fmt.block_size)
        matrix, emulated = matrix_of(x.T.contiguous() if dim == 0 else x, quantizer, dim)
        assert torch.equal(emulated.T if dim == 0 else emulated, x)
        matrices.append(matrix)
        values.append(x)
    slow = SlowGemm()
    with use_gemm(slow):
        out = multiply(*matrices, torch.float32 if fmt is NVFP4 else torch.bfloat16)
    expected = values[0] @ values[1].T
    assert torch.equal(expected.double(), values[0].double() @ values[1].T.double())
    assert torch.equal(out, expected.to(out.dtype))
    assert out.is_contiguous()
    (size,) = slow.calls
    assert size == (-(-m // 16) * 16, -(-p // 16) * 16, -(-n // 32) * 32)


@cases({"m, p, n": SHAPES}, rotated={"dtype": [torch.float32, torch.bfloat16]})
def test_tensor_scales(m, p, n, dtype):
    quantizer = Quantizer()
    a, a_values = matrix_of(torch.randn(m, n) * 1e-3, quantizer, -1)
    b, b_values = matrix_of(torch.randn(p, n) * 50, quantizer, -1)
    with use_gemm(SlowGemm()):
        out = multiply(a, b, dtype)
    exact = a_values.double() @ b_values.double().T
    # Each emulated value is rounded once to fp32, the sum once to `dtype`.
    bound = 3 * 2.0**-24 * (a_values.double().abs() @ b_values.double().abs().T)
    bound += torch.finfo(dtype).eps * exact.abs()
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("split", "contracted"), [("a", (-1, -1)), ("b", (-1, 0)), ("both", (0, 0)), ("both", (-1, 0))]
)
def test_split_operands(split, contracted):
    """All four products of residuals and thin parts, with k a multiple of nothing."""
    n, operands, values = 72, [], []
    for which, rows, dim in zip("ab", (40, 56), contracted):
        conditioner = Spectral(5, sample_frac=1.0) if split in (which, "both") else None
        operand = Operand(Quantizer(), *([conditioner] if conditioner else []))
        x = torch.randn(rows, 3) @ torch.randn(3, n) * 10 + torch.randn(rows, n)
        x = x.T.contiguous() if dim == 0 else x
        options = {"dim": dim, "key": Key(7)}
        encoded = operand.encode(x, **options)
        native = NativeOperand.of(
            encoded, operand, dim=dim, shape=tuple(x.shape), contracted=dim, dtype=torch.float32
        )
        emulated = operand(x, dtype=torch.float32, **options)
        directions = torch.randn(n, 3), torch.ones(3), None
        wanted = (emulated.transposed() if dim == 0 else emulated).error_along
        given = x.T if dim == 0 else x
        assert torch.equal(native.error_along(given, *directions), wanted(given, *directions))
        operands.append(native)
        values.append((emulated.values.T if dim == 0 else emulated.values).double())
    slow = SlowGemm()
    with use_gemm(slow):
        out = product(*operands)
    bound = (n + 16) * 2.0**-23 * values[0].norm(dim=1)[:, None] * values[1].norm(dim=1)
    assert ((out.double() - values[0] @ values[1].T).abs() <= bound).all()
    assert len(slow.calls) == (4 if split == "both" else 2)


@cases({"dtype": DTYPES["nvfp4"]}, rotated={"contracted": [-1, 0]})
def test_errors_of_direct_operands(dtype, contracted):
    """Corrections quantize them: in BF16, too, they are those of values that are not rounded."""
    operand, x = Operand(Quantizer()), torch.randn(40, 72)
    options = {"dim": contracted, "key": Key(7)}
    native = NativeOperand.of(
        operand.encode(x, **options),
        operand,
        dim=contracted,
        shape=(40, 72),
        contracted=contracted,
        dtype=dtype,
    )
    emulated = operand(x, dtype=dtype, **options)
    if contracted == 0:
        x, emulated = x.T, emulated.transposed()
    directions = torch.randn(x.shape[1], 3), torch.ones(3), None
    assert torch.equal(native.error_along(x, *directions), emulated.error_along(x, *directions))


def arguments(m: int, p: int, n: int, fmt=NVFP4):
    quantizer = Quantizer(fmt)
    (a, _), (b, _) = (matrix_of(torch.randn(rows, n), quantizer, -1) for rows in (m, p))
    fields = [(x.codes, x.scale, x.global_scale) for x in (a, b)]
    return [None if x is None else x.to("meta") for pair in fields for x in pair]


@cases({"m, p, n": SHAPES}, rotated={"dtype": DTYPES["nvfp4"]})
def test_torch_takes_the_arguments(m, p, n, dtype):
    """Through the checks that torch's own operator makes of shapes, layouts and recipes."""
    out = call_gemm(F.scaled_mm, *arguments(m, p, n), dtype)
    assert out.shape == (-(-m // 16) * 16, -(-p // 16) * 16)
    assert out.dtype is dtype
    ours = torch.ops.metis_hf.fp4_gemm(*arguments(m, p, n), dtype)
    assert (ours.shape, ours.dtype, ours.stride()) == (out.shape, out.dtype, out.stride())


def test_torch_takes_them_on_a_gpu_of_fake_tensors():
    with FakeTensorMode():
        args = [
            None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda")
            for x in arguments(37, 24, 40)
        ]
        outs = [
            call_gemm(F.scaled_mm, *args, torch.bfloat16),
            torch.ops.metis_hf.fp4_gemm(*args, torch.bfloat16),
        ]
    for out in outs:
        assert (tuple(out.shape), out.dtype) == ((48, 32), torch.bfloat16)
        assert out.device.type == "cuda"


def test_mxfp4_through_torch():
    """The CUDA kernel wants a scale for each 32 elements; 2.13's meta kernel, for each 32 bytes."""
    args = arguments(64, 32, 256, MXFP4)
    count = args[1].numel()
    with contextlib.suppress(RuntimeError):
        call_gemm(F.scaled_mm, *args, torch.bfloat16)
        count = 0  # a torch that counts elements
    if count:
        with pytest.raises(RuntimeError, match=rf"must have {count // 2} \(got: {count}\)"):
            call_gemm(F.scaled_mm, *args, torch.bfloat16)
    # Our operator passes that check by.
    assert torch.ops.metis_hf.fp4_gemm(*args, torch.bfloat16).shape == (64, 32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({0: lambda a: a[:, :8], 3: lambda b: b[:, :8]}, "divisible by 16"),  # K = 16
        ({3: lambda b: b[:8]}, "divisible by 16"),  # N = 8
        ({0: lambda a: a.t().contiguous().t()}, "row_major"),
        ({3: lambda b: b.t().contiguous().t()}, "col_major"),
        ({1: lambda scale: scale[:-4]}, "scale_a must have"),
        ({4: lambda scale: scale.view(torch.float8_e5m2)}, "scale_b must have"),
        ({2: lambda scale: scale.to(torch.float64)}, "NV scaling"),
    ],
)
def test_torch_refuses_others(change, said):
    args = arguments(64, 32, 64)
    for place, make in change.items():
        args[place] = make(args[place])
    with pytest.raises(RuntimeError, match=said):
        call_gemm(F.scaled_mm, *args, torch.bfloat16)


def test_a_stand_in_ends_with_its_block():
    a, _ = matrix_of(torch.randn(16, 32), Quantizer(), -1)
    outer, inner = SlowGemm(), SlowGemm()
    with use_gemm(outer):
        with use_gemm(inner):
            multiply(a, a, torch.float32)
        multiply(a, a, torch.float32)
    assert (len(inner.calls), len(outer.calls)) == (1, 1)
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        multiply(a, a, torch.float32)  # torch's own, which a CPU does not have
