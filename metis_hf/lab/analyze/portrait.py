"""Measures a tensor: its line in the table of layers, or the data of all its figures."""

from __future__ import annotations

from dataclasses import replace
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

PORTRAIT_ROWS = 4096  # token rows of an activation or gradient; alignment uses all rows


def unusable(x: Tensor) -> str | None:
    """Return why a matrix has no meaningful spectrum, or None if it has one."""
    if not bool(torch.isfinite(x).all()):
        return "NaN or infinite elements"
    return None if bool(x.any()) else "all zero"


def tensor_line(sample: Sample, spectrum: LastSpectrum | None = None) -> dict[str, Any]:
    """Return one tensor's values for the table of layers.

    These are shape, stable_rank, `spectrum_data` without noise_sigma, and `risk_data`; for a tensor
    without a spectrum, shape and note (the reason).
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
    """Return the data of all figures of one tensor; shape and note (the reason) if unusable.

    `length` rows form a sequence; None if the rows do not form sequences, such as an expert's.
    """
    data: dict[str, Any] = {"shape": list(sample.x.shape)}
    reason = unusable(sample.x)
    if reason is not None:
        return data | {"note": reason}
    rank, few = sample.quantizers.split_rank(), sample
    if sample.kind != "weight":
        data["alignment"] = alignment.alignment_data(sample.x, rank, length)
        few = replace(sample, x=sample.x[:PORTRAIT_ROWS])
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
        Curves (`spectrum_data`) by label, or None if the weight is not split or unusable: the
        residual, its whole weight, the control's weight, and the control's weight without its
        `rank` leading components, the fair comparison (skipped if no component is left). Without a
        control, the last curve is of the whole weight.
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
