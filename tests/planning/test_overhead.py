"""The overhead of schemes, against counts by hand."""

from __future__ import annotations

import pytest

from metis_hf import MetisConfig, scheme_names
from metis_hf.planning.overhead import overhead

IN, OUT, T = 512, 384, 8192
GEMM = 3 * T * IN * OUT


def of(scheme, tokens=T, **changes):
    return overhead([((IN, OUT), MetisConfig(scheme=scheme, **changes))], tokens)


@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme_has_a_cost(scheme):
    found = of(scheme)
    assert all(share > 0 for share in found.parts.values())
    assert found.share == pytest.approx(sum(found.parts.values()))
    assert (found.weight_bits >= 16) == (scheme in ("bf16", "bf16-split"))


def test_direct_schemes_add_nothing():
    for scheme in ("bf16", "nvfp4", "nvfp4-rne", "mxfp4"):
        assert of(scheme).share == 0, scheme
    assert of("nvfp4-rne").weight_bits == 4.5


def test_metis_by_hand():
    """Projections and low-rank parts of x, dy and w; two thin products for each correction."""
    k = 16
    found = of("metis", rank=k)
    # t i k of x, t o k of dy, o i k of w: once for the projection, once for the residual.
    thin = T * IN * k + T * OUT * k + OUT * IN * k
    assert found.parts["projection"] == pytest.approx(thin / GEMM)
    # And the subtraction of every element, which is no product but runs beside them.
    assert found.parts["low_rank"] == pytest.approx((thin + thin / k) / GEMM)
    # fprop's input: t i k + t k o; fprop's weight: o i k + t k o; dgrad's weight: i o k + i k t.
    corrections = T * k * (IN + OUT) + (OUT * IN * k + T * k * OUT) + (IN * OUT * k + IN * k * T)
    assert found.parts["corrections"] == pytest.approx(corrections / GEMM)


def test_more_tokens_share_the_weight_s_split():
    assert of("metis", tokens=100_000).share < of("metis", tokens=1000).share


def test_own_copies_cost_more():
    shared, own = of("metis"), of("metis", operand_mode="contraction")
    assert own.parts["projection"] == pytest.approx(2 * shared.parts["projection"])


def test_rotations_count_as_dense_products():
    # nvidia rotates both operands of wgrad, t i and t o, with 16 x 16 matrices.
    assert of("nvidia").parts == {"rotation": pytest.approx(16 * T * (IN + OUT) / GEMM)}
