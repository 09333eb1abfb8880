"""Eigenvectors and bases without synchronization, in torch's operations."""

from __future__ import annotations

from metis_hf.transforms.spectral import fewest_rotations
from numerics.kernels.orthogonal_cases import OrthogonalCases


class TestOperations(OrthogonalCases):
    kernels = None
    device = "cpu"


def test_a_wider_sketch_rotates_more_often() -> None:
    assert [fewest_rotations(width) for width in (1, 17, 40, 64, 128)] == [5, 5, 5, 6, 7]
