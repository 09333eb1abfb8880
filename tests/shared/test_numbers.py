"""Numbers for people are rounded before their unit is chosen."""

from __future__ import annotations

from metis_hf.shared.numbers import gib, short_number, si


def test_units():
    for count, text in {
        0: "0", 7: "7", 999: "999", 320_000: "320k", 999_400: "999k", 999_600: "1M",
        3_190_000: "3.19M", 999_999_999: "1B", 8.03e9: "8.03B", 1e16: "1e+04T",
    }.items():  # fmt: skip
        assert short_number(count) == text
    assert si(4.1e9, "B") == "4.1 GB"
    assert si(999_600, "FLOP") == "1 MFLOP"
    assert si(0.25, "s") == "0.25 s"
    assert si(-2e3, "B") == "-2 kB"
    assert (gib(2**30), gib(2**29)) == ("1.00 GiB", "512.0 MiB")
