"""A linear layer with quantized operands, worked out in float64 with its error bounds.

Rounding to four bits is discontinuous: fp32 and float64 evaluate a residual to different last
bits, and where that crosses a tie, the codes differ by a whole step. So the chain is checked link
by link, from a recording of what the layer gave its quantizers and what they returned:
    1. what a quantizer was given, against its formula in float64, within the fp32 error bound;
    2. what it returned for exactly that, against the scalar reference, bit for bit;
    3. the products of those, in float64, against the layer's results, within the error bound.
Each link starts from the layer's own previous one, so nothing can be off by a rounding step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from operands.eden_reference import eden
from reference import fake_quantize

from layers.layer_tools import Call
from metis_hf.noise import uniform

UNIT = 2.0**-24  # relative error of one fp32 operation


@dataclass(frozen=True)
class Terms:
    """A float64 array, and the sum of magnitudes of the terms that each entry is made of.

    Every fp32 evaluation whose terms go through at most n roundings is within n * UNIT * size of
    `value`, to first order: the standard bound of error analysis, cancellation included.
    """

    value: np.ndarray
    size: np.ndarray

    def __add__(self, other: Terms) -> Terms:
        return Terms(self.value + other.value, self.size + other.size)

    def __sub__(self, other: Terms) -> Terms:
        return Terms(self.value - other.value, self.size + other.size)

    def __mul__(self, other: Terms) -> Terms:
        return Terms(self.value * other.value, self.size * other.size)

    def __matmul__(self, other: Terms) -> Terms:
        return Terms(self.value @ other.value, self.size @ other.size)

    @property
    def T(self) -> Terms:
        return Terms(self.value.T, self.size.T)

    def column_norms(self) -> Terms:
        """The error of a norm is at most the norm of the errors."""
        return Terms(np.linalg.norm(self.value, axis=0), np.linalg.norm(self.size, axis=0))

    def divided_by(self, other: Terms) -> Terms:
        """d(a/b) = da/b - (a/b) db/b."""
        value = self.value / other.value
        return Terms(value, (self.size + np.abs(value) * other.size) / other.value)


def exact(values) -> Terms:
    """Numbers that the layer has in fp32."""
    values = np.asarray(values, np.float64)
    return Terms(values, np.abs(values))


def array(tensor) -> np.ndarray:
    return tensor.detach().numpy()


class Recording:
    """The quantizations of one forward and backward pass, taken one by one in order."""

    def __init__(self, calls: list[Call], roundings: int) -> None:
        self.calls = iter(calls)
        self.roundings = roundings

    def quantize(self, expected: np.ndarray | Terms, row: Slot) -> Terms:
        """The next quantized tensor, after checking that it is `expected`, quantized as in `row`.

        `expected` is an array that the layer must hand over unchanged, or Terms that it computes.
        """
        call = next(self.calls, None)
        assert call is not None, f"{row.slot}: nothing more was quantized"
        given = array(call.before)
        if isinstance(expected, Terms):
            self.check(given, expected, f"{row.slot}: what is quantized")
        else:
            np.testing.assert_array_equal(given, expected, f"{row.slot}: what is quantized")
        assert_quantized_as(call, row)
        assert call.quantizer.rounding.value == "nearest"
        if row.scale_rule == "eden":
            found = eden(given, scale_noise(call), row.dim).values
        else:
            found = fake_quantize(
                given,
                row.fmt,
                dim=row.dim,
                scale_rounding=row.scale_rounding,
                tile=row.tile,
                scale_rule=row.scale_rule,
            ).values
        assert found.tobytes() == array(call.after).tobytes(), f"{row.slot}: the quantized values"
        return exact(found)

    def check(self, found: np.ndarray, expected: Terms, what: str) -> None:
        """Holds the layer's fp32 numbers to the float64 ones."""
        assert found.shape == expected.value.shape, what
        error = np.abs(np.asarray(found, np.float64) - expected.value)
        tolerance = self.roundings * UNIT * expected.size
        worst = np.unravel_index(np.argmax(error - tolerance), error.shape)
        assert np.all(error <= tolerance), (
            f"{what} at {worst}: off by {error[worst]:.3g}, at most {tolerance[worst]:.3g}"
        )


