"""Counter-based noise: uniform, independent between keys, and nothing taken from torch."""

import functools
import sys
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from metis_hf import noise
from metis_hf.noise import Key, fingerprint, key_of, uniform

N = 1 << 20
SIGMA_MEAN = (1 / 12 / N) ** 0.5  # standard error of the mean of N uniform draws


class Operations(TorchDispatchMode):
    """Notes the operations in it; noise is computed by torch there."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_moments_and_range():
    for key in (
        Key(0),
        Key(1),
        key_of("layer", 0, "x"),
        Key(5, torch.tensor(9, dtype=torch.int32)),
    ):
        u = uniform((N,), key).double()
        assert u.min() >= 0
        assert u.max() < 1
        assert abs(u.mean() - 0.5) < 4 * SIGMA_MEAN
        # Var of the sample variance of a uniform: (1/80 - 1/144) / N.
        assert abs(u.var() - 1 / 12) < 4 * ((1 / 80 - 1 / 144) / N) ** 0.5
        assert torch.equal(u * 2**24, (u * 2**24).round())
        # All 24 bits count: the low ones are as uniform as the high ones.
        counts = torch.bincount((u * 2**24).long() % 256, minlength=256).double()
        assert ((counts - N / 256).square() / (N / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5


def test_pairs_of_keys_and_of_neighbours_are_independent():
    """Chi-squared of the joint histogram of 16 x 16 cells, within 5 sigma of its mean 255."""

    def chi2(a, b):
        cell = (a * 16).long() * 16 + (b * 16).long()
        counts = torch.bincount(cell, minlength=256).double()
        return ((counts - N / 256).square() / (N / 256)).sum().item()

    # Neighbouring words of data are the keys most alike.
    values = (1, 2, 1 << 16, 3 << 16, 1 << 24, -(2**31), -1, 0x5A5A0000)
    data = [torch.tensor(value, dtype=torch.int32) for value in values]
    keys = [Key(1), Key(2), Key(0x80000001), Key(3).fold(1), Key(3).fold(2)]
    keys += [Key(1, value) for value in data]
    streams = [uniform((N,), key) for key in keys]
    limit = 255 + 5 * (2 * 255) ** 0.5
    for i, a in enumerate(streams):
        for b in streams[i + 1 :]:
            assert chi2(a, b) < limit
    for lag in (1, 2, 16, 64, 192, 1024):
        assert chi2(streams[0], streams[0].roll(lag)) < limit


def test_keys_that_start_close_together_share_no_stretch():
    """A stream counts from its key's first word on; a second one tells those of close keys apart.

    Among 2^17 keys some start within 8 blocks of each other.
    """
    data = torch.arange(1 << 17, dtype=torch.int32)
    first, order = torch.tensor([noise.seeds(Key(1, each))[0] for each in data]).sort()
    close = (first[1:] - first[:-1] <= 8).nonzero()[:, 0]
    assert len(close) > 8
    for place in close[:8].tolist():
        shift = int(first[place + 1] - first[place])
        early, late = (uniform((4096,), Key(1, data[order[index]])) for index in (place, place + 1))
        assert (early[16 * shift :] != late[: 4096 - 16 * shift]).float().mean() > 0.99


def test_longer_tensors_continue_the_stream():
    n = (1 << 22) + 8
    assert torch.equal(uniform((n,), Key(3))[: 1 << 20], uniform((1 << 20,), Key(3)))


def test_function_of_the_key_alone():
    before = torch.get_rng_state()
    a = uniform((100, 3), Key(7))
    assert torch.equal(a, uniform((100, 3), Key(7)))
    assert torch.equal(a, uniform((100, 16), Key(7))[:, :3])
    assert torch.equal(before, torch.get_rng_state())


def test_rows_are_as_good_as_padded():
    """Noise belongs to the row and the place in it, and no element is left without."""
    for shape in ((7,), (100, 3), (2, 0, 5), (1,), (), (3, 0), (4, 5, 33)):
        u = uniform(shape, Key(7))
        assert u.shape == shape
        width = shape[-1] if shape else 1
        padded = -(-width // 16) * 16
        rows = u.numel() // width if width else 0
        stream = uniform((rows * padded,), Key(7)).view(rows, padded)[:, :width]
        assert torch.equal(u.flatten(), stream.flatten())


def test_fingerprint_follows_content():
    x = torch.randn(64, 48)
    assert fingerprint(x) == fingerprint(x.clone())
    assert fingerprint(x.T.contiguous().T) == fingerprint(x)
    assert fingerprint(x) != fingerprint(x + 1e-6)
    assert fingerprint(x) != fingerprint(x.roll(1))
    assert fingerprint(torch.empty(0, 4)) == 0


def test_what_is_not_contiguous_has_the_fingerprint_of_its_copy():
    wide = torch.randn(3, 70, 130, generator=torch.Generator().manual_seed(2))
    for x in (
        wide[0].T,
        wide.bfloat16()[1].T,
        wide.permute(1, 2, 0),
        wide[:, 3:50, 7:99],
        wide[:, ::3, ::2],
        wide[:2, :5, :7].mT,
        wide[0, :1, :1].expand(40, 50),
        wide[0, 0].expand(9, 130).T,
        wide[:, 5, 6],
        wide.to(torch.float64).mT,
        (wide * 9).int().mT,
    ):
        copied = x.clone(memory_format=torch.contiguous_format)
        assert fingerprint(x) == fingerprint(copied), (x.shape, x.stride(), x.dtype)


def test_the_fingerprint_of_a_transposed_weight_copies_a_few_elements():
    """The weight of a Conv1D, at every call of a layer."""
    x = torch.randn(512, 384).T
    made = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != x.data_ptr():
                made.append(out.numel())
            return out

    with Note():
        fingerprint(x)
    assert 0 < max(made) <= 2 * noise.SAMPLES


def test_samples_see_all_columns_and_rows():
    """No block of a sixteenth of the rows or columns is without one."""
    for shape in ((4096, 4096), (768, 768), (256, 15), (768, 1001), (1280, 127), (11008, 300)):
        places = noise.samples(torch.arange(shape[0] * shape[1]).view(shape))
        assert len(set(places.tolist())) == noise.SAMPLES
        for index, size in zip(torch.unravel_index(places, shape), shape):
            parts = min(16, size)
            assert (index * parts // size).unique().numel() == parts


def test_samples_of_few_elements_are_all():
    for count in (1, 200, noise.SAMPLES):
        assert noise.samples(torch.arange(count)).tolist() == [*range(count)]


def test_micro_batches_that_begin_alike_have_their_own_fingerprints():
    """Every sequence has the same first token, and so the same first vector."""
    for sequences in (64, 256, 512):
        one, other = torch.randn(2, sequences, 9, 256)
        other[:, 0] = one[:, 0] = torch.randn(256)
        assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fingerprints_of_different_tensors_differ(dtype):
    """32 bits in every dtype: among 4096 random tensors hardly any two are alike.

    4096 values of b random bits hold 4096^2 / 2^(b+1) equal pairs on average: 0.002 of 32 bits,
    128 of 16.
    """
    g = torch.Generator().manual_seed(0)
    found = {int(fingerprint(torch.randn(64, 64, generator=g).to(dtype))) for _ in range(4096)}
    assert len(found) >= 4095


@pytest.mark.parametrize("shape", [(64, 48), (1024, 1024)], ids=str)
def test_fingerprint_follows_structured_changes(shape):
    """Changes that touch the same bits of every element must not cancel in the sum."""
    x = torch.randn(shape)
    changed = [-x, 2 * x, x / 4, x.flip(0), x.roll(1, 0)]
    assert len({int(fingerprint(each)) for each in (x, *changed)}) == 6


def test_constants_made_in_inference_mode_are_not_kept():
    """Autograd could not save them for a backward pass that comes later."""
    made = noise.constant(lambda size: torch.ones(size))
    with torch.inference_mode():
        made(3)
    kept = made(3)
    assert not kept.is_inference()
    assert made(3) is kept


def test_constants_are_no_real_tensors_under_a_mode_that_fakes_them():
    """It refuses real ones among its own."""
    made = noise.constant(lambda size: torch.ones(size))
    kept = made(3)
    with FakeTensorMode() as mode:
        assert (made(3) + torch.ones(3)).fake_mode is mode
    assert made(3) is kept


def test_constants_that_may_be_many_are_forgotten_but_for_the_last_used():
    made = functools.partial(noise.constant, most=2)(lambda size: torch.ones(size))
    first, second = made(1), made(2)
    assert made(1) is first
    third = made(3)  # in the place of 2, which was used before 1
    assert made(1) is first
    assert made(3) is third
    assert made(2) is not second


def test_constants_that_a_graph_was_recorded_with_stay(monkeypatch):
    """It reads their memory whenever it is played."""
    made = functools.partial(noise.constant, most=2)(lambda size: torch.ones(size))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recorded = made(1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    other = made(2)
    made(3), made(4)
    assert made(1) is recorded
    assert made(2) is not other


def test_threads_may_share_constants():
    """Those of a model that several threads run, more of them than are kept."""
    made = functools.partial(noise.constant, most=4)(lambda size: torch.ones(size))
    failed = []

    def use(first: int) -> None:
        try:
            for call in range(5000):
                assert made(1 + (first + call) % 8).numel() == 1 + (first + call) % 8
        except Exception as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed


def test_a_parameter_s_fingerprint_is_looked_for_as_a_tensor_s(monkeypatch):
    """Kernels take plain tensors: a weight, too, has its fingerprint in one launch on a GPU."""
    asked = []
    monkeypatch.setattr(noise, "one_launch", lambda x: asked.append(type(x)))
    weight = torch.nn.Parameter(torch.randn(3, 5))
    assert fingerprint(weight) == fingerprint(weight.detach())
    assert asked == [torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("shape", [(), (1,), (40, 17), (3, 0), (4, 2**14)], ids=str)
def test_the_host_hashes_to_torch_s_bits(shape):
    """Noise of small tensors is computed without torch where the CPU holds the key."""
    words = (torch.tensor(v, dtype=torch.int32) for v in (0, -1, 2**31 - 1, -(2**31)))
    keys = [Key(static, data) for data in (None, *words) for static in (0, 7, 0xFFFFFFFF)]
    on_host = [uniform(shape, key) for key in keys]
    with Operations() as operations:
        by_torch = [uniform(shape, key) for key in keys]
    assert "mul_" in operations.names
    assert all(map(torch.equal, on_host, by_torch))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_host_s_fingerprint_is_torch_s(dtype):
    tensors = [
        torch.nn.Parameter(torch.randn(shape).to(dtype))
        for shape in ((), (0,), (5,), (16, 16), (100, 64))
    ]
    on_host = list(map(fingerprint, tensors))
    with Operations() as operations:
        of_torch = list(map(fingerprint, tensors))
    assert "mul_" in operations.names
    for found, by_torch in zip(on_host, of_torch, strict=True):
        assert (found.dtype, found.shape) == (by_torch.dtype, by_torch.shape)
        assert torch.equal(found, by_torch)


def test_what_stands_for_a_tensor_is_left_to_torch():
    """Its numbers are not there, or not those of the next call."""
    key = Key(3, torch.tensor(5, dtype=torch.int32))
    with FakeTensorMode() as mode:
        drawn = uniform((20,), Key(3, mode.from_tensor(key.data)))
        assert drawn.fake_mode is mode
        assert fingerprint(drawn).fake_mode is mode
    functional = torch._to_functional_tensor(drawn := torch.randn(20))
    assert torch.equal(torch._from_functional_tensor(fingerprint(functional)), fingerprint(drawn))


def test_torch_compile_draws_the_same_noise():
    """With the data of a key, which the host must not read while a graph is traced."""

    def draw(data):
        return uniform((4, 20), Key(8, data))

    data = torch.tensor(3, dtype=torch.int32)
    compiled = torch.compile(draw, backend="eager", fullgraph=True)
    assert torch.equal(compiled(data), draw(data))


@pytest.mark.parametrize(
    "trace",
    [
        lambda f, x: make_fx(f)(x),
        lambda f, x: make_fx(f, pre_dispatch=True)(x),
        lambda f, x: torch.jit.trace(f, (x,)),
    ],
    ids=["make_fx", "pre-dispatch", "jit"],
)
def test_no_number_of_the_traced_call_stays(trace):
    def draw(data):
        return uniform((20,), Key(3, data))

    data = torch.tensor([5, 9], dtype=torch.int32)
    traced = trace(draw, data[0])
    assert torch.equal(traced(data[1]), draw(data[1]))


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_traced_fingerprint_follows_the_tensor(pre_dispatch):
    x = torch.randn(20)
    traced = make_fx(fingerprint, pre_dispatch=pre_dispatch)(torch.zeros(20))
    assert torch.equal(traced(x), fingerprint(x))
