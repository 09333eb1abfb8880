"""What `quantize` and `fake_quantize` refuse, and that messages say what was asked and is true."""

from __future__ import annotations

import re

import pytest
import torch

from metis_hf.numerics import (
    E2M1,
    SCALE_E8M0,
    SCALE_FP32,
    BlockFormat,
    CodebookFormat,
    FloatFormat,
    IntFormat,
    fake_quantize,
    get_format,
    quantize,
)
from numerics.cases import label

BOTH = (fake_quantize, quantize)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fmt": "nvpf4"}, ["'nvpf4'", "did you mean 'nvfp4'", "mxfp4", "nvint4"]),
        ({"fmt": "mxfp8"}, ["'mxfp8'", "did you mean 'mxfp", "mxfp8-e4m3", "mxfp8-e5m2"]),
        ({"fmt": "NVFP4"}, ["'NVFP4'", "did you mean 'nvfp4'"]),
        ({"fmt": "qqq"}, ["'qqq'", "unknown", "nvfp4", "fp8-e4m3"]),
        ({"fmt": None}, ["None", "unknown", "nvfp4"]),
        ({"rounding": "flor"}, ["rounding='flor'", "'nearest'", "'stochastic'"]),
        ({"scale_rounding": "down"}, ["scale_rounding='down'", "'nearest'", "'up'", "'floor'"]),
        ({"tile": "hexagon"}, ["tile='hexagon'", "'row'", "'square'", "'tensor'"]),
        ({"scale_rule": "best"}, ["scale_rule='best'", "'absmax'", "'four-over-six'"]),
        ({"fmt": "mxfp4", "two_level": True}, ["two_level=True", "mxfp4", "e8m0", "nvfp4"]),
        (
            {"fmt": "mxfp4", "scale_rounding": "nearest"},
            ["scale_rounding='nearest'", "mxfp4", "e8m0", "'floor'", "'up'"],
        ),
        (
            {"fmt": "nvfp4", "scale_rounding": "floor"},
            ["scale_rounding='floor'", "nvfp4", "e4m3", "'nearest'", "'up'"],
        ),
        ({"fmt": "int4", "scale_rounding": "up"}, ["scale_rounding='up'", "int4", "'nearest'"]),
        ({"fmt": "fp8-e4m3", "tile": "square"}, ['tile="square"', "fp8-e4m3", '"row"', '"tensor"']),
        ({"fmt": "nvfp4", "tile": "tensor"}, ['tile="tensor"', "nvfp4", '"row"', "fp8-e4m3"]),
        (
            {"fmt": "mxfp4", "scale_rule": "four-over-six"},
            ["four-over-six", "mxfp4", "NVFP4", "absmax"],
        ),
        ({"fmt": "nvint4", "scale_rule": "four-over-six"}, ["four-over-six", "nvint4", "absmax"]),
        ({"fmt": "mxfp4", "scale_rule": "unbiased"}, ["unbiased", "mxfp4", "NVFP4", "absmax"]),
        (
            {
                "fmt": BlockFormat("own", CodebookFormat("own", (-1, 0, 1)), SCALE_E8M0, 32),
                "scale_rounding": "even",
            },
            ['scale_rounding="even"', "own", "codebook", '"floor"'],
        ),
        ({"fmt": "mxfp4", "scale_rule": "search"}, ["search", "mxfp4", "NVFP4", "absmax"]),
    ],
    ids=label,
)
def test_refusals_name_what_was_asked_and_what_there_is(options, words) -> None:
    for function in BOTH:
        with pytest.raises(ValueError, match=re.escape(words[0])) as error:
            function(torch.ones(32, 32), **options)
        assert all(word in str(error.value) for word in words), error.value


def test_an_unlike_name_gets_no_hint() -> None:
    with pytest.raises(ValueError, match="unknown") as error:
        get_format("qqq")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("x", "options", "error", "words"),
    [
        *(
            (torch.ones(2, 32, dtype=dtype), {}, TypeError, [str(dtype)])
            for dtype in (torch.int8, torch.bool, torch.complex64)
        ),
        ([1.0, 2.0], {}, TypeError, ["floating-point tensor, got list"]),
        (torch.ones(16), {"dim": None}, TypeError, ["dim=None"]),
        (torch.ones(2, 32), {"dim": 2}, IndexError, ["dim=2", "(2, 32)"]),
        (torch.ones(2, 32), {"dim": -3}, IndexError, ["dim=-3", "(2, 32)"]),
        (torch.ones(()), {"dim": 1}, IndexError, ["dim=1", "()"]),
        (torch.ones(16), {"tile": "square"}, ValueError, ["square", "(16,)", "row"]),
        # A scalar is quantized as one element.
        (torch.ones(()), {"tile": "square", "fmt": "int4"}, ValueError, ["square", "(1,)", "row"]),
    ],
    ids=label,
)
def test_other_tensors_and_dimensions_are_refused(x, options, error, words) -> None:
    for function in BOTH:
        with pytest.raises(error, match=re.escape(words[0])) as raised:
            function(x, **options)
        assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IntFormat("own", 12), "has 12 bits, .*give 2 to 8"),
        (lambda: IntFormat("own", 1), "has 1 bits, .*give 2 to 8"),
        (lambda: FloatFormat("own", 5, 6, bias=15, max=64512.0), "has 12 bits, .*give 2 to 8"),
        (lambda: FloatFormat("own", 3, 0, bias=3, max=16.0), "mantissa_bits=0; .*CodebookFormat"),
        (lambda: FloatFormat("own", 0, 3, bias=1, max=0.875), "exponent_bits=0 .*CodebookFormat"),
        (lambda: FloatFormat("own", 2, 1, bias=1, max=5.5), "max=5.5, .*one below is 4.0"),
        (lambda: BlockFormat("own", E2M1, SCALE_FP32, 0), "block_size=0; .*None for one scale"),
        (lambda: BlockFormat("own", E2M1, SCALE_FP32, -4), "block_size=-4"),
    ],
)
def test_formats_that_codes_or_kernels_cannot_hold_are_refused(make, words) -> None:
    """Codes lie in bytes, ties go to the even code, and the largest code is a value."""
    with pytest.raises(ValueError, match=f"format 'own' .*{words}"):
        make()