@dataclass(frozen=True)
class Slot:
    """One line of the operand table: how a tensor enters a GEMM."""

    slot: str  # "fprop.input", ...
    source: str  # "x", "w", "dy"; of a reused copy: ""
    # "1x16", "16x16": NVFP4; "1x32", "32x32": MXFP4; "1x16u": UFP4, "i": IF4, "m": MixFP4;
    # "-": high precision
    blocks: str = "-"
    along: str = "-"  # the dimension that 1x16 blocks run along: "in", "out", "tokens"
    rounding: str = "-"
    scales: str = "-"  # of block scales; "nearest-4/6": each block's maximum on 6 or on 4
    conditioner: str = "direct"
    reuses: str = ""  # the slot whose quantized copy is taken
    corrected: bool = False  # its errors are added in the other operand's dominant directions

    @property
    def tile(self) -> str:
        return "row" if self.blocks.startswith("1x") else "square"

    @property
    def fmt(self) -> str:
        names = {"16": "nvfp4", "32": "mxfp4", "16u": "ufp4", "16i": "if4", "16m": "mixfp4"}
        return names[self.blocks.split("x")[1]]

    @property
    def scale_rounding(self) -> str:
        return self.scales.partition("-")[0]

    @property
    def scale_rule(self) -> str:
        rules = {"4/6": "four-over-six", "search": "search", "eden": "eden"}
        rules["unbiased"] = "unbiased"
        return rules.get(self.scales.rpartition("-")[2], "absmax")

    @property
    def dim(self) -> int:
        """As an index of the source: tokens are the rows of x and dy, out those of w."""
        return 0 if self.along == "tokens" or (self.source, self.along) == ("w", "out") else -1

    @property
    def quantized(self) -> bool:
        return self.blocks != "-"


