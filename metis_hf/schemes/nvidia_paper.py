"""NVIDIA's recipe as the authors of Metis rebuilt it for comparison."""

from __future__ import annotations

from metis_hf.schemes.parts import (
    FullHadamard,
    MetisConfig,
    Scheme,
    key_of,
    register_scheme,
    rotated_scheme,
    stochastic_everywhere,
)


@register_scheme(
    "nvidia-paper",
    summary="full-width random Hadamard on all three tensors, stochastic rounding everywhere",
    source="arXiv 2509.00404, extended evaluation, and its released code",
)
def nvidia_paper(config: MetisConfig, rank: int) -> Scheme:
    """Rotate and round stochastically as arXiv 2509.00404 does; NVIDIA's own is `nvidia`.

    The paper says "a random Hadamard transform alongside SR", with SR in all its experiments. Its
    code rotates the features of input, weight and output gradient by one wide Hadamard matrix, and
    uses each quantized tensor, rotated back, in all its GEMMs. That matrix has no random signs and
    4096 columns for any width; here it has signs, as the paper says, and as many columns as the
    tensor.
    """
    rotation = FullHadamard(seed=key_of("hadamard", config.seed).static)
    return rotated_scheme(config, stochastic_everywhere(config), rotation)
