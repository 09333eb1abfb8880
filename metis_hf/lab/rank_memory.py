"""Memory of one training rank at the end of a forward pass, computed without allocating it.

Activations are traced on fake tensors (torch._subclasses.fake_tensor), which have the shapes,
dtypes and storages of a real run on the CPU, but no values. Under CUDA autocast a few elementwise
functions (pow, layer_norm) compute in fp32, while CPU autocast keeps them in bf16.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, masking_utils

from metis_hf.conversion.convert import metis_layers

FP32, BF16 = 4, 2  # bytes
_SAVED = ("linear_activations", "activations", "weight_copies")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The amount of training, its batch sizes and its number of processes.

    Raises:
        ValueError: a number below 1, or a global batch that the processes cannot divide.
    """

    steps: int  # optimizer steps
    sequence_length: int  # tokens
    global_batch: int  # sequences per optimizer step, over all processes
    device_batch: int  # sequences per process and forward pass
    world_size: int = 1  # processes, one for each device
    bf16: bool = True  # GEMMs under bf16 autocast; weights and optimizer stay in fp32
    checkpointing: bool = False  # activation checkpointing of the blocks

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name}={value}; expected at least 1")
        portion = self.device_batch * self.world_size
        if self.global_batch % portion:
            raise ValueError(
                f"a global batch of {self.global_batch} sequences cannot be split evenly into "
                f"batches of {self.device_batch} on {self.world_size} processes; choose a global "
                f"batch that is a multiple of {portion}, or another batch per device"
            )

    @property
    def accumulation(self) -> int:
        """Forward passes per process and optimizer step."""
        return self.global_batch // (self.device_batch * self.world_size)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length


def rank_memory(model: PreTrainedModel, load: Workload, *, sharded: bool) -> dict[str, int]:
    """Return the bytes on the fullest rank by kind: the kinds of `state_memory`, and:

    - "linear_activations", "activations": tensors saved for the backward pass inside and outside of
      converted layers; "weight_copies": bf16 casts of dense weights, which autocast caches.
    - "loss_gradient": gradient of the logits in fp32, and its bf16 cast, at the start of backward.

    Temporaries of quantizers, fragmentation and the framework itself are not counted.
    """
    logits = load.device_batch * load.sequence_length * model.config.vocab_size
    return {
        **state_memory(model, load, sharded=sharded),
        **saved_bytes(model, load, sharded=sharded),
        "loss_gradient": logits * (FP32 + (BF16 if load.bf16 else 0)),
    }


