"""Compiled kernels give the reference's bits: nearest, stochastic, any shape, stride and value."""

from __future__ import annotations

import platform
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metis_hf import noise
from metis_hf.numerics import Quantizer, fake_quantize
from metis_hf.numerics.kernels import _covers, _padded_count, cpu, formulation, use_kernels
from metis_hf.numerics.kernels.formulation import BLOCK, Specialization
from metis_hf.numerics.kernels.layout import form_of, has_form, readable
from metis_hf.numerics.scaling import SCALE_NOISE
from numerics.cases import assert_same_bits
from numerics.helpers import note_tracing, seeded

FP32_MAX = torch.finfo(torch.float32).max
needs_compiler = pytest.mark.skipif(cpu.missing() is not None, reason="no C++ compiler")
# Together they have every branch of the formulation.
COMPILED = {
    "rows": (Quantizer(), -1, torch.float32),
    "rows, one level, up, bf16": (
        Quantizer(two_level=False, scale_rounding="up"),
        -1,
        torch.bfloat16,
    ),
    "columns, stochastic": (Quantizer(rounding="stochastic"), 0, torch.float32),
    "rows, 4/6": (Quantizer(scale_rule="four-over-six"), -1, torch.float32),
    "squares, 4/6, one level": (
        Quantizer(tile="square", scale_rule="four-over-six", two_level=False),
        -1,
        torch.float32,
    ),
    "columns, 4/6, stochastic": (
        Quantizer(rounding="stochastic", scale_rule="four-over-six"),
        0,
        torch.bfloat16,
    ),
    "rows, search": (Quantizer(scale_rule="search"), -1, torch.float32),
    "rows, MS-EDEN": (Quantizer(scale_rule="eden"), -1, torch.float32),
    "columns, MS-EDEN": (Quantizer(scale_rule="eden"), 0, torch.float32),
    "squares, MS-EDEN, up, one level": (
        Quantizer(tile="square", scale_rule="eden", scale_rounding="up", two_level=False),
        -1,
        torch.float32,
    ),
    "squares, up": (Quantizer(tile="square", scale_rounding="up"), -1, torch.float32),
    "rows, 16/17, stochastic": (
        Quantizer(rounding="stochastic", scale_rule="unbiased"),
        -1,
        torch.float32,
    ),
}
ALL = [
    Quantizer(
        rounding=rounding, scale_rounding=scale, two_level=two_level, tile=tile, scale_rule=rule
    )
    for rule in ("absmax", "four-over-six", "unbiased")
    for rounding in ("nearest", "stochastic")
    for scale in ("nearest", "up")
    for two_level in (True, False)
    for tile in ("row", "square")
] + [
    Quantizer(scale_rule=rule, scale_rounding=scale, two_level=two_level, tile=tile)
    for rule in ("search", "eden")
    for scale in ("nearest", "up")
    for two_level in (True, False)
    for tile in ("row", "square")
]


def both(quantizer: Quantizer, x: Tensor, kernel: str = "compiled", **options) -> None:
    """The kernel's result is the reference's; the input is left alone."""
    before = x.clone()
    with use_kernels("reference"):
        wanted = quantizer(x, key=5, **options)
    with use_kernels(kernel):
        actual = quantizer(x, key=5, **options)
    assert_same_bits(actual, wanted)
    assert_same_bits(x, before)


def traced(
    quantizer: Quantizer, x: Tensor, dim: int = -1, dtype=torch.float32, amax: Tensor | None = None
) -> Tensor:
    """The formulation run operation by operation: what compilers start from."""
    form = form_of(x, quantizer.tile, dim)
    variant = Specialization(
        "quantize",
        form.dims,
        bool(quantizer.two_level),
        quantizer.scale_rounding == "up",
        quantizer.rounding == "stochastic",
        True,
        dtype,
        rule=quantizer.scale_rule,
        given=amax is not None,
    )
    operand = readable(form.x)
    key = noise.Key(5) if variant.needs_noise else None
    if key is not None and quantizer.scale_rule == "eden":
        key = key.fold(SCALE_NOISE)
    return form.restore(formulation.run(variant, key, operand, amax)[0])


def adversarial() -> dict[str, Tensor]:
    """Tensors [32 48] where shortcuts in the arithmetic show."""
    g = seeded(0)
    normal = torch.randn(32, 48, generator=g)
    wide = normal * torch.exp2(torch.rand(32, 1, generator=g) * 40 - 20)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(32, 6)
    ties[::2] *= -1
    ties[0] = 2688
    scales = torch.zeros(32, 48)
    scales[:, ::16] = torch.exp2(torch.linspace(-20, 9, 96)).view(32, 3) * 6
    bits = torch.randint(-(2**31), 2**31 - 1, (32, 48), generator=g, dtype=torch.int64)
    tensors = {
        "normal": normal,
        "wide rows": wide,
        "ties": ties,
        "every E4M3 scale": scales,
        "ties of scales": scales * 1.0625,
        "any finite bits": bits.to(torch.int32).view(torch.float32).nan_to_num(1.0, 1.0, 1.0),
        "zero": torch.zeros(32, 48),
        "minus zero": -torch.zeros(32, 48),
        "some zero blocks": torch.where(torch.arange(48) < 20, normal, -0.0),
        "subnormal": normal * 1e-42,
        "tiny": normal * 1e-36,
        "largest": torch.full((32, 48), FP32_MAX),
        "largest and smallest": torch.where(torch.arange(48) % 2 == 0, FP32_MAX, -1e-45).repeat(
            32, 1
        ),
    }
    for name, value in {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}.items():
        tensors[name] = normal.clone()
        tensors[name][3, 20] = value
    return tensors


