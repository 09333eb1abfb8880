"""Triton kernels compiled for GPUs that need not be there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess

import pytest
import torch
from design import thinned

from metis_hf import noise
from metis_hf.numerics import Quantizer
from numerics.helpers import seeded
from numerics.kernels.triton_cases import BY_ROW, STOCHASTIC

compiles = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is not installed, or TRITON_INTERPRET=1: it compiles nothing",
)
AMPERE, HOPPER, BLACKWELL = 80, 90, 100  # compute capability


class Recorder:
    """Stands for a kernel: compiles it for a GPU as a launch would, and launches nothing."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.compiled: list = []

    def __getitem__(self, grid):
        def launch(*args, **options) -> None:
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))

        return launch


def recorded(monkeypatch, module, name: str) -> Recorder:
    """Let a recorder stand for a kernel of a module."""
    recorder = Recorder(getattr(module, name))
    monkeypatch.setattr(module, name, recorder)
    return recorder


@pytest.fixture
def compile_for(monkeypatch, tmp_path):
    """A function that makes launches compile for a GPU of some compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget

    from metis_hf.numerics.kernels import triton_amax, triton_kernels

    def use(capability: int) -> tuple[Recorder, Recorder]:
        class Driver:
            def get_current_device(self) -> int:
                return capability  # so that what is compiled for one GPU is not taken for another

            def get_current_stream(self, device: int) -> int:
                return 0

            def get_current_target(self) -> GPUTarget:
                return GPUTarget("cuda", capability, 32)

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
        amax = recorded(monkeypatch, triton_amax, "find_amax")
        return amax, recorded(monkeypatch, triton_kernels, "quantize")

    return use


def assert_ieee(ptx: str) -> None:
    """No fused multiply-add, no approximation, nothing flushed to zero but by `floor`."""
    assert not re.search(r"\b(fma|mad\.f|approx|full)\b|\.(approx|full)\b", ptx)
    assert set(re.findall(r"\S+\.ftz\S*", ptx)) <= {"cvt.rmi.ftz.f32.f32"}
    assert "e4m3" not in ptx


def vector_loads(kernel) -> int:
    return len(re.findall(r"ld\.global\S*\.v4\.b32", kernel.asm["ptx"]))


def spilled(kernel, folder) -> int:
    """Bytes of a thread's local memory that a compiled kernel takes: what left its registers."""
    from triton import knobs

    (folder / "cubin").write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "cubin")]
    used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", used)[1])


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("capability", thinned([AMPERE, HOPPER, BLACKWELL], HOPPER.__eq__))
def test_compiled_for_gpus(compile_for, capability) -> None:
    """The arithmetic that the interpreter checks is what the compiler makes of it."""
    from metis_hf.numerics.kernels.triton_launch import fake_quantize, pack

    amax, write = compile_for(capability)
    x = torch.randn(64, 256, generator=seeded(0))
    low = x + 1
    key = noise.Key(4, torch.tensor(3, dtype=torch.int32))
    square = Quantizer(tile="square", scale_rounding="up", two_level=False)
    plain = {"dim": -1, "key": None, "dtype": torch.float32, "scaled": True}
    fake_quantize(x, Quantizer(), **plain)
    fake_quantize(x, STOCHASTIC, **{**plain, "key": key}, minus=low, plus=low)
    columns = {**plain, "dim": 0, "dtype": torch.bfloat16}
    fake_quantize(x.bfloat16(), Quantizer(), **columns, minus=low, plus=x)
    fake_quantize(x.half(), square, **{**plain, "dtype": torch.float16})
    pack(x.half(), square, dim=-1, key=None)
    pack(x.bfloat16(), STOCHASTIC, dim=0, key=key)
    for eden in (Quantizer(scale_rule="eden"), Quantizer(scale_rule="eden", tile="square")):
        fake_quantize(x.bfloat16(), eden, **{**plain, "key": key})
    fake_quantize(x, BY_ROW[0], **plain, minus=low)
    assert len(amax.compiled) == 7
    assert len(write.compiled) == 9
    for kernel in [*amax.compiled, *write.compiled]:
        assert_ieee(kernel.asm["ptx"])
    assert all("red." in kernel.asm["ptx"] for kernel in amax.compiled)
    assert all("div.rn.f32" in kernel.asm["ptx"] for kernel in write.compiled)
    rows, same, both, *_ = write.compiled
    assert vector_loads(rows) == 4  # 16 fp32 elements of a thread
    assert vector_loads(same) == 8  # and a split's, read once
    assert vector_loads(both) == 10  # 16 bf16 elements, and two fp32 tensors'
    assert "cvt.rn.bf16x2.f32" in both.asm["ptx"]