def scale_noise(call: Call) -> np.ndarray:
    """The noise with which MS-EDEN rounded a call's scales: [t blocks] or [blocks c]."""
    rows, columns = call.before.shape
    shape = (rows, -(-columns // 16)) if call.dim % 2 else (-(-rows // 16), columns)
    return array(uniform((shape[0] * shape[1],), call.key.fold(1))).reshape(shape)


def assert_quantized_as(call: Call, row: Slot) -> None:
    """The quantizer of a recorded call is that of the table, apart from its element rounding."""
    assert call.quantizer.fmt.name == row.fmt
    assert call.quantizer.two_level == (row.fmt in ("nvfp4", "if4", "mixfp4")), row.slot
    assert call.quantizer.tile.value == row.tile, row.slot
    assert call.quantizer.scale_rounding.value == row.scale_rounding, row.slot
    assert call.quantizer.scale_rule.value == row.scale_rule, row.slot
    assert row.tile == "square" or call.dim % 2 == row.dim % 2, row.slot


def sylvester(signs: np.ndarray) -> np.ndarray:
    """H[i, j] = (-1)^popcount(i & j) / sqrt(n), columns times the signs."""
    n = len(signs)
    entries = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return np.array(entries) / n**0.5 * signs


def rotation(rows: int, signs: np.ndarray) -> np.ndarray:
    """The block-diagonal matrix that rotates a column of `rows` entries, zero-padded to blocks."""
    blocks = -(-rows // len(signs))
    return np.kron(np.eye(blocks), sylvester(signs))[:, :rows]


def hadamard_operand(recording: Recording, x: np.ndarray, row: Slot, signs: np.ndarray) -> Terms:
    """H^T Q(H x): the rotated matrix, blocks along its rotated dimension, and rotated back.

    With the rows (or columns) of its padding, which quantization in the rotated basis fills.
    """
    if row.dim == -1:
        h = rotation(x.shape[1], signs)
        quantized = recording.quantize(exact(x) @ exact(h).T, row)
        return quantized @ exact(rotation(h.shape[0], signs))
    h = rotation(x.shape[0], signs)
    quantized = recording.quantize(exact(h) @ exact(x), row)
    return exact(rotation(h.shape[0], signs)).T @ quantized


def rotated_operand(
    recording: Recording, x: np.ndarray, row: Slot, rotation: np.ndarray, axis: int
) -> Terms:
    """R^T Q(R x) along an axis: the whole dimension rotated, quantized and rotated back."""
    r = exact(rotation)
    if axis == 0:
        return r.T @ recording.quantize(r @ exact(x), row)
    return recording.quantize(exact(x) @ r.T, row) @ r


def mean_operand(
    recording: Recording, x: np.ndarray, row: Slot, signs: np.ndarray | None = None
) -> Terms:
    """1 Q(mu) + Q(x - 1 mu) with mu the mean of the rows, in blocks along its length.

    With signs the rest is rotated by Hadamard's matrix: 1 Q(mu) + H^T Q(H (x - 1 mu)). Rows of
    padding have no mean.
    """
    rows = exact(np.full((1, x.shape[0]), 1 / x.shape[0]))
    mean = rows @ exact(x)
    exact_mean = row.conditioner == "mean exact"
    mean_hat = mean if exact_mean else recording.quantize(mean, replace(row, along="in"))
    ones = exact(np.ones((x.shape[0], 1)))
    rest = exact(x) - ones @ mean
    if signs is None:
        return ones @ mean_hat + recording.quantize(rest, row)
    assert row.dim == 0
    h = exact(rotation(x.shape[0], signs))
    quantized = recording.quantize(h @ rest, row)
    padded = exact(rotation(len(quantized.value), signs))
    tokens = exact((np.arange(len(quantized.value)) < x.shape[0])[:, None])
    return tokens @ mean_hat + padded.T @ quantized


@dataclass(frozen=True)
class SpectralParts:
    """A matrix [t c] that was split to be quantized."""

    x_hat: Terms
    left: Terms  # Q(a) [t k]
    lengths: Terms  # lam [k]
    right: Terms  # Q(v^T) [k c]


def spectral_operand(
    recording: Recording, x: np.ndarray, row: Slot, basis: np.ndarray
) -> SpectralParts:
    """Q(a) lam Q(v^T) + Q(residual) with p = x v, lam = |p| of each column, a = p / lam."""
    x, v = exact(x), exact(basis)
    p = x @ v  # [t c] @ [c k] -> [t k]
    lam = p.column_norms()  # [k]
    a = p.divided_by(lam)
    a_hat = recording.quantize(a, row)
    vh_hat = recording.quantize(basis.T, row)
    low = (a_hat * lam) @ vh_hat  # [t k] @ [k c] -> [t c]
    removed = low if "compensated" in row.conditioner else (a * lam) @ v.T
    return SpectralParts(low + recording.quantize(x - removed, row), a_hat, lam, vh_hat)


def correction(
    recording: Recording, error: Terms, row: Slot, near: Terms, lengths: Terms, far: Terms
) -> Terms:
    """Q(error near diag(lengths)) far: [m n] @ [n k], quantized along k, @ [k p]."""
    along_last = replace(row, source="x", along="in")
    return recording.quantize((error @ near) * lengths, along_last) @ far


@dataclass(frozen=True)
class SplitParts:
    """A split weight in float64: w_hat and what its gradients need."""

    w_hat: Terms
    u_hat: Terms
    s: Terms  # with the gain
    vh_hat: Terms
    gain: Terms

    def gradients(self, dw: Terms) -> Iterator[tuple[str, Terms]]:
        """The chain rule through w_hat = u_hat diag(s) vh_hat + residual."""
        dw_v = dw @ self.vh_hat.T  # [o i] @ [i k] -> [o k]
        product = self.u_hat * dw_v
        column_sums = Terms(product.value.sum(0), product.size.sum(0))
        yield "u", dw_v * self.s
        yield "s", column_sums * self.gain
        yield "vh", (self.s * (dw.T @ self.u_hat)).T
        yield "weight_residual", dw


def split_weight(
    recording: Recording, params: dict[str, np.ndarray], row: Slot, gain: float
) -> SplitParts:
    """Q(u) s Q(vh) + Q(residual); compensated: + Q(residual + u s vh - Q(u) s Q(vh))."""
    u, vh, residual = params["u"], params["vh"], params["weight_residual"]
    s = exact(params["s"]) * exact(gain)
    dense = (exact(u) * s) @ exact(vh) + exact(residual)
    if not row.quantized:
        return SplitParts(dense, exact(u), s, exact(vh), exact(gain))
    u_hat, vh_hat = recording.quantize(u, row), recording.quantize(vh, row)
    low = (u_hat * s) @ vh_hat
    rest = dense - low if row.conditioner == "split compensated" else residual
    return SplitParts(low + recording.quantize(rest, row), u_hat, s, vh_hat, exact(gain))
