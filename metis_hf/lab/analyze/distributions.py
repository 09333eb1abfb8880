"""Element distributions: components, residuals, singular vectors, rotations, quantized copies.

Histograms are densities, so that areas are comparable.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from metis_hf.lab.analyze.spectra import Svd
from metis_hf.noise import Key
from metis_hf.transforms import rotate
from metis_hf.transforms.spectral import sample_rows

COMPONENTS = (0, 16, 128, 1024)  # as in the paper
REMOVED_SHARE = 0.03
_BINS = 121
_ELEMENTS = 1 << 22  # histograms use about this many elements of a larger matrix, in whole rows


def removed_components(rank: int) -> int:
    """Return 3 % of `rank`, rounded to the power of two nearest in log scale."""
    return 2 ** max(0, round(float(np.log2(max(REMOVED_SHARE * rank, 1)))))


def histogram(values: Tensor, edges: np.ndarray) -> list[float]:
    """Return the density of `values` over `edges`; elements outside are not counted in any bin."""
    counts, _ = np.histogram(values.detach().double().numpy(), edges)
    return (counts / (values.numel() * np.diff(edges))).tolist()


def _own_histogram(values: Tensor, edges: np.ndarray) -> dict:
    return {"edges": edges.tolist(), "density": histogram(values, edges)}


def even_edges(values: Tensor) -> np.ndarray:
    """Return edges of equal bins, symmetric about zero, that cover all of `values`."""
    reach = max(float(values.abs().amax()), 1e-30)
    return np.linspace(-reach, reach, _BINS + 1)


def shown_rows(x: Tensor) -> Tensor:
    """Return indices of the rows of x [t c] used in histograms, about 4 million elements."""
    index = torch.arange(x.shape[0], dtype=torch.float64)[:, None]
    return sample_rows(index, max(_ELEMENTS // x.shape[1], 16), Key(3))[:, 0].long()


def width(values: Tensor) -> dict[str, float]:
    """Return the largest magnitude, the rms, and the 99.9 % quantile of magnitudes."""
    magnitudes = values.detach().abs().flatten()
    rank = max(1, round(0.999 * magnitudes.numel()))
    return {
        "max": float(magnitudes.amax()),
        "rms": float(magnitudes.double().square().mean().sqrt()),
        "q999": float(magnitudes.kthvalue(rank).values),
    }


def _shown_with_residual(x: Tensor, svd: Svd, removed: int) -> tuple[Tensor, Tensor]:
    """Return the shown rows of x, and these rows without the `removed` leading components."""
    rows, kept = shown_rows(x), slice(0, removed)
    return x[rows], x[rows] - (svd.left(kept)[rows] * svd.s[kept]) @ svd.right(kept).T


def component_data(x: Tensor, svd: Svd) -> dict:
    """Return histograms of x and of s_i u_i v_i^T for i = 0, 16, 128, 1024, where i < rank."""
    rows = shown_rows(x)
    x = x[rows]
    edges = even_edges(x)
    components: dict[str, dict] = {}
    for index in (i for i in COMPONENTS if i < len(svd.s)):
        component = (svd.left([index])[rows] * svd.s[index]) @ svd.right([index]).T
        components[str(index)] = _own_histogram(component, even_edges(component)) | width(component)
    return {"edges": edges.tolist(), "full": histogram(x, edges), "components": components}


def residual_data(x: Tensor, svd: Svd) -> dict:
    """Compare x with its residual after removing leading components; histogram singular vectors.

    Returns:
        removed; edges, full; residual_edges, residual (own, finer bins); full_width and
        residual_width; narrowing (ratios of these widths); vectors: histograms of left singular
        vectors by index.
    """
    removed = min(removed_components(len(svd.s)), len(svd.s) - 1)
    x, residual = _shown_with_residual(x, svd, removed)
    edges, own = even_edges(x), even_edges(residual)
    full, rest = width(x), width(residual)
    vectors = {}
    for index in (i for i in COMPONENTS if i < len(svd.s)):
        column = svd.left([index])
        vectors[str(index)] = _own_histogram(column, even_edges(column)[::3])
    return {
        "removed": removed,
        "edges": edges.tolist(),
        "full": histogram(x, edges),
        "residual_edges": own.tolist(),
        "residual": histogram(residual, own),
        "full_width": full,
        "residual_width": rest,
        "narrowing": {key: full[key] / max(rest[key], 1e-30) for key in full},
        "vectors": vectors,
    }


def preprocessing_data(x: Tensor, svd: Svd, rank: int) -> dict:
    """Return histograms of x, of x under 16 x 16 Hadamard blocks, and of Metis's residual."""
    x, residual = _shown_with_residual(x, svd, min(rank, len(svd.s)))
    rotated = rotate(x, dim=-1, seed=0)[:, : x.shape[1]]
    variants = {"original": x, "Hadamard": rotated, "Metis residual": residual}
    edges = even_edges(torch.stack([v.abs().amax() for v in variants.values()]))
    return {
        "rank": rank,
        "edges": edges.tolist(),
        "density": {name: histogram(values, edges) for name, values in variants.items()},
        "width": {name: width(values) for name, values in variants.items()},
    }


def magnitude_data(x: Tensor, copies: dict[str, Tensor]) -> dict:
    """Return histograms of log10(|element| / rms of x) before and after quantization.

    Returns:
        edges (log10); density: "before" or scheme -> density, whose area is the share of non-zero
        elements; zero: same keys -> share of exact zeros.
    """
    edges = np.linspace(-4, 2.5, 105)
    rows = shown_rows(x)
    x, copies = x[rows], {name: values[rows] for name, values in copies.items()}
    rms = x.double().square().mean().sqrt().clamp_min(1e-30)

    def density(values: Tensor) -> list[float]:
        magnitudes = (values.double().abs() / rms).flatten()
        logs = magnitudes[magnitudes > 0].log10()
        counts, _ = np.histogram(logs.clamp(edges[0], edges[-1]).numpy(), edges)
        return (counts / (values.numel() * np.diff(edges))).tolist()

    everything = {"before": x, **copies}
    return {
        "edges": edges.tolist(),
        "density": {name: density(values) for name, values in everything.items()},
        "zero": {name: float((v == 0).float().mean()) for name, v in everything.items()},
    }
