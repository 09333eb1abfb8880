"""Errors that each scheme's quantizer makes in a matrix: in values, zeroed shares, spectra.

The measured operands are the ones that a training step multiplies: the scheme's own, in training
mode (stochastic rounding if the scheme uses it), but in fp32, without the BF16 rounding of a
recombined split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metis_hf.config import MetisConfig
from metis_hf.lab.analyze.spectra import Svd, singular_values
from metis_hf.lab.analyze.stored_weights import StoredWeight
from metis_hf.layers.gemm import GemmPlan
from metis_hf.layers.make import make_layer
from metis_hf.noise import Key, key_of
from metis_hf.numerics import sqnr_db
from metis_hf.operands import Operand
from metis_hf.operands.conditioners.spectral import Spectral
from metis_hf.operands.weight_forms import DenseWeight
from metis_hf.schemes import Role, build_scheme, layer_rank
from metis_hf.schemes.noise_keys import CallKeys
from metis_hf.schemes.roles import contracted_dim
from metis_hf.training.health import element_fates, spectral_norm
from metis_hf.transforms.spectral import sample_rows

# Scheme -> its label in figures.
SCHEMES = {
    "nvfp4": "direct NVFP4",
    "nvidia": "Hadamard (nvidia)",
    "metis-paper": "Metis, as published",
    "metis": "Metis, compensated",
}
DIRECT, COMPENSATED = "nvfp4", "metis"
# Larger matrices are sampled to this many rows: the SVD of a quantized copy then takes a second or
# two. More than 1024, because decompose_weight takes a slower, full SVD up to there.
COMPARED_ROWS = 1280
_ROLES = {"activation": Role.FPROP_INPUT, "gradient": Role.DGRAD_GRAD_OUTPUT}
# nvidia rotates only in wgrad, whose operands have their blocks along the tokens.
_NVIDIA_ROLES = {"activation": Role.WGRAD_INPUT, "gradient": Role.WGRAD_GRAD_OUTPUT}


@dataclass(frozen=True)
class OperandValues:
    """A matrix as it enters a scheme's GEMM."""

    values: Tensor  # [t c], fp32
    # Share of non-zero elements that become zero in the matrix that is quantized last (the matrix
    # itself, the rotated matrix or the residual).
    zeroed: float


class Quantizers:
    """The operands of one layer [o i] under every compared scheme.

    Metis splits off `rank` directions; None takes each scheme's default (1.5 %).
    """

    def __init__(self, name: str, shape: tuple[int, int], rank: int | None = None) -> None:
        self.name, self.shape = name, shape
        self.rank = None if rank is None else min(rank, *shape)

    def config(self, scheme: str) -> MetisConfig:
        """Return the scheme's default config with this rank."""
        return MetisConfig(scheme=scheme, rank=self.rank)

    def split_rank(self) -> int:
        """Return the number of directions that `metis` splits off in this layer."""
        return layer_rank(self.config(COMPENSATED), self.shape[1], self.shape[0])

    def weight(self, stored: StoredWeight, scheme: str) -> OperandValues:
        """Quantize a weight under a scheme, from its stored parts if it was trained in that scheme.

        Otherwise the dense weight is converted.
        """
        layer = make_layer(stored.weight, None, self.config(scheme), name=self.name)
        _check_needs_no_call(scheme, layer.scheme.fprop_weight)
        params, form = layer.weight_params(), layer.weight_form
        parts = stored.parts
        trained = parts is not None and self.rank in (None, len(parts[1]))
        if parts is not None and trained and stored.scheme == scheme:
            assert stored.form is not None
            params, form = parts, stored.form
        keys = CallKeys(layer.noise_key(), params[-1], params[-1])
        plan = GemmPlan(layer.scheme, form, torch.float32, keys)
        operand = layer.scheme.fprop_weight
        conditioner, quantizer = operand.conditioner, operand.quantizer
        assert quantizer is not None
        last = params[-1].detach().float()
        with torch.no_grad():
            values = plan.weight_operand(Role.FPROP_WEIGHT, params)[0]
            if isinstance(form, DenseWeight) and isinstance(conditioner, Spectral):
                key = keys[Role.FPROP_WEIGHT]
                last = conditioner.parts(last, quantizer, dim=-1, key=key)[-1].before
        return OperandValues(values, float(element_fates(last, quantizer)[0]))

    def rows(self, x: Tensor, kind: str, scheme: str) -> OperandValues:
        """Quantize an activation or gradient [t c] under a scheme."""
        plan = build_scheme(self.config(scheme), self.shape[1], self.shape[0])
        role, operand = plan.resolve((_NVIDIA_ROLES if scheme == "nvidia" else _ROLES)[kind])
        _check_needs_no_call(scheme, operand)
        assert operand.quantizer is not None
        dim = contracted_dim(role)
        key = CallKeys(key_of("layer", 0, self.name), x, x)[role]
        values = operand(x, dim=dim, key=key, dtype=torch.float32)[0][: x.shape[0], : x.shape[1]]
        part = operand.conditioner.parts(x, operand.quantizer, dim=dim, key=key, row_mask=None)[-1]
        lost = ((part.after == 0) & (part.before != 0)).sum()
        return OperandValues(values, float(lost / (part.before != 0).sum().clamp_min(1)))


