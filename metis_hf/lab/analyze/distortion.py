"""Errors that each scheme's quantizer makes in a matrix: of values, zeroed shares, spectra.

The scheme's own operands are used, in training mode (stochastic where it is): what is measured is
what a training step multiplies, in fp32, without the BF16 rounding of a recombined split.
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
from metis_hf.training.health import element_fates, spectral_norm
from metis_hf.transforms.spectral import sample_rows

# Scheme -> what a figure calls it.
SCHEMES = {
    "nvfp4": "direct NVFP4",
    "nvidia": "Hadamard (nvidia)",
    "metis-paper": "Metis, as published",
    "metis": "Metis, compensated",
}
DIRECT, COMPENSATED = "nvfp4", "metis"
# Of a larger matrix, so that the SVD of a quantized copy takes a second or two. Above the 1024 up
# to which decompose_weight takes a full SVD, slower than its randomized one.
COMPARED_ROWS = 1280
_ROLES = {"activation": Role.FPROP_INPUT, "gradient": Role.DGRAD_GRAD_OUTPUT}
# nvidia rotates in wgrad alone, whose operands have their blocks along the tokens.
_NVIDIA_ROLES = {"activation": Role.WGRAD_INPUT, "gradient": Role.WGRAD_GRAD_OUTPUT}


@dataclass(frozen=True)
class OperandValues:
    """A matrix as a scheme's GEMM gets it."""

    values: Tensor  # [t c], fp32
    # Share of non-zero elements that become zero, in the matrix that is quantized last (the matrix
    # itself, the rotated one or the residual).
    zeroed: float


class Quantizers:
    """The operands of one layer [o i] under every compared scheme.

    `rank` directions are kept apart by Metis; None takes the schemes' own (1.5 %).
    """

    def __init__(self, name: str, shape: tuple[int, int], rank: int | None = None) -> None:
        self.name, self.shape = name, shape
        self.rank = None if rank is None else min(rank, *shape)

    def config(self, scheme: str) -> MetisConfig:
        """Return the scheme's defaults, but for the rank."""
        return MetisConfig(scheme=scheme, rank=self.rank)

    def split_rank(self) -> int:
        """Return directions that `metis` keeps apart in this layer."""
        return layer_rank(self.config(COMPENSATED), self.shape[1], self.shape[0])

    def weight(self, stored: StoredWeight, scheme: str) -> OperandValues:
        """Return a weight under a scheme: as it is stored if it trained in that, else converted."""
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
        """Return an activation or gradient [t c] under a scheme."""
        plan = build_scheme(self.config(scheme), self.shape[1], self.shape[0])
        role, operand = plan.resolve((_NVIDIA_ROLES if scheme == "nvidia" else _ROLES)[kind])
        _check_needs_no_call(scheme, operand)
        assert operand.quantizer is not None
        dim = 0 if role in (Role.WGRAD_GRAD_OUTPUT, Role.WGRAD_INPUT) else -1
        key = CallKeys(key_of("layer", 0, self.name), x, x)[role]
        values = operand(x, dim=dim, key=key, dtype=torch.float32)[0][: x.shape[0], : x.shape[1]]
        part = operand.conditioner.parts(x, operand.quantizer, dim=dim, key=key, row_mask=None)[-1]
        lost = ((part.after == 0) & (part.before != 0)).sum()
        return OperandValues(values, float(lost / (part.before != 0).sum().clamp_min(1)))


def _check_needs_no_call(scheme: str, operand: Operand) -> None:
    if operand.conditioner.needs_state:
        raise ValueError(
            f"scheme {scheme!r} quantizes this tensor by what a call knows of the layer's other "
            "tensors, and a tensor alone would be measured without it. Train with "
            "MetisCallback(health_interval=...), which measures the operands of real steps"
        )


@dataclass(frozen=True)
class Sample:
    """One of the three tensors of a layer, with what quantizes it."""

    x: Tensor  # [t c]; a weight is [o i]
    kind: str  # "weight", "activation" or "gradient"
    quantizers: Quantizers
    stored: StoredWeight | None = None  # for kind "weight"

    def quantize(self, scheme: str) -> OperandValues:
        """Return this tensor under a scheme."""
        if self.stored is not None:
            return self.quantizers.weight(self.stored, scheme)
        return self.quantizers.rows(self.x, self.kind, scheme)

    def limited(self, rows: int) -> Sample:
        """Return the same, or evenly spread random rows of it where both sides exceed `rows`."""
        if min(self.x.shape) <= rows:
            return self
        index = row_index(self.x, rows)
        stored = None if self.stored is None else self.stored.rows(index)
        shape = self.quantizers.shape if stored is None else (rows, self.x.shape[1])
        rank = self.quantizers.split_rank()
        if stored is not None and stored.parts is not None and self.quantizers.rank is None:
            rank = len(stored.parts[1])  # as it is stored, not as the scheme's defaults have it
        quantizers = Quantizers(self.quantizers.name, shape, rank)
        return Sample(self.x[index], self.kind, quantizers, stored)


def row_index(x: Tensor, rows: int) -> Tensor:
    """Return indices of random rows spread over x [t c]; all where a side is at most `rows`."""
    index = torch.arange(x.shape[0], dtype=torch.float32)[:, None]
    if min(x.shape) > rows:
        index = sample_rows(index, rows, Key(5))
    return index[:, 0].long()


def spectral_errors(svd: Svd, x_hat: Tensor) -> dict[str, list[float]]:
    """Return errors of the singular values and directions of x_hat [t c] by index.

    Returns:
        sigma_error: |s_hat_i - s_i| / s_i, both sorted; left, right: 1 - |cos| between the i-th
        singular vectors of x and x_hat. Components at the rounding level of fp32 are left out.
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

    Spectral errors of a matrix with both sides above COMPARED_ROWS are measured on as many of
    its rows, which are quantized with all the others.

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
    """Share of the singular values of x [t c] below the spectral norm of x_hat - x.

    By Weyl's and Wedin's inequalities the rounding error is large enough to replace them.
    """
    return float((sigma <= spectral_norm(x_hat - x)).float().mean())


def risk_data(sample: Sample, sigma: Tensor) -> dict[str, float]:
    """Return a tensor's figures in the table of layers; `sigma` are its singular values.

    A matrix with both sides above COMPARED_ROWS stands for itself by as many of its rows.
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
