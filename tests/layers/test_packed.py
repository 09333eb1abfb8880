"""A packed layer against a dense one with the weight that compressed-tensors makes of it."""

from __future__ import annotations

import copy
import io

import pytest
import reference
import torch
import torch.nn.functional as F
from tensors import assert_same
from torch import nn

from metis_hf.layers.packed import PackedLinear, PackedWeight, quantize_input

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def stored(o: int = 48, i: int = 64, seed: int = 0) -> PackedWeight:
    """Every code and many scales, with a tensor scale that is no power of two."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (o, i // 2), dtype=torch.uint8, generator=g)
    scale = (torch.rand(o, i // 16, generator=g) * 400).to(torch.float8_e4m3fn)
    return PackedWeight(codes, scale, torch.tensor([1731.37]))


def slow(packed: PackedWeight) -> torch.Tensor:
    """The represented weight, element by element in Python floats, rounded to fp32 twice."""
    rows, half = packed.codes.shape
    out = torch.empty(rows, 2 * half)
    for r in range(rows):
        for c in range(2 * half):
            code = int(packed.codes[r, c // 2]) >> 4 * (c % 2) & 15
            value = GRID[code & 7] * (-1 if code & 8 else 1)
            scale = packed.scale[r, c // 16].float() / packed.global_scale[0]
            out[r, c] = torch.tensor(value) * scale
    return out


def layer(bias=False, dtype=torch.float32, input_scale=None, i=64) -> PackedLinear:
    made = PackedLinear(
        i, 48, bias=bias, input_scale=input_scale is not None, dtype=dtype, name="a.b"
    )
    made.packed = stored(i=i)
    if bias:
        made.bias.data.normal_()
    if input_scale is not None:
        made.input_global_scale.fill_(input_scale)
    return made


def test_weights_are_those_of_compressed_tensors():
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    packed = stored()
    state = {
        "weight_packed": packed.codes,
        "weight_scale": packed.scale,
        "weight_global_scale": packed.global_scale,
    }
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
    assert torch.equal(packed.dense(torch.bfloat16), theirs)


def test_weights_by_definition():
    packed = stored(4, 32)
    assert torch.equal(packed.dense(torch.float32), slow(packed))
    assert torch.equal(packed.dense(torch.float16), slow(packed).half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_gradients_are_those_of_a_dense_layer(dtype, bias):
    packed = layer(bias, dtype)
    dense = nn.Linear(64, 48, bias=bias, dtype=dtype)
    dense.weight.data = packed.packed.dense(dtype)
    if bias:
        dense.bias.data = packed.bias.data.clone()
        packed.bias.requires_grad = True  # as LoraConfig(bias="all") has it
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    dy = torch.randn(2, 5, 48, dtype=dtype)
    y, expected = packed(x), dense(other)
    assert torch.equal(y, expected)
    y.backward(dy)
    expected.backward(dy)
    assert torch.equal(x.grad, other.grad)
    if bias:
        torch.testing.assert_close(packed.bias.grad, dense.bias.grad)
    assert packed(x[0, 0]).shape == (48,)
    assert packed(x[:0]).shape == (0, 5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed(x), nn.functional.linear(
            x.bfloat16(), packed.packed.dense(torch.bfloat16),
            packed.bias.bfloat16() if bias else None,
        ))  # fmt: skip


def test_inputs_are_quantized_under_the_static_scale():
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    x[0, :16] = 0
    x[1, 3] = 500.0  # beyond 448 * 6 / scale: saturates
    scale = 2688 / 5.0
    expected = torch.from_numpy(reference.fake_quantize(x.numpy(), amax=5.0).values)
    assert torch.equal(quantize_input(x, torch.tensor([scale]), torch.float32), expected)
    assert expected[1, 3] == pytest.approx(5.0, rel=1e-6)
    packed = layer(input_scale=scale)
    assert packed.quantizes_input
    torch.testing.assert_close(packed(x), F.linear(expected, packed.weight))
    packed.quantizes_input = False
    assert torch.equal(packed(x), F.linear(x, packed.weight))


def test_gradient_of_a_quantized_input_is_straight_through():
    packed = layer(input_scale=500.0)
    x = torch.randn(3, 64, requires_grad=True)
    dy = torch.randn(3, 48)
    packed(x).backward(dy)
    assert torch.equal(x.grad, dy @ packed.weight)


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_backward_keeps_the_packed_tensors_alone(checkpointing):
    packed = layer(i=256)
    x = torch.randn(4, 256, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        if checkpointing is None:
            y = packed(x)
        else:
            y = torch.utils.checkpoint.checkpoint(packed, x, use_reentrant=checkpointing)
    assert all(t.numel() < packed.weight.numel() for t in kept if t.dtype.is_floating_point)
    if checkpointing is None:
        own = {buffer.data_ptr() for buffer in packed.packed}
        assert {t.data_ptr() for t in kept} == own
    y.sum().backward()
    torch.testing.assert_close(x.grad, packed.weight.sum(0).expand(4, -1))


def test_bytes():
    packed = layer(i=256)
    elements = 48 * 256
    assert packed.nbytes == elements * 4.5 / 8 + 4  # 4: the tensor scale
    assert sum(p.numel() for p in packed.parameters()) == 0
    state = packed.state_dict()
    assert set(state) == {"weight_packed", "weight_scale", "weight_global_scale"}
    assert sum(t.nbytes for t in state.values()) == packed.nbytes


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_casts_and_copies_leave_the_weight_alone():
    packed = layer(bias=True, input_scale=100.0)
    before = {k: v.clone() for k, v in packed.state_dict().items() if k != "bias"}
    for made in (
        packed.to(torch.bfloat16),
        copy.deepcopy(packed),
        saved_and_loaded(packed),
        nn.Sequential(packed).double()[0].bfloat16(),
    ):
        assert_same({name: made.state_dict()[name] for name in before}, before)
        assert made.weight.dtype == made.bias.dtype == made.dtype == torch.bfloat16


def test_packs_as_the_quantizer_does():
    from metis_hf.numerics import quantize

    w = torch.randn(32, 64)
    packed, q = PackedWeight.of(w), quantize(w, scale_rule="search")
    assert torch.equal(packed.codes, q.codes)
    assert torch.equal(packed.scale.view(torch.uint8), q.scale.view(torch.uint8))
    again = PackedWeight.of(packed.dense(torch.float32), packed.global_scale)
    assert torch.equal(again.dense(torch.float32), packed.dense(torch.float32))
    # Under that scale what is larger saturates, and nothing else changes.
    w[0, 0] = 99
    beyond = PackedWeight.of(w, packed.global_scale)
    assert torch.equal(beyond.scale[1:].float(), packed.scale[1:].float())
    largest = beyond.dense(torch.float32).max().item()
    assert largest == pytest.approx(448 * 6 / packed.global_scale.item())
    zeros = PackedWeight.of(torch.zeros(2, 16))
    assert not zeros.dense(torch.float32).any()
    assert zeros.global_scale == 1


def test_is_packed_as_the_deployed_schemes_and_their_exports_pack():
    """With the scales that leave the least error: merging into a packed weight costs no more."""
    from metis_hf import MetisConfig
    from metis_hf.deploy.compressed_tensors import CompressedMatrix
    from metis_hf.numerics import fake_quantize, relative_error
    from metis_hf.schemes import build_scheme

    quantizer = build_scheme(MetisConfig(scheme="w4a4"), 64, 64).fprop_weight.quantizer
    w = torch.randn(96, 128, generator=torch.Generator().manual_seed(5)) * 0.02
    packed, exported = PackedWeight.of(w), CompressedMatrix.of(w, quantizer)
    assert torch.equal(packed.codes, exported.packed)
    assert torch.equal(packed.scale.float(), exported.scale.float())
    assert torch.equal(packed.global_scale, exported.global_scale)
    assert torch.equal(exported.dequantize(), fake_quantize(w, scale_rule="search"))
    error = relative_error(w, packed.dense(torch.float32))
    assert error < 0.9 * relative_error(w, fake_quantize(w))


def test_to_dense_is_trainable():
    packed = layer(bias=True, dtype=torch.bfloat16)
    dense = packed.to_dense()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(dense(x), packed(x))
    assert all(p.requires_grad for p in dense.parameters())


def test_refusals():
    packed = layer()
    with pytest.raises(ValueError, match=r"a\.b cannot be trained.*NVFP4.*get_peft_model"):
        packed.requires_grad_(True)
    assert packed.requires_grad_(False) is packed
    with pytest.raises(ValueError, match="not a multiple of the NVFP4 block size of 16"):
        PackedLinear(24, 8)
    x = torch.randn(2, 64, requires_grad=True)
    grad = torch.autograd.grad(packed(x).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivatives"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="inside torch"):
        torch.func.vmap(packed)(x.detach())


def test_compiles():
    packed, x = layer(dtype=torch.bfloat16), torch.randn(2, 64, dtype=torch.bfloat16)
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), packed(x))
