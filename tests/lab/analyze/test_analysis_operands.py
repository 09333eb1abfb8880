"""Tensors of a layer under each scheme, as the analysis quantizes them."""

from __future__ import annotations

import pytest
import torch

from metis_hf.lab.analyze.distortion import SCHEMES, Quantizers, Sample, distortion_data
from metis_hf.lab.analyze.portrait import residual_spectra
from metis_hf.lab.analyze.stored_weights import StoredWeight
from metis_hf.operands.split_weight import SplitWeight


def test_residual_of_a_split_that_keeps_every_direction():
    """As in small layers, where 32 are all: no component is left to compare with."""
    weight, noise = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0))
    parts = (torch.eye(32), torch.ones(32), weight - noise / 8, noise / 8)
    stored = StoredWeight("layer", weight, parts, SplitWeight(len(parts[1])), "metis")
    assert list(residual_spectra(stored, None, 32)) == ["Metis: residual", "Metis: whole weight"]
    assert len(residual_spectra(stored, None, 31)["Metis: weight without its top 31"]["sigma"]) == 1


def test_rows_of_a_split_weight_are_quantized_as_it_is_stored():
    """With the rank that it is stored in, which is not the scheme's own."""
    weight, noise = torch.randn(2, 96, 96, generator=torch.Generator().manual_seed(0))
    u, s, vh = torch.linalg.svd(weight - noise / 8)
    parts = (u[:, :32], s[:32], vh[:32], weight - (u[:, :32] * s[:32]) @ vh[:32])
    stored = StoredWeight("layer", weight, parts, SplitWeight(32), "metis")
    few = Sample(weight, "weight", Quantizers("layer", (96, 96)), stored).limited(80)
    assert few.x.shape == (80, 96)
    assert few.stored is not None
    assert few.quantizers.rank == 32
    wanted = Quantizers("layer", (80, 96), 32).weight(few.stored, "metis").values
    direct = Quantizers("layer", (80, 96), 31).weight(few.stored, "metis").values
    assert torch.equal(few.quantize("metis").values, wanted)
    assert not torch.equal(wanted, direct)


def test_quantized_rows_are_the_schemes_operands():
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    quantizers = Quantizers("layer", (32, 48), rank=4)
    assert quantizers.split_rank() == 4
    sample = Sample(x, "activation", quantizers)
    direct = sample.quantize("nvfp4")
    assert direct.zeroed == float(((direct.values == 0) & (x != 0)).float().mean())
    # E2M1 with 16 elements a scale: at most 15 levels in a block.
    assert max(len(row.unique()) for row in direct.values.view(-1, 16)) <= 15
    assert torch.equal(direct.values, sample.quantize("nvfp4").values)  # noise repeats
    data, copies = distortion_data(sample)
    assert list(data) == list(copies) == list(SCHEMES)
    assert data["metis"]["sqnr_db"] > data["nvfp4"]["sqnr_db"]
    for errors in data.values():
        assert len(errors["sigma_error"]) == len(errors["left"]) == 48


def test_operands_that_need_a_call_are_refused():
    """By themselves they would quantize directly, and pass that off as the scheme's."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    quantizers = Quantizers("layer", (64, 48), rank=4)
    for scheme in ("smoothquant", "outlier-suppression-plus", "svdquant"):
        for kind, stored in (("activation", None), ("weight", StoredWeight("layer", x))):
            with pytest.raises(
                ValueError, match=f"{scheme}.* information about the layer's other tensors"
            ):
                Sample(x, kind, quantizers, stored).quantize(scheme)
        # What does not depend on the call is measured.
        assert Sample(x, "gradient", quantizers).quantize(scheme).zeroed > 0