@compiles
@pytest.mark.slow
def test_nothing_is_compiled_again(compile_for) -> None:
    """Number of rows, values and keys change; the kernel stays."""
    from metis_hf.numerics.kernels.triton_launch import fake_quantize

    amax, write = compile_for(HOPPER)
    for rows, key in ((64, 4), (1, 5), (48, 1), (33, 0)):
        x = torch.randn(rows, 64, generator=seeded(rows))
        options = {"key": key, "dtype": torch.float32, "scaled": True}
        fake_quantize(x, STOCHASTIC, dim=0, **options, minus=x, plus=x)
    for recorder in (amax, write):
        assert len(recorder.compiled) == 4
        assert len({id(kernel) for kernel in recorder.compiled}) == 1


@compiles
@pytest.mark.slow
def test_packing_is_compiled_for_gpus(compile_for, monkeypatch) -> None:
    """Both ways, along rows and columns, with several scales tried for each block."""
    from metis_hf.numerics.kernels import triton_kernels
    from metis_hf.numerics.kernels.triton_launch import pack, unpack

    _, write = compile_for(HOPPER)
    read = recorded(monkeypatch, triton_kernels, "unpack")
    low = torch.randn(64, 256, generator=seeded(0))
    x = low.bfloat16()
    square = Quantizer(tile="square", scale_rule="four-over-six")
    cases = ((BY_ROW[0], -1), (Quantizer(scale_rule="search"), -1), (STOCHASTIC, 0), (square, -1))
    for quantizer, dim in cases:
        for minus, dtype in ((None, torch.bfloat16), (low, torch.float32)):
            packed = pack(x, quantizer, dim=dim, key=3, minus=minus)
            options = {"shape": (64, 256), "dtype": dtype, "scaled": minus is not None}
            unpack(packed, quantizer, dim=dim, plus=minus, **options)
    assert len(write.compiled) == len(read.compiled) == 8
    for kernel in [*write.compiled, *read.compiled]:
        assert_ieee(kernel.asm["ptx"])


@compiles
@pytest.mark.slow
def test_rotations_are_compiled_for_gpus(compile_for, monkeypatch) -> None:
    """Sums are not fused with the products before them; keys and numbers of rows change nothing."""
    from metis_hf.numerics.kernels import triton_kernels
    from metis_hf.numerics.kernels.layout import Groups
    from metis_hf.numerics.kernels.triton_launch import fake_quantize, pack, unpack

    amax, write = compile_for(HOPPER)
    read = recorded(monkeypatch, triton_kernels, "unpack")
    cases = (0, 16), (0, 128), (-1, 128)
    for dim, size in cases:
        for rows in (128, 384):
            key = noise.Key(rows, torch.tensor(3, dtype=torch.int32))
            x, groups = torch.randn(rows, 256).bfloat16(), Groups(size, key.fold(1))
            options = {"dim": dim, "key": key, "groups": groups}
            to = {"dtype": torch.bfloat16, "scaled": True}
            fake_quantize(x, STOCHASTIC, **options, **to)
            packed = pack(x, STOCHASTIC, **options)
            shape = tuple(x.shape)
            unpack(packed, STOCHASTIC, dim=dim, groups=groups, shape=shape, **to)
    for recorder, different in ((amax, 3), (write, 6), (read, 3)):
        assert len({id(kernel) for kernel in recorder.compiled}) == different
        for kernel in recorder.compiled:
            assert_ieee(kernel.asm["ptx"])


@compiles
@pytest.mark.slow
def test_low_rank_parts_are_compiled_for_gpus(compile_for, monkeypatch, tmp_path) -> None:
    """Multiplied by tensor cores, in registers; by one product in all kernels, so to the bit."""
    from metis_hf.numerics.kernels import triton_kernels
    from metis_hf.numerics.kernels.layout import Low
    from metis_hf.numerics.kernels.triton_launch import fake_quantize, pack_with_values, unpack

    amax, write = compile_for(HOPPER)
    read = recorded(monkeypatch, triton_kernels, "unpack")
    x = torch.randn(64, 256, generator=seeded(0)).bfloat16()
    for quantizer, rank in ((Quantizer(scale_rule="search"), 48), (STOCHASTIC, 12)):
        options = {"dim": -1, "key": 3, "dtype": torch.bfloat16, "scaled": True}
        factors = (torch.zeros(64, rank), torch.zeros(rank, 256))
        left, right = (pack_with_values(each, quantizer, **options)[0] for each in factors)
        for recorder in (amax, write):
            recorder.compiled.clear()
        low = Low(left, torch.zeros(rank), right)
        packed, _ = pack_with_values(x, quantizer, **options, low=low)
        fake_quantize(x, quantizer, **options, low=low)
        del options["key"]
        unpack(packed, quantizer, shape=(64, 256), **options, low=low)
        kernels = [*amax.compiled, *write.compiled, read.compiled[-1]]
        assert len(kernels) == 5
        products = {tuple(re.findall(r"wgmma.mma_async\S+", k.asm["ptx"])) for k in kernels}
        assert len(products) == 1
        assert "f32.bf16.bf16" in str(products)
        for kernel in kernels:
            assert not re.search(r"approx", kernel.asm["ptx"])
            assert spilled(kernel, tmp_path) == 0


