"""How many bytes layers keep for their backward pass, and what layers share."""

from __future__ import annotations

import threading

import pytest
import torch
from design import cases
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from layers.layer_tools import (
    FP4_SCHEME_MODES,
    autocast,
    in_one_mode,
    layer_of,
    matrix,
    of_each_kind,
)
from metis_hf import scheme_names
from metis_hf.layers.saved_input import last_input
from metis_hf.noise import samples
from metis_hf.operands import (
    Clamped,
    MeanRemoved,
    Operand,
    PerChannel,
    RandomHadamard,
    Requantized,
    Spectral,
    SplitWeight,
)
from metis_hf.schemes import Role

WIDTH, TOKENS = 512, 1536  # no saved tensor has the shape of a weight
LARGEST_SHARE = 0.33  # of what nn.Linear saves; the target
NVFP4_BITS = 4 + 8 / 16  # an E2M1 code, and 1/16 of an E4M3 scale
MXFP4_BITS = 4 + 8 / 32  # and 1/32 of an E8M0 scale
UFP4_BITS = 4 + 32 / 16  # and 1/16 of an fp32 scale
TENSOR_SCALE = 4  # bytes


def saved_tensors(layer, x, dtype):
    """What a forward pass saves beside parameters, by storage."""
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with autocast(dtype), saved_tensors_hooks(keep, lambda t: t):
        y = layer(x)
    y.float().sum().backward()
    params = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    return {pointer: t for pointer, t in kept.items() if pointer not in params}


def saved_bytes(layer, x, dtype=torch.bfloat16):
    """Bytes of those storages, casts of weights apart; a view of a large buffer counts as that."""
    matrices = [p.shape for p in layer.parameters() if p.dim() == 2]
    largest = max(matrices, key=torch.Size.numel)
    kept = saved_tensors(layer, x, dtype).values()
    activations = [t for t in kept if t.shape not in (largest, largest[::-1])]
    return sum(t.untyped_storage().nbytes() for t in activations)


def branch_bytes(layer, tokens):
    """What a branch beside the GEMM saves, as plain layers do in BF16: its inputs, and s in fp32.

    Of frozen factors (`tokens=0`) that is their casts.
    """
    if layer.scheme.weight != SplitWeight.beside_gemm(layer.scheme.rank):
        return 0
    k, i, o = layer.scheme.rank, layer.in_features, layer.out_features
    return 2 * tokens * (i + 2 * k) + 2 * k * (i + o) + 4 * k


