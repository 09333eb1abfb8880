"""The projection of a tall matrix onto a thin basis."""

from __future__ import annotations

import torch
from torch import Tensor

from metis_hf.numerics.kernels.choice import kernels_for
from metis_hf.numerics.kernels.request import or_reference
from metis_hf.numerics.kernels.scratch import Scratch

_WIDEST = 128  # most columns of a basis that the kernel takes


def project(x: Tensor, v: Tensor, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
    """Return coordinates of x [t c] in the basis v [c k]: unit columns [t k], lengths [k].

    Both are in the dtype of `v`. On CUDA devices, for BF16 `x` and FP32 `v`, a kernel splits `v`
    into a sum of three BF16 matrices, which tensor cores multiply by `x` exactly, accumulating in
    FP32; no FP32 copy of `x` is written. `scratch` is the memory of the layer's call.
    """
    if torch.compiler.is_compiling():  # one node of the graph
        a, lam = _project_in_graph(x, v)
        return a, lam
    mixed = x.dtype is torch.bfloat16 and v.dtype is torch.float32 and x.numel() > 0
    if mixed and v.shape[1] <= _WIDEST and kernels_for(x, v) == "triton":
        from metis_hf.numerics.kernels import triton_projection

        with or_reference:
            return triton_projection.project(x, v, scratch)
    p = x.to(v.dtype) @ v  # [t c] @ [c k] -> [t k]
    # Divided by each column's largest entry, so that squares stay in the fp32 range.
    largest = p.abs().amax(0)
    p = p / torch.where(largest == 0, torch.ones_like(largest), largest)
    length = torch.linalg.vector_norm(p, dim=0)
    return p / length.clamp_min(1.0), length * largest


@torch.library.custom_op("metis_hf::project", mutates_args=())
def _project_in_graph(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return project(x, v)


@_project_in_graph.register_fake
def _(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty((x.shape[0], v.shape[1])), v.new_empty(v.shape[1])