@compiles
@pytest.mark.slow
def test_magnitudes_of_several_tensors_are_compiled_for_gpus(compile_for) -> None:
    """In one launch, which reads both as vectors."""
    from metis_hf.numerics.kernels.layout import Groups
    from metis_hf.numerics.kernels.scratch import WORDS, Measured, Scratch
    from metis_hf.numerics.kernels.triton_launch import fake_quantize

    amax, _ = compile_for(HOPPER)
    for rows in (64, 48):
        x, other = torch.randn(rows, 256).bfloat16(), torch.randn(256, rows)
        scratch = Scratch(torch.zeros(WORDS, dtype=torch.int32))
        key, groups = noise.Key(rows, scratch=scratch), Groups(16)
        scratch.expect(Measured(x), Measured(other), Measured(x, groups, 0))
        fake_quantize(x, Quantizer(), dim=-1, key=key, dtype=torch.float32, scaled=True)
        assert scratch.expected() == []
        fake_quantize(other, Quantizer(), dim=-1, key=key, dtype=torch.float32, scaled=True)
    assert len({id(kernel) for kernel in amax.compiled}) == 1
    assert len(amax.compiled) == 2
    ptx = amax.compiled[0].asm["ptx"]
    assert_ieee(ptx)
    assert len(re.findall(r"red\.\S*max", ptx)) == 3
    assert vector_loads(amax.compiled[0]) >= 4


@compiles
@pytest.mark.slow
def test_noise_is_compiled_for_gpus(compile_for, monkeypatch) -> None:
    """Once, whatever the sizes and the keys."""
    from metis_hf.numerics.kernels import triton_noise

    compile_for(HOPPER)
    draw = recorded(monkeypatch, triton_noise, "draw")
    samples = recorded(monkeypatch, triton_noise, "hash_samples")
    both = recorded(monkeypatch, triton_noise, "hash_both")
    for rows in (16, 33, 1):
        key = noise.Key(rows, torch.tensor(3, dtype=torch.int32))
        triton_noise.uniform(torch.Size((rows, 48)), key, torch.device("cpu"))
        triton_noise.fingerprint(torch.zeros(rows, 4096))
        triton_noise.fingerprints(torch.zeros(rows, 4096), torch.zeros(4096, rows), rows)
    for recorder in (draw, samples, both):
        assert len(recorder.compiled) == 3
        assert len({id(kernel) for kernel in recorder.compiled}) == 1
        assert_ieee(recorder.compiled[0].asm["ptx"])


@compiles
@pytest.mark.slow
def test_the_epilogue_is_compiled_for_gpus(compile_for, monkeypatch) -> None:
    """It reads what it multiplies as vectors, and rounds before it adds."""
    from metis_hf.numerics.kernels import triton_epilogue

    compile_for(HOPPER)
    recorder = recorded(monkeypatch, triton_epilogue, "finish")
    for rows in (64, 48):  # and is not compiled again
        out = torch.zeros(rows, 48, dtype=torch.bfloat16)
        scale, bias = torch.ones(()), torch.zeros(48)
        triton_epilogue.finish_product(out, [scale], None)
        triton_epilogue.finish_product(out, [scale, torch.ones(rows, 1)], bias)
        triton_epilogue.finish_product(out, [], bias.bfloat16())
    assert len({id(kernel) for kernel in recorder.compiled}) == 3
    for kernel in recorder.compiled:
        assert_ieee(kernel.asm["ptx"])
        assert vector_loads(kernel) >= 2  # 16 bf16 elements of a thread
    assert "fma" not in "".join(kernel.asm["ptx"] for kernel in recorder.compiled)