def expected_bytes(layer, tokens, width):
    """By hand: x in FP4, and the factors and lengths of a split, or a mean."""
    operand = layer.scheme.resolve(Role.WGRAD_INPUT)[1]
    if operand.quantizer.fmt.name == "mxfp4":
        return tokens * width * MXFP4_BITS / 8
    if operand.quantizer.fmt.name == "ufp4":
        return tokens * width * UFP4_BITS / 8
    size = tokens * width * NVFP4_BITS / 8 + TENSOR_SCALE + branch_bytes(layer, tokens)
    if isinstance(operand.conditioner, MeanRemoved):
        mean = 4.0 * width if operand.conditioner.exact else width * NVFP4_BITS / 8 + TENSOR_SCALE
        size += mean
    if isinstance(operand.conditioner, Clamped):  # values and columns of 2 bytes, ends of rows of 4
        size += 2 * (tokens * width // 100) * (2 + 2) + 4 * tokens
    second = isinstance(operand.conditioner, Requantized) and operand.conditioner.second
    if isinstance(second, RandomHadamard):
        size += 4  # what the signs of a random rotation come from
    if isinstance(operand.conditioner, Spectral):
        # Blocks along features: of a [t k] along k, of v^T [k c] along c. Along tokens: along t, k.
        k = layer.scheme.fprop_input.conditioner.rank
        blocks = -(-k // 16)
        shared = layer.scheme.reuses(Role.WGRAD_INPUT)
        padded = (tokens, 16 * blocks, k, width) if shared else (tokens, k, 16 * blocks, width)
        size += (padded[0] * padded[1] + padded[2] * padded[3]) * NVFP4_BITS / 8
        size += 2 * TENSOR_SCALE + 4 * k
    return size


# Of a format and conditioner that another scheme has.
ALIKE = [(scheme, "contraction") for scheme in (
    "averis", "four-over-six", "four-over-six-unbiased", "mixfp4", "nvidia-unbiased",
    "nvidia-paper", "outlier-suppression-plus", "quip",
)]  # fmt: skip
ALIKE += [(scheme, "shared") for scheme in ("nvfp4-rne", "quarot", "svdquant")]


# What is saved is codes, whatever the dtype of x.
@cases(
    {"scheme, mode": in_one_mode(FP4_SCHEME_MODES)},
    rotated={"dtype": [torch.float32, torch.bfloat16]},
    slow=ALIKE,
)
def test_share_of_what_linear_saves(scheme, mode, dtype):
    """At most 0.33 of nn.Linear's under bf16 autocast, at width 512; and not a byte too many.

    4.5 bits of 16 are 0.281. A split of rank 48 adds 3/32 of that for its tokens' coordinates, 1/32
    for its basis (at 1536 tokens): 0.316. UFP4 has fp32 scales and so 6 bits: 0.375.
    """
    linear, layer = layer_of(scheme, mode, i=WIDTH, o=WIDTH)
    x = torch.randn(TOKENS, WIDTH, dtype=dtype).requires_grad_()
    dense, found = saved_bytes(linear, x), saved_bytes(layer, x)
    assert dense == 2 * TOKENS * WIDTH
    assert found == expected_bytes(layer, TOKENS, WIDTH)
    share = UFP4_BITS / 16 if scheme == "ufp4" else LARGEST_SHARE
    assert found - branch_bytes(layer, TOKENS) <= share * dense


class Attention(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self, make):
        super().__init__()
        self.projections = nn.ModuleList(make(number) for number in range(3))

    def forward(self, x):
        return sum(projection(x) for projection in self.projections)


def attention(scheme, width=WIDTH):
    return Attention(lambda n: layer_of(scheme, i=width, o=width, name=f"layer{n}")[1])


@pytest.mark.parametrize("scheme", ["nvfp4", "metis", "smoothquant"])
def test_layers_that_read_one_tensor_save_it_once(scheme):
    """As nn.Linear does, and in as many bytes as one layer; but for scales of each layer's own."""
    width, tokens = WIDTH // 2, TOKENS // 2
    x = torch.randn(tokens, width, dtype=torch.bfloat16).requires_grad_()
    dense = saved_bytes(Attention(lambda _: nn.Linear(width, width)), x)
    packed = attention(scheme, width)
    assert dense == 2 * tokens * width
    one = expected_bytes(packed.projections[0], tokens, width)
    own = isinstance(packed.projections[0].scheme.fprop_input.conditioner, PerChannel)
    assert saved_bytes(packed, x) == (3 * one if own else one)


def test_a_shared_input_gives_what_each_layer_gives_alone():
    packed = attention("metis-paper")
    x = matrix(64, WIDTH)
    together = [projection(x) for projection in packed.projections]
    alone = [projection(x.clone()) for projection in packed.projections]
    assert all(torch.equal(a, b) for a, b in zip(together, alone))


def test_what_is_shared_is_of_this_very_input(monkeypatch):
    """Not of another tensor, another mask, an earlier content, or another way to quantize."""
    calls = []
    original = Operand.encode
    monkeypatch.setattr(
        Operand, "encode", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    )

    def encodings(call):
        calls.clear()
        call()
        return len(calls)

    first, second, _ = attention("metis").projections
    _, other = layer_of("nvfp4", i=WIDTH, o=WIDTH)
    x = matrix(64, WIDTH)
    hashed = samples(torch.arange(x.numel()).view_as(x))  # by the fingerprint of x
    unseen = next(i for i in range(x.numel()) if i not in hashed)
    assert encodings(lambda: (first(x), second(x))) == 1
    assert encodings(lambda: (first(x.clone()), second(x.clone()))) == 2
    mask = torch.arange(64) % 2 > 0
    assert encodings(lambda: (first(x, mask), second(x, mask), second(x, ~mask), second(x))) == 3
    assert encodings(lambda: (first(x), x.view(-1)[unseen].mul_(2), second(x))) == 1
    assert encodings(lambda: (first(x), other(x), first(x))) == 2
    with torch.inference_mode():
        assert encodings(lambda: first(x)) == 0  # nothing is saved


@pytest.mark.parametrize("write", ["data", "other storage", "numpy"])
def test_what_is_kept_of_an_input_is_not_used_for_other_contents(write):
    """Also where the write counts no version: what is written through `.data`, or from numpy."""
    layer = attention("nvfp4").projections[0]
    x, other = matrix(64, WIDTH), matrix(64, WIDTH)
    layer(x)
    if write == "data":
        x.data.copy_(other)
    elif write == "numpy":
        x.numpy()[:] = other.numpy()
    else:
        x.data = other.clone()
    assert torch.equal(layer(x), layer(other))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "another thread"])
def test_a_shared_input_is_let_go_with_its_tensor(elsewhere):
    """Whichever thread ends the tensor: on a GPU that may be one of backward's."""
    first = attention("nvfp4").projections[0]
    held = [matrix(64, WIDTH)]
    first(held[0])
    assert not last_input.kept.is_empty
    if elsewhere:
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    else:
        held.clear()
    assert last_input.kept.is_empty


@pytest.mark.parametrize("scheme", of_each_kind(scheme_names()))
def test_frozen_weights_save_no_input(scheme):
    """As with nn.Linear: dx needs the weight alone. Under LoRA nothing is saved twice."""
    linear, layer = layer_of(scheme, i=64, o=48)
    x = torch.randn(40, 64).requires_grad_()
    for module in (linear, layer):
        module.requires_grad_(False)
        assert saved_bytes(module, x) == (branch_bytes(layer, 0) if module is layer else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_in_high_precision_saves_what_linear_saves(dtype):
    linear, layer = layer_of("metis", i=64, o=48, high_precision=("backward",))
    x = torch.randn(40, 64, dtype=dtype).requires_grad_()
    assert saved_bytes(layer, x) == saved_bytes(linear, x)


def test_nothing_of_the_shape_of_the_weight_is_saved():
    """Under FSDP2 whole copies would stay after the parameters are given back."""
    for scheme, mode in FP4_SCHEME_MODES:
        _, layer = layer_of(scheme, mode, i=WIDTH, o=112)
        kept = saved_tensors(layer, torch.randn(64, WIDTH), torch.bfloat16)
        assert kept
        thin = {112, layer.scheme.rank} if branch_bytes(layer, 0) else None
        of_weight = (t.shape for t in kept.values() if set(t.shape) != thin)
        assert all(112 not in shape for shape in of_weight), (scheme, mode)