TENSORS = adversarial()


# --- the formulation -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TENSORS)
def test_every_choice_is_the_reference_to_the_bit(name) -> None:
    """The formulation, and the C++ where it can be compiled."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = TENSORS[name].to(dtype)
        for quantizer in ALL:
            for dim in (-1, 0) if quantizer.tile == "row" else (-1,):
                with use_kernels("reference"):
                    wanted = quantizer(x, dim=dim, key=5)
                assert_same_bits(traced(quantizer, x, dim), wanted)
                if cpu.missing() is None:
                    with use_kernels("compiled"):
                        assert_same_bits(quantizer(x, dim=dim, key=5), wanted)


def shapes(draw) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))


@st.composite
def tensors(draw, quantizers=tuple(ALL)) -> tuple[Tensor, Quantizer, int]:
    """A tensor of any shape and stride, how to quantize it, and along what."""
    quantizer = draw(st.sampled_from(quantizers))
    shape = shapes(draw)
    dim = draw(st.integers(-len(shape), -1))
    x = torch.randn(shape, generator=seeded(draw(st.integers(0, 99))))
    x = x * 2.0 ** draw(st.integers(-130, 120))
    x = x.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    if draw(st.booleans()) and len(shape) > 1:
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if draw(st.booleans()):
        x = torch.cat([x, x], -1)[..., 1::2][..., : shape[-1]]
    return x, quantizer, dim


@settings(deadline=None, max_examples=150, derandomize=True)
@given(tensors())
def test_shapes_and_strides(case) -> None:
    x, quantizer, dim = case
    if (quantizer.tile == "square" and x.dim() < 2) or not has_form(x, quantizer.tile, dim):
        return
    with use_kernels("reference"):
        wanted = quantizer(x, dim=dim, key=5)
    assert_same_bits(traced(quantizer, x, dim), wanted)
    if cpu.missing() is None:
        with use_kernels("compiled"):
            assert_same_bits(quantizer(x, dim=dim, key=5), wanted)


# --- compiled ------------------------------------------------------------------------------------


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
    x = torch.randn(1024, 200, generator=seeded(4))  # 800 tiles of 16 x 16 or more
    x[700, 100] = 1e5
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for quantizer, dim, dtype in COMPILED.values():
            both(quantizer, x, dim=dim, dtype=dtype)
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize("flags", [["-mno-avx512f"], ["-mno-avx2", "-mno-avx512f"]])
def test_smaller_vectors(flags, tmp_path, monkeypatch) -> None:
    """The widths of registers of older x86 and of ARM, where this machine's are wider."""
    if platform.machine() not in ("x86_64", "AMD64"):
        flags = []
    library = cpu.build(tmp_path / "cpu.so", flags)
    monkeypatch.setattr(cpu, "load", lambda: library)
    for quantizer, dim, dtype in COMPILED.values():
        for x in TENSORS.values():
            both(quantizer, x.to(dtype), dim=dim, dtype=dtype)


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
        wanted = traced(Quantizer(), x)
        assert sum(r.shape == x.shape and torch.equal(r, wanted) for r in results) == 20


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_inside_a_compiled_function(rounding, monkeypatch) -> None:
    """One graph, the formulation in it: no kernel of its own, and no break for the key."""
    quantizer = Quantizer(rounding=rounding)
    layer = noise.key_of("layer")

    def call(x: Tensor) -> Tensor:
        key = layer.with_data(noise.fingerprint(x))
        return quantizer(x, key=key) @ quantizer(x.t(), dim=0, key=key)

    noted = note_tracing(monkeypatch)
    whole = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (32, 48, 64):
        x = torch.randn(rows, 64, generator=seeded(rows))
        with use_kernels("reference"):
            wanted = call(x)
        with use_kernels(None):
            assert torch.equal(whole(x), wanted)
    assert set(noted) == {"quantize"}


# --- layouts -------------------------------------------------------------------------------------


def test_forms_cover_whole_blocks() -> None:
    x = torch.randn(3, 20, 33)
    assert has_form(x, Quantizer().tile, -1)
    assert not has_form(x, Quantizer().tile, 0)
    assert not has_form(x, Quantizer().tile, 1)  # padded rows would move the noise
    assert form_of(x, Quantizer().tile, -1).x.shape == (3 * 20 * 3, BLOCK)
    matrix = form_of(x[0], Quantizer().tile, 0)
    assert matrix.x.shape == (2, BLOCK, 3, BLOCK)
    assert_same_bits(matrix.restore(matrix.x), x[0])


@pytest.mark.parametrize(
    ("shape", "count"),
    [((), 1), ((5,), 16), ((3, 16), 256), ((2, 17, 1), 2 * 32 * 16), ((0, 4), 0)],
)
def test_padding_counts_where_places_have_32_bits(shape, count):
    assert _padded_count(torch.Size(shape)) == count


def test_a_tensor_that_padding_makes_too_large_is_left_to_the_reference():
    x = torch.empty(2**27 + 1, 15, device="meta")
    assert x.numel() < 2**31
    assert not _covers(x, Quantizer(), -1, torch.float32, None, None)
    assert _covers(x[: 2**20], Quantizer(), -1, torch.float32, None, None)