def state_memory(model: PreTrainedModel, load: Workload, *, sharded: bool) -> dict[str, int]:
    """Return the bytes that do not depend on the batch, under FSDP2 (`sharded`) or DDP.

    - "weights", "gradients": fp32. FSDP2 shards each tensor along dimension 0, and the first rank
      has ceil(d0 / W) of its d0 rows (torch.distributed.tensor.Shard).
    - "moments": AdamW's two moments, and one fp32 step count per tensor.
    - "scheme_state": buffers of the layers' schemes, whole on every rank.
    - "gradient_buckets": DDP's own copy of the gradients (gradient_as_bucket_view=False).
    - "gathered": an estimate, in the dtype of communication, of FSDP2's unsharded weights (two
      blocks, the running and the prefetched one, and parameters outside of blocks that stay
      unsharded after forward), the gradients of one block, and their flat copy.
    """
    world, params = load.world_size if sharded else 1, list(model.parameters())
    held = sum(-(-len(p) // world) * (p.numel() // len(p)) if p.dim() else 1 for p in params)
    states = (x for _, layer in metis_layers(model) for x in layer.state_buffers().values())
    memory = {
        "weights": FP32 * held,
        "gradients": FP32 * held,
        "moments": 2 * FP32 * held + FP32 * len(params),
        "scheme_state": sum(x.numel() * x.element_size() for x in states),
    }
    if sharded:
        sizes = [count_elements(block) for block in blocks_of(model)]
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head is not None and embedding.weight is head.weight
        kept = count_elements(model) - sum(sizes) - (0 if tied else count_elements(embedding))
        memory["gathered"] = (4 * max(sizes, default=0) + kept) * (BF16 if load.bf16 else FP32)
    elif load.world_size > 1:
        memory["gradient_buckets"] = FP32 * held
    return memory


def saved_bytes(model: PreTrainedModel, load: Workload, *, sharded: bool) -> dict[str, int]:
    """Return the bytes that autograd on one rank saves between the forward and backward pass.

    If all blocks are alike, one and two blocks are traced and extrapolated linearly; otherwise the
    whole model is traced. Under FSDP2 the gathered weights are bf16, and so are the activations.
    Activation checkpointing adds the tensors that the recomputation of one block saves.
    """
    blocks = list(blocks_of(model))
    alike = len(blocks) > 2 and len({_signature(block) for block in blocks}) == 1
    parts: tuple[int | None, ...] = (1, 2) if alike else (None,)
    weights = torch.bfloat16 if load.bf16 and sharded else torch.float32
    first, *second = (_trace(model, n, load, weights) for n in parts)
    total = {kind: first[kind] for kind in _SAVED}
    for more in second:
        for kind in _SAVED:
            total[kind] += (more[kind] - first[kind]) * (len(blocks) - 1)
    if load.checkpointing:
        whole = replace(load, checkpointing=False)
        one, *two = (_trace(model, n, whole, weights) for n in parts)
        for kind in _SAVED:
            own = (two[0][kind] - one[kind]) if two else (one[kind] - first[kind]) / len(blocks)
            total[kind] += round(own)
    return total


def _trace(
    model: PreTrainedModel, blocks: int | None, load: Workload, weights: torch.dtype
) -> Counter[str]:
    """Trace forward and loss of the first `blocks` blocks (None: all); `weights` is their dtype."""
    model = copy.deepcopy(model).to(weights)  # type: ignore[arg-type]
    if blocks is not None:
        first = next(blocks_of(model))
        stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and first in list(m)]
        del stacks[0][blocks:]
        model.config.num_hidden_layers = blocks
    model.config.use_cache = False
    if load.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # Fake tensors have no values, so transformers cannot look for packed sequences.
    packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), packed:
            model.to_empty(device="cpu").train()
            ids = torch.zeros(load.device_batch, load.sequence_length, dtype=torch.long)
            return _count_saved(model, ids, bf16=load.bf16)
    finally:
        _forget_fake_tensors()


def _count_saved(model: PreTrainedModel, ids: Tensor, *, bf16: bool) -> Counter[str]:
    saved: dict[int, tuple[Tensor, str]] = {}  # by storage, which the tensor keeps alive
    kinds = ["activations"]

    def pack(x: Tensor) -> Tensor:
        saved.setdefault(_storage(x), (x, kinds[-1]))
        return x

    for _, layer in metis_layers(model):
        layer.register_forward_pre_hook(lambda *_: kinds.append("linear_activations"))
        layer.register_forward_hook(lambda *_: kinds.pop() and None)
    casts = _CastsOf({_storage(p) for p in model.parameters()})
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    with autocast, casts, saved_tensors_hooks(pack, lambda x: x):
        model(input_ids=ids, labels=ids)
    total: Counter[str] = Counter()
    for storage, (x, kind) in saved.items():
        if storage not in casts.sources:
            kind = "weight_copies" if storage in casts.results else kind
            total[kind] += x.untyped_storage().nbytes()
    return total


class _CastsOf(TorchDispatchMode):
    """A dispatch mode that records the storages of casts of given tensors."""

    def __init__(self, sources: set[int]) -> None:
        super().__init__()
        self.sources = sources
        self.results: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _storage(args[0]) in self.sources:
            self.results[_storage(out)] = out
        return out


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _forget_fake_tensors() -> None:
    """Clear the package's caches, which may hold fake tensors that later training cannot use."""
    for name, module in list(sys.modules.items()):
        if name.startswith("metis_hf."):
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


def blocks_of(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Return the transformer blocks, which FSDP wraps by default."""
    names = set(model._no_split_modules or ())
    return (module for module in model.modules() if type(module).__name__ in names)


def count_elements(module: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(p.numel() for p in module.parameters())


def _signature(block: nn.Module) -> tuple:
    """Return a key that is equal for two blocks that save the same tensors."""
    shapes = Counter((key, tuple(p.shape)) for key, p in block.named_parameters())
    schemes = [layer.scheme for _, layer in metis_layers(block)]
    return tuple(sorted(shapes)), tuple(map(repr, schemes))
