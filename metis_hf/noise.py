"""Stateless noise: a pure function of a key and an element's index.

Layers derive their keys from (seed, layer, rank, operand) and a fingerprint of the tensors that
they quantize. Layers therefore draw nothing from torch's generators, need no step counter, and see
the same noise again when a forward pass is recomputed (any kind of activation checkpointing) or a
run is resumed.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._pytree import tree_leaves

P = ParamSpec("P")
T = TypeVar("T")
Words = TypeVar("Words", Tensor, NDArray[np.int32])

SAMPLES = 256  # most elements that a fingerprint hashes
_PLACES_KEPT = 512  # results in the caches of `_places` and `_places_in`
_LARGEST_LAUNCH = 2**31 - 1024  # elements: kernels use 32-bit indices
_LARGEST_ON_HOST = 2**16  # elements: torch hashes larger tensors, on several threads
_MASK32 = 0xFFFFFFFF
_LANES = 16  # consecutive elements of a row that share the first half of the hash
# Multipliers of the "lowbias32" integer hash (C. Wellons, hash-prospector), as signed int32.
_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)


class Key(NamedTuple):
    """The identity of one use of noise: all that the noise depends on besides the element index.

    Attributes:
        static: 32 bits known to the host; folding costs nothing on the device.
        data: 0-dim int32 tensor on the device (a fingerprint), or None.
        scratch: `Scratch` memory of the layer's call, for kernels; the noise does not depend on it.
    """

    static: int
    data: Tensor | None = None
    scratch: Any = None

    def fold(self, part: int) -> Key:
        """Return a different key, for another use of noise in the same call."""
        # Not `_replace`: torch.compile in torch 2.8 cannot trace it.
        return Key(_mix(self.static ^ (part * 0x9E3779B1 & _MASK32)), self.data, self.scratch)

    def with_data(self, data: Tensor) -> Key:
        """Return a key that also depends on `data` (0-dim int32)."""
        data = data if self.data is None else self.data + data
        return Key(self.static, data, self.scratch)


def data_on_host(key: Key) -> int | None:
    """Return the data of a key if the host can read it without waiting for a device, else None."""
    return int(key.data) if key.data is not None and _on_host(key.data) else None


def key_of(*parts: int | str) -> Key:
    """Make a key from integers and strings."""
    return Key(_mix(zlib.crc32(repr(parts).encode())))


def as_key(key: Key | int | None) -> Key:
    """Return `key` as a `Key`; an int becomes the static part.

    Raises:
        ValueError: `key` is None.
    """
    if key is None:
        raise ValueError("this quantizer needs a noise key; pass key=...")
    return Key(key) if isinstance(key, int) else key


def _mix(h: int) -> int:
    """Compute lowbias32 of a Python int."""
    h = ((h ^ h >> 16) * _M1) & _MASK32
    h = ((h ^ h >> 15) * _M2) & _MASK32
    return h ^ h >> 16


def _signed(h: int) -> int:
    """Reinterpret 32 bits as a signed int32."""
    return (h & _MASK32) - ((h & 0x80000000) << 1)


def _hash(h: Words) -> Words:
    """Compute lowbias32 in place."""
    h = _xor_with_upper(h, 16)
    h *= _M1
    h = _xor_with_upper(h, 15)
    h *= _M2
    return _xor_with_upper(h, 16)


def _xor_with_upper(h: Words, shift: int) -> Words:
    """Compute h ^ (h >> shift) in place, with a logical shift of 32 bits."""
    upper = h >> shift
    upper &= _MASK32 >> shift
    h ^= upper
    return h


def _on_host(data: Tensor) -> bool:
    """Return whether numpy may read a tensor; numpy's overhead per call is a fraction of torch's.

    False while torch traces in any way, and for tensor subclasses such as fake tensors.
    """
    return (
        not torch.compiler.is_compiling()
        and data.device.type == "cpu"
        and type(data) is Tensor
        and not torch._is_functional_tensor(data)
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._get_tracing_state() is None
        and not torch._C._len_torch_dispatch_stack()
        and not _len_torch_dispatch_stack_pre_dispatch()
    )


def fingerprint(x: Tensor) -> Tensor:
    """Return a 32-bit hash of 256 elements of a tensor, or of all elements if there are fewer.

    Each sample is hashed together with its index before the sum, so that values whose fp32 bits
    differ in few places (signs, powers of two, 16-bit values) still change the whole hash.

    Returns:
        0-dim int32 tensor on the device of `x`; no synchronization.
    """
    x = x.detach()  # turns a parameter into a plain tensor, as kernels require
    if torch.compiler.is_compiling():
        return _fingerprint_in_graph(x)
    if x.numel():
        kernels = one_launch(x)
        if kernels is not None and x.dtype in kernels.DTYPES:
            found: Tensor | None = kernels.fingerprint(x)
            if found is not None:
                return found
    sample = samples(x).float().view(torch.int32)
    index = _index_hash(x.device)[: sample.numel()]
    if _on_host(sample):
        hashed = _hash(sample.numpy() ^ index.numpy())
        return torch.tensor(hashed.sum(dtype=np.int32), device="cpu")
    return _hash(sample ^ index).sum(dtype=torch.int32)


@torch.library.custom_op("metis_hf::fingerprint", mutates_args=())
def _fingerprint_in_graph(x: Tensor) -> Tensor:
    """Compute `fingerprint` as one node of torch.compile's graph."""
    return fingerprint(x)