@compiles
@pytest.mark.slow
def test_second_terms_are_compiled_for_gpus(compile_for, monkeypatch, tmp_path) -> None:
    """On tensor cores, in registers, and not again for another number of whole blocks of rows."""
    from metis_hf.numerics.kernels import triton_epilogue

    compile_for(HOPPER)
    names = "finish", "find_error"
    recorders = [recorded(monkeypatch, triton_epilogue, name) for name in names]
    scale, bias, lengths = torch.ones(()), torch.zeros(96), torch.ones(48)
    for rows in (64, 144):
        out = torch.zeros(rows, 96, dtype=torch.bfloat16)
        near, far = (torch.zeros(n, 48, dtype=torch.bfloat16) for n in (96, rows))
        triton_epilogue.finish_product(out, [scale], bias, (far, near.T))
        for matrix in (out, torch.zeros(96, rows, dtype=torch.bfloat16).T):
            triton_epilogue.error_along(matrix, matrix, scale, near, lengths, None)
    compiled = {id(kernel): kernel for recorder in recorders for kernel in recorder.compiled}
    assert len(compiled) == 3
    for kernel in compiled.values():
        assert not re.search(r"approx|ftz", kernel.asm["ptx"])
        assert re.search(r"wgmma|mma\.sync", kernel.asm["ptx"])
        assert "ld.global.b16" not in kernel.asm["ptx"]  # all is read in vectors
        assert spilled(kernel, tmp_path) == 0


@compiles
@pytest.mark.slow
def test_sums_of_rows_are_compiled_for_gpus(compile_for, monkeypatch) -> None:
    """Rows are read as vectors, whatever their number."""
    from metis_hf.numerics.kernels import triton_sums

    compile_for(HOPPER)
    recorder = recorded(monkeypatch, triton_sums, "add_rows")
    key = noise.Key(3, torch.tensor(3, dtype=torch.int32))
    for sums, stretches in ((16, 4), (17, 3), (1, 70)):
        x = torch.zeros(sums * stretches, 256, dtype=torch.bfloat16)
        triton_sums.sum_rows(x, sums, stretches, key.fold(1), key, None)
    assert len({id(kernel) for kernel in recorder.compiled}) == 1
    assert_ieee(recorder.compiled[0].asm["ptx"])
    assert vector_loads(recorder.compiled[0]) == 2  # 16 bf16 elements of a thread


@compiles
@pytest.mark.slow
def test_projections_are_compiled_for_gpus(compile_for, monkeypatch, tmp_path) -> None:
    """By two kernels, whatever the number of rows, and none with approximate divisions."""
    from metis_hf.numerics.kernels import triton_projection

    compile_for(HOPPER)
    names = ("multiply", "to_unit_columns")
    recorders = [recorded(monkeypatch, triton_projection, name) for name in names]
    for rows in (256, 1000):
        x, v = torch.zeros(rows, 96, dtype=torch.bfloat16), torch.zeros(48, 96).T
        triton_projection.project(x, v, None)
    for recorder in recorders:
        assert len({id(kernel) for kernel in recorder.compiled}) == 1
        kernel = recorder.compiled[0]
        assert not re.search(r"approx|ftz", kernel.asm["ptx"])
        assert spilled(kernel, tmp_path) == 0
    assert "wgmma.mma_async.sync.aligned.m64n" in recorders[0].compiled[0].asm["ptx"]


@compiles
@pytest.mark.slow
def test_bases_are_compiled_for_gpus(compile_for, monkeypatch, tmp_path) -> None:
    """Once for each size of a block, which stays in registers, and for each kind of launch."""
    from metis_hf.numerics.kernels import triton_basis

    compile_for(HOPPER)
    names = {"find_largest": 2, "multiply": 4, "turn": 6}
    recorders = {name: recorded(monkeypatch, triton_basis, name) for name in names}
    limits = triton_basis.Limits(1e-6, 1e-18, 1e-12)
    for width in (12, 56, 50):
        sample = torch.zeros(20 * width, 768, dtype=torch.bfloat16)
        triton_basis.dominant_basis(sample, width, 1, noise.Key(width), None, limits)
    for name, different in names.items():
        compiled = {id(kernel): kernel for kernel in recorders[name].compiled}
        assert len(compiled) <= different, name
        for kernel in compiled.values():
            assert spilled(kernel, tmp_path) == 0, name
            assert kernel.metadata.shared <= 99 * 1024  # of the smallest GPU since Ampere
    assert_ieee(recorders["find_largest"].compiled[0].asm["ptx"])
    assert recorders["turn"].compiled[0].metadata.num_warps == 1  # of the narrowest block
    factor = recorders["turn"].compiled[-2].asm["ptx"]
    assert not re.search(r"approx|ftz", factor)
    assert "atom.acq_rel.gpu.global.add" in factor or "atom.global.gpu.acq_rel.add" in factor
