"""Everything that the figures show of one layer, and one line of the table for every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metis_hf.lab.analyze import alignment, distributions
from metis_hf.lab.analyze.distortion import Sample, distortion_data, risk_data
from metis_hf.lab.analyze.spectra import (
    LastSpectrum,
    Svd,
    limit_rows,
    singular_values,
    spectrum_data,
)
from metis_hf.lab.analyze.stored_weights import StoredWeight

PORTRAIT_ROWS = 4096  # token rows of an activation or gradient, beyond alignment
NARROW_STATISTIC = "q999"


def unusable(x: Tensor) -> str | None:
    """Return why a matrix has no spectrum to speak of, or None."""
    if not bool(torch.isfinite(x).all()):
        return "NaN or infinite elements"
    return None if bool(x.any()) else "all zero"


def tensor_line(sample: Sample, spectrum: LastSpectrum | None = None) -> dict[str, Any]:
    """Return the figures of one tensor in the table of layers; {"note": reason} if it has none.

    Args:
        sample: the tensor.
        spectrum: knows the singular values of the tensor before, which may be the same.

    Returns:
        shape, elbow, fraction, energy, noise_fraction, stable_rank, sigma (all of them), and what
        `risk_data` gives.
    """
    reason = unusable(sample.x)
    if reason is not None:
        return {"shape": list(sample.x.shape), "note": reason}
    sigma = (spectrum or LastSpectrum()).of(sample.x)
    data = spectrum_data(sigma, limit_rows(sample.x).shape)
    return {
        "shape": list(sample.x.shape),
        **{key: value for key, value in data.items() if not key.startswith("noise_sigma")},
        "stable_rank": float((sigma.double() / sigma[0]).square().sum()),
        **risk_data(sample, sigma),
    }


def tensor_portrait(sample: Sample, length: int | None) -> dict[str, Any]:
    """Return everything that figures show of one tensor.

    Args:
        sample: x [t c]; a zero or non-finite one gives {"note": reason}.
        length: rows of a sequence, for the alignment of an activation or gradient; None: its rows
            are no sequences, as an expert's rows.
    """
    reason = unusable(sample.x)
    if reason is not None:
        return {"shape": list(sample.x.shape), "note": reason}
    data: dict[str, Any] = {"shape": list(sample.x.shape)}
    rank = sample.quantizers.split_rank()
    if sample.kind != "weight":
        data["alignment"] = alignment.alignment_data(sample.x, rank, length)
        few = Sample(sample.x[:PORTRAIT_ROWS], sample.kind, sample.quantizers)
    else:
        few = sample
    x = limit_rows(few.x)
    svd = Svd.of(x)
    data["spectrum"] = spectrum_data(svd.s, x.shape)
    data["components"] = distributions.component_data(x, svd)
    data["residual"] = distributions.residual_data(x, svd)
    data["preprocessing"] = distributions.preprocessing_data(x, svd, rank)
    del svd
    data["distortion"], copies = distortion_data(few)
    data["magnitudes"] = distributions.magnitude_data(few.x, copies)
    return data


def residual_spectra(
    stored: StoredWeight, control: StoredWeight | None, rank: int
) -> dict[str, Any] | None:
    """Return spectra of a Metis-trained residual and of a weight trained without Metis.

    Returns:
        Curves by label, each with sigma and elbow (`spectrum_data`), or None where the weight is
        not split. Beside the residual: the weight that it is part of, the control's weight, and
        the control's weight without its `rank` leading components, the plainest comparison (left
        out where the weight has no more than those).
    """
    if stored.residual is None or unusable(stored.weight) or unusable(stored.residual):
        return None
    matrices = {"Metis: residual": stored.residual, "Metis: whole weight": stored.weight}
    if control is not None:
        matrices["control: weight"] = control.weight
    curves = {}
    for label, matrix in matrices.items():
        rows = limit_rows(matrix)
        curves[label] = spectrum_data(singular_values(rows), rows.shape)
    whole = "Metis: whole weight" if control is None else "control: weight"
    rest = torch.tensor(curves[whole]["sigma"][rank:])
    if not rest.numel():
        return curves
    shape = (control or stored).weight.shape
    label = f"{whole.split(':')[0]}: weight without its top {rank}"
    curves[label] = spectrum_data(rest, (shape[0] - rank, shape[1] - rank))
    return curves