_fingerprint_in_graph.register_fake(lambda x: x.new_empty((), dtype=torch.int32))


def fingerprints(x: Tensor, other: Tensor, added: int) -> tuple[Any, ...] | None:
    """Compute the fingerprints of two tensors in one launch, if there is a kernel for it.

    Returns:
        (a = fingerprint(x) + added, b = fingerprint(other) + added, a + b, fingerprint(other), the
        call's `Scratch`), in int32 arithmetic; None if there is no kernel for these tensors.
    """
    kernels = one_launch(x.detach())
    if kernels is None or not (x.numel() and other.numel()) or x.device != other.device:
        return None
    known = x.dtype in kernels.DTYPES and other.dtype in kernels.DTYPES
    return kernels.fingerprints(x.detach(), other.detach(), added) if known else None


def samples(x: Tensor) -> Tensor:
    """Return the elements that `fingerprint` hashes, in the order of a contiguous `x`.

    Only these elements are gathered: a transposed weight is not copied.
    """
    if x.is_contiguous() or type(x) is not Tensor:
        flat = x.reshape(-1)
        return flat if x.numel() <= SAMPLES else flat[_places(x.numel(), x.device)]
    return x[_places_in(x.shape, x.device)]


# Returns the module of noise kernels for a tensor's device, or None; set by `numerics.kernels`.
_find_kernels: Callable[[Tensor], ModuleType | None] = lambda x: None  # noqa: E731


def use_kernels_of(find: Callable[[Tensor], ModuleType | None]) -> None:
    """Register the function that returns the module of noise kernels for a tensor's device.

    Where `find` returns None, torch operations or numpy compute the noise.
    """
    global _find_kernels
    _find_kernels = find


def one_launch(x: Tensor) -> ModuleType | None:
    """Return the module of noise kernels for a CUDA tensor; None if there is none."""
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return None
    return _find_kernels(x)


def constant(make: Callable[P, T], most: int | None = None) -> Callable[P, T]:
    """Cache the results of a function, a tensor or a tuple of tensors, by positional arguments.

    Callers must not write to a result. Inside torch.compile, which would trace through the cache,
    the cache is bypassed. Tensor subclasses (fake tensors) and inference tensors
    (`torch.inference_mode`) are returned but not cached. Under FakeTensorMode, which accepts no
    real tensor, cached results are not returned.

    Args:
        make: the function.
        most: size of the cache, which evicts the least recently used result; results used while a
            CUDA graph was captured stay and do not count. None caches everything.
    """
    kept: dict[Any, T] = {}
    recorded: set[Any] = set()
    lock = threading.Lock()  # threads may share a model

    @functools.wraps(make)
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return make(*args, **kwargs)
        made = None if _fakes_tensors() else kept.get(args)
        if made is None:
            made = make(*args, **kwargs)
            tensors = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
            if any(type(t) is not Tensor or t.is_inference() for t in tensors):
                return made
            with lock:
                kept[args] = made
        if most is not None:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                recorded.add(args)
            with lock:
                kept[args] = kept.pop(args, made)  # to the end: most recently used
                if len(kept) - len(recorded) > most:
                    for old in [key for key in kept if key not in recorded][:-most]:
                        kept.pop(old, None)
        return made

    return found


def _fakes_tensors() -> bool:
    if not torch._C._len_torch_dispatch_stack():  # the common case, and a much cheaper check
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@functools.partial(constant, most=_PLACES_KEPT)
def _places(count: int, device: torch.device) -> Tensor:
    """Return the indices of a fingerprint's samples among `count` elements, int64 [n].

    The elements are cut into n equal parts; each part gives one sample, at a hashed offset. Evenly
    spaced samples could alias with the row length: they would hit the same columns of every row, or
    the first token of every sequence.
    """
    n = min(count, SAMPLES)
    part = torch.arange(n, device=device)
    first, behind = part * count // n, (part + 1) * count // n
    return first + (_index_hash(device)[:n].long() & _MASK32) % (behind - first)


