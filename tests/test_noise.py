"""Counter-based noise: uniform, independent between keys, and nothing taken from torch."""

import torch

from metis_hf.noise import Key, fingerprint, key_of, uniform

N = 1 << 20
SIGMA_MEAN = (1 / 12 / N) ** 0.5  # standard error of the mean of N uniform draws


def test_moments_and_range():
    for key in (
        Key(0),
        Key(1),
        key_of("layer", 0, "x"),
        Key(5, torch.tensor(9, dtype=torch.int32)),
    ):
        u = uniform((N,), key).double()
        assert u.min() >= 0
        assert u.max() < 1
        assert abs(u.mean() - 0.5) < 4 * SIGMA_MEAN
        # Var of the sample variance of a uniform: (1/80 - 1/144) / N.
        assert abs(u.var() - 1 / 12) < 4 * ((1 / 80 - 1 / 144) / N) ** 0.5
        assert torch.equal(u * 2**24, (u * 2**24).round())


def test_pairs_of_keys_and_of_neighbours_are_independent():
    """Chi-squared of the joint histogram of 16 x 16 cells, within 5 sigma of its mean 255."""

    def chi2(a, b):
        cell = (a * 16).long() * 16 + (b * 16).long()
        counts = torch.bincount(cell, minlength=256).double()
        return ((counts - N / 256).square() / (N / 256)).sum().item()

    data = [torch.tensor(value, dtype=torch.int32) for value in (1, 2, -(2**31))]
    keys = [Key(1), Key(2), Key(0x80000001), Key(3).fold(1), Key(3).fold(2)]
    keys += [Key(1, value) for value in data]
    streams = [uniform((N,), key) for key in keys]
    limit = 255 + 5 * (2 * 255) ** 0.5
    for i, a in enumerate(streams):
        for b in streams[i + 1 :]:
            assert chi2(a, b) < limit
    for lag in (1, 2, 16, 64, 192, 1024):
        assert chi2(streams[0], streams[0].roll(lag)) < limit


def test_long_tensors_continue_the_cached_stream():
    """Above the cached number of indices the hash is computed anew; the values are the same."""
    n = (1 << 22) + 8
    assert torch.equal(uniform((n,), Key(3))[: 1 << 22], uniform((1 << 22,), Key(3)))


def test_function_of_the_key_alone():
    before = torch.get_rng_state()
    a = uniform((100, 3), Key(7))
    assert torch.equal(a, uniform((100, 3), Key(7)))
    assert torch.equal(a.flatten(), uniform((300,), Key(7)))
    assert torch.equal(before, torch.get_rng_state())


def test_fingerprint_follows_content():
    x = torch.randn(64, 48)
    assert fingerprint(x) == fingerprint(x.clone())
    assert fingerprint(x.T.contiguous().T) == fingerprint(x)
    assert fingerprint(x) != fingerprint(x + 1e-6)
    assert fingerprint(x) != fingerprint(x.roll(1))
    assert fingerprint(torch.empty(0, 4)) == 0