def _check_needs_no_call(scheme: str, operand: Operand) -> None:
    if operand.conditioner.needs_state:
        raise ValueError(
            f"scheme {scheme!r} quantizes this tensor with information about the layer's other "
            "tensors, which is missing when a tensor is measured alone. Train with "
            "MetisCallback(health_interval=...) instead; it measures the operands of real steps"
        )


@dataclass(frozen=True)
class Sample:
    """One of the three tensors of a layer, with its quantizers."""

    x: Tensor  # [t c]; a weight is [o i]
    kind: str  # "weight", "activation" or "gradient"
    quantizers: Quantizers
    stored: StoredWeight | None = None  # for kind "weight"

    def quantize(self, scheme: str) -> OperandValues:
        """Quantize this tensor under a scheme."""
        if self.stored is not None:
            return self.quantizers.weight(self.stored, scheme)
        return self.quantizers.rows(self.x, self.kind, scheme)

    def limited(self, rows: int) -> Sample:
        """Return self, or `rows` evenly spread random rows of it if both sides exceed `rows`."""
        if min(self.x.shape) <= rows:
            return self
        index = row_index(self.x, rows)
        stored = None if self.stored is None else self.stored.rows(index)
        shape = self.quantizers.shape if stored is None else (rows, self.x.shape[1])
        rank = self.quantizers.split_rank()
        if stored is not None and stored.parts is not None and self.quantizers.rank is None:
            rank = len(stored.parts[1])  # the stored rank, not the scheme's default
        quantizers = Quantizers(self.quantizers.name, shape, rank)
        return Sample(self.x[index], self.kind, quantizers, stored)


def row_index(x: Tensor, rows: int) -> Tensor:
    """Return `rows` evenly spread random row indices of x [t c]; all if a side is <= `rows`."""
    index = torch.arange(x.shape[0], dtype=torch.float32)[:, None]
    if min(x.shape) > rows:
        index = sample_rows(index, rows, Key(5))
    return index[:, 0].long()


def spectral_errors(svd: Svd, x_hat: Tensor) -> dict[str, list[float]]:
    """Return the errors of singular values and directions of x_hat [t c], by index.

    Returns:
        sigma_error: |s_hat_i - s_i| / s_i, both sorted; left, right: 1 - |cos| between the i-th
        singular vectors of x and x_hat. Components at fp32's rounding level are left out.
    """
    other = Svd.of(x_hat)
    rank = int((svd.s > svd.s[0] * torch.finfo(torch.float32).eps * max(x_hat.shape)).sum())
    kept = slice(0, rank)
    error = (other.s[kept] - svd.s[kept]).abs() / svd.s[kept]
    result = {"sigma_error": error.tolist()}
    for side in ("left", "right"):
        a, b = (getattr(d, side)(kept) for d in (svd, other))
        result[side] = (1 - (a * b).sum(0).abs()).clamp(0, 1).tolist()
    return result


def distortion_data(sample: Sample) -> tuple[dict, dict[str, Tensor]]:
    """Return every scheme's errors on a tensor [t c], and the quantized copies.

    If both sides exceed COMPARED_ROWS, spectral errors are measured on COMPARED_ROWS of the rows;
    the whole matrix is quantized in any case.

    Returns:
        scheme -> sqnr_db, zeroed and the lists of `spectral_errors`; scheme -> x_hat [t c].
    """
    x = sample.x
    index = row_index(x, COMPARED_ROWS)
    svd = Svd.of(x[index])
    data: dict = {}
    copies: dict[str, Tensor] = {}
    for scheme in SCHEMES:
        made = sample.quantize(scheme)
        errors = spectral_errors(svd, made.values[index])
        data[scheme] = {"sqnr_db": float(sqnr_db(x, made.values)), "zeroed": made.zeroed, **errors}
        copies[scheme] = made.values
    return data, copies


def swamped_share(sigma: Tensor, x: Tensor, x_hat: Tensor) -> float:
    """Return the share of singular values of x [t c] at or below the spectral norm of x_hat - x.

    By Weyl's and Wedin's inequalities the rounding error is large enough to replace them.
    """
    return float((sigma <= spectral_norm(x_hat - x)).float().mean())


def risk_data(sample: Sample, sigma: Tensor) -> dict[str, float]:
    """Return a tensor's quantization columns in the table of layers.

    `sigma` are its singular values. If both sides exceed COMPARED_ROWS, only COMPARED_ROWS random
    rows are measured.
    """
    few = sample.limited(COMPARED_ROWS)
    sigma = sigma if few is sample else singular_values(few.x)
    sample, x = few, few.x
    data: dict[str, float] = {}
    for scheme in (DIRECT, COMPENSATED):
        made = sample.quantize(scheme)
        data[f"{scheme}_sqnr_db"] = float(sqnr_db(x, made.values))
        data[f"{scheme}_zeroed"] = made.zeroed
        data[f"{scheme}_swamped"] = swamped_share(sigma, x, made.values)
    return data