@functools.partial(constant, most=_PLACES_KEPT)
def _places_in(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of a fingerprint's samples along each dimension."""
    return torch.unravel_index(_places(shape.numel(), device), shape)


@constant
def _index_hash(device: torch.device) -> Tensor:
    """Return lowbias32(i) for i = 0 .. SAMPLES - 1, int32."""
    return _hash(torch.arange(SAMPLES, device=device, dtype=torch.int32))


def static_words(key: Key) -> tuple[int, int]:
    """Return the static part of a key as two signed 32-bit words."""
    return _words(key.static)


@functools.lru_cache(maxsize=2**14)  # layers have the same keys in each step
def _words(static: int) -> tuple[int, int]:
    return _signed(_mix(static)), _signed(_mix(static ^ 0x5BD1E995))


def seeds(key: Key) -> tuple[int, int]:
    """Return a key's 32-bit (first, second); the hash of block i is hash(i + first) + second."""
    word0, word1 = static_words(key)
    data = 0 if key.data is None else int(key.data)
    first = _mix(data + word0 & _MASK32)
    return first, _mix(first + word1 & _MASK32)


def _element_bits(blocks: Words, lanes: Words) -> Words:
    """Combine block and lane hashes into 32 bits per element, of which the upper 24 are noise."""
    h = blocks ^ lanes
    h *= _M1
    h = _xor_with_upper(h, 15)
    h *= _M2
    return h


def _to_uniform(bits: Tensor) -> Tensor:
    """Map int32 to fp32, uniform on the multiples of 2^-24 in [0, 1)."""
    return bits.bitwise_right_shift(8).float().mul_(2.0**-24).add_(0.5)


def random_bits(count: int, key: Key | int, device: torch.device | str | None = None) -> Tensor:
    """Return int32 [count], hashes of (key, index), of which the upper 24 bits are noise."""
    device = torch.device(device or "cpu")
    key = as_key(key)
    if torch.compiler.is_compiling():
        return _bits_in_graph(count, key.static, key.data, device)
    data = key.data
    if data is None:
        data = torch.zeros((), dtype=torch.int32, device=device)
    if count <= _LARGEST_ON_HOST and _on_host(data):
        return _bits_on_host(count, Key(key.static, data))
    words = static_words(key)
    first = _hash(data + words[0])
    # The second word differs widely even where the first words of two keys are close; otherwise
    # such keys would have the same stream, shifted.
    second = _hash(first + words[1])
    index = torch.arange(-(-count // _LANES), device=data.device, dtype=torch.int32)
    blocks = _hash(index.add_(first)).add_(second)
    return _element_bits(blocks[:, None], _index_hash(device)[:_LANES]).view(-1)[:count]


@torch.library.custom_op("metis_hf::random_bits", mutates_args=())
def _bits_in_graph(count: int, static: int, data: Tensor | None, device: torch.device) -> Tensor:
    """Compute `random_bits` as one node of torch.compile's graph."""
    return random_bits(count, Key(static, data), device).clone()


@_bits_in_graph.register_fake
def _(count: int, static: int, data: Tensor | None, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32, device=device)


def _bits_on_host(count: int, key: Key) -> Tensor:
    """Compute `random_bits` with numpy, for a key whose data is on the CPU."""
    assert key.data is not None
    first, second = seeds(key)
    blocks = np.arange(-(-count // _LANES), dtype=np.int32)
    blocks += np.int32(_signed(first))
    blocks = _hash(blocks)
    blocks += np.int32(_signed(second))
    bits = _element_bits(blocks[:, None], _index_hash(key.data.device)[:_LANES].numpy())
    return torch.from_numpy(bits).view(-1)[:count]


def uniform(
    shape: torch.Size | tuple[int, ...], key: Key | int, device: torch.device | str | None = None
) -> Tensor:
    """Return fp32 noise, uniform on the multiples of 2^-24 in [0, 1).

    An element's noise depends on the key, its row and its index in the row (the last dimension), as
    if rows were padded to a multiple of 16 elements.
    """
    size = torch.Size(shape)
    if isinstance(key, Key) and key.data is not None and 0 < size.numel() <= _LARGEST_LAUNCH:
        kernels = _find_kernels(key.data) if _on_host(key.data) else one_launch(key.data)
        if kernels is not None:
            drawn: Tensor | None = kernels.uniform(size, key, key.data.device)
            if drawn is not None:
                return drawn
    width = size[-1] if size else 1
    padded = -(-width // _LANES) * _LANES
    rows = size.numel() // width if width else 0
    u = _to_uniform(random_bits(rows * padded, key, device))
    return u.view(rows, padded)[:, :width].reshape(size)


def signs(count: int, key: Key) -> Tensor:
    """Return `count` random signs +-1, fp32, on the device of the key's data."""
    assert key.data is not None
    return 1.0 - 2.0 * (random_bits(count, key, key.data.device) < 0)


def key_from_generator(generator: torch.Generator | None, device: torch.device) -> Key:
    """Draw one key from a torch generator (the device's default one if None)."""
    source = generator.device if generator is not None else device
    bits = torch.randint(-(1 << 31), 1 << 31, (), generator=generator, device=source)
    return Key(0, bits.to(torch.int32).to(device))
