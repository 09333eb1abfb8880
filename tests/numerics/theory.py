"""Expected quantization error from the formats' definitions: numpy in float64, nothing of metis_hf.

Elements of a block are independent with known densities. All of a block's error depends on its
largest magnitude m through the scale s(m), so the expected squared error is an integral over the
density of m. Given m, one element has magnitude m and the others have their own densities cut off
at m; an element's squared error is a quadratic between two neighbouring break points of the grid,
so its expectation is a sum of partial moments 0, 1 and 2, which are closed forms here. Only the
integral over m is numerical.

The one thing taken from the data is the amax of the whole tensor, on which tensor scales depend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import reference_formats as formats

# --- formats -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """Elements, scale and block length (None: a row) of a format; see `block_scales`."""

    grid: np.ndarray
    scale: str  # "e4m3", "e8m0" or "fp32"
    block: int | None

    @property
    def largest(self) -> float:
        return float(self.grid[-1])


FORMATS = {
    name: Format(np.array(fmt.element.grid), fmt.scale, fmt.block)
    for name, fmt in formats.FORMATS.items()
    if fmt.other is None
}
NOTHING_CLIPS = [
    {"fmt": name, "scale_rounding": "nearest" if fmt.scale == "fp32" else "up"}
    for name, fmt in FORMATS.items()
]
E4M3_GRID = np.array(formats.E4M3_GRID)


def e4m3(values: np.ndarray, rounding: str) -> np.ndarray:
    """Values >= 0 on the E4M3 grid, saturating. Ties do not matter to an integral over m."""
    values = np.minimum(values, E4M3_GRID[-1])
    if rounding == "up":
        return E4M3_GRID[np.searchsorted(E4M3_GRID, values)]
    return E4M3_GRID[np.searchsorted((E4M3_GRID[1:] + E4M3_GRID[:-1]) / 2, values)]


def block_scales(
    m: np.ndarray,
    fmt: Format,
    *,
    rounding: str | None = None,
    tensor_amax: float | None = None,
) -> np.ndarray:
    """Decode scales s(m) of blocks whose largest magnitude is m.

    Args:
        rounding: "nearest" or "up" for E4M3 scales, "floor" or "up" for E8M0 ones.
        tensor_amax: of the whole tensor; None for one level.
    """
    if fmt.scale == "fp32":
        return m / fmt.largest
    if fmt.scale == "e8m0":
        # floor(log2) by frexp: exact at powers of two.
        scale = np.exp2(np.frexp(m)[1] - np.frexp(fmt.largest)[1])
        return np.where((m > scale * fmt.largest) & (rounding == "up"), 2 * scale, scale)
    encode = 1.0 if tensor_amax is None else fmt.largest * 448 / tensor_amax
    return e4m3(m * encode / fmt.largest, rounding or "nearest") / encode


# --- densities -----------------------------------------------------------------------------------

_erf = np.vectorize(math.erf, otypes=[float])


class Density:
    """Of a magnitude a >= 0, with unit size parameter."""

    def pdf(self, a: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def moments(self, a: np.ndarray) -> np.ndarray:
        """[3 ..]: integrals of 1, t and t^2 times the density over 0 <= t <= a."""
        raise NotImplementedError


class Normal(Density):
    """|N(0, 1)|."""

    def pdf(self, a):
        return math.sqrt(2 / math.pi) * np.exp(-a * a / 2)

    def moments(self, a):
        below, density = _erf(a / math.sqrt(2)), self.pdf(a)
        return np.stack([below, math.sqrt(2 / math.pi) - density, below - a * density])


class Uniform(Density):
    """Uniform on [0, 1]."""

    def pdf(self, a):
        return np.where(a <= 1, 1.0, 0.0)

    def moments(self, a):
        a = np.minimum(a, 1.0)
        return np.stack([a, a**2 / 2, a**3 / 3])


class Student3(Density):
    """|t| with 3 degrees of freedom: variance 3, no fourth moment."""

    def pdf(self, a):
        return 4 / (math.pi * math.sqrt(3)) / (1 + a * a / 3) ** 2

    def moments(self, a):
        u = a / math.sqrt(3)
        angle, ratio = np.arctan(u), u / (1 + u * u)
        return np.stack(
            [
                2 / math.pi * (angle + ratio),
                2 * math.sqrt(3) / math.pi * u * ratio,
                6 / math.pi * (angle - ratio),
            ]
        )


class Elements(NamedTuple):
    """`count` elements of a block, distributed as `size` times the density."""

    density: Density
    size: float
    count: int

    def pdf(self, a: np.ndarray) -> np.ndarray:
        return self.density.pdf(a / self.size) / self.size

    def moments(self, a: np.ndarray) -> np.ndarray:
        powers = self.size ** np.arange(3.0).reshape(-1, *([1] * np.ndim(a)))
        return self.density.moments(a / self.size) * powers

    def energy_below(self, amax: float) -> float:
        """Expected sum of squares, given that no magnitude exceeds amax."""
        mass, _, second = self.moments(np.array(amax))
        return float(self.count * second / mass)


NORMAL, UNIFORM, STUDENT3 = Normal(), Uniform(), Student3()

# --- error of one element ------------------------------------------------------------------------


class Cells(NamedTuple):
    """A function of a magnitude y: polynomial[k] applies for edges[k] <= y < edges[k + 1]."""

    edges: np.ndarray  # [n + 1], from 0 to inf
    polynomial: np.ndarray  # [n 3]: coefficients of 1, y, y^2


def squared_error(grid: np.ndarray, rounding: str) -> Cells:
    """Expected squared error of rounding y >= 0 onto the grid, clipping at its end.

    Nearest to q: (y - q)^2. Stochastic between l and h: (y - l)(h - y), the variance of the draw.
    """
    if rounding == "nearest":
        inner, points = (grid[1:] + grid[:-1]) / 2, grid
        quadratic = np.stack([points**2, -2 * points, np.ones_like(points)], axis=1)
    else:
        inner, low, high = grid[1:], grid[:-1], grid[1:]
        quadratic = np.stack([-low * high, low + high, -np.ones_like(low)], axis=1)
        top = grid[-1]
        quadratic = np.concatenate([quadratic, [[top**2, -2 * top, 1.0]]])
    return Cells(np.concatenate([[0.0], inner, [np.inf]]), quadratic)


def clipped_away(grid: np.ndarray) -> Cells:
    """y (y - top) beyond the grid's end, else 0: what clipping takes from E[y q]."""
    return Cells(np.array([0, grid[-1], np.inf]), np.array([[0, 0, 0], [0, -grid[-1], 1.0]]))


def at(cells: Cells, a: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """scale^2 * f(a / scale): the function in the units of a. With scale 0 all of a is lost."""
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.where(scale > 0, a / scale, np.inf)
    cell = np.searchsorted(cells.edges[:-1], y, side="right") - 1
    c0, c1, c2 = np.moveaxis(cells.polynomial[cell], -1, 0)
    return c0 * scale**2 + c1 * scale * a + c2 * a**2


def below(cells: Cells, elements: Elements, m: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Expectation of `at` over one element, given that its magnitude is at most m."""
    with np.errstate(invalid="ignore"):  # 0 * inf
        edges = np.nan_to_num(cells.edges * scale[:, None], nan=np.inf)
    moments = np.diff(elements.moments(np.minimum(edges, m[:, None])), axis=-1)  # [3 m cells]
    powers = np.stack([scale**2, scale, np.ones_like(scale)])
    total = np.einsum("kmc,ck,km->m", moments, cells.polynomial, powers)
    return total / elements.moments(m)[0]


# --- a block, a tensor ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Expected sums over the elements of blocks; blocks add up, `count * expected` repeats one."""

    elements: float
    energy: float  # x^2
    error: float  # (x - q)^2
    clip_loss: float  # x (x - clipped x): stochastic rounding keeps the rest of E[x q]
    clipped: float  # elements beyond the largest value of their block

    @property
    def sqnr_db(self) -> float:
        return 10 * math.log10(self.energy / self.error)

    @property
    def gain(self) -> float:
        """E[x q] / E[x x] of stochastic rounding."""
        return 1 - self.clip_loss / self.energy

    @property
    def clipped_share(self) -> float:
        return self.clipped / self.elements

    def _sums(self) -> tuple[float, ...]:
        return (self.elements, self.energy, self.error, self.clip_loss, self.clipped)

    def __add__(self, other: Expected) -> Expected:
        return Expected(*(a + b for a, b in zip(self._sums(), other._sums())))

    def __rmul__(self, count: float) -> Expected:
        return Expected(*(count * a for a in self._sums()))


class Maxima(NamedTuple):
    """A block's largest magnitude on a fine grid: weights[g, m] = P(it is m, and of group g)."""

    m: np.ndarray
    weights: np.ndarray


def maxima(block: Sequence[Elements], amax: float, points: int = 1000) -> Maxima:
    """Given that no magnitude exceeds amax.

    The probabilities of the cells are exact; inside one, P(group) is proportional to the group's
    count times pdf / cdf.
    """

    def cdf(edges: np.ndarray) -> np.ndarray:
        parts = [(g.moments(edges)[0] / g.moments(np.array(amax))[0]) ** g.count for g in block]
        return np.prod(parts, axis=0)

    coarse = np.geomspace(amax * 1e-5, amax, 200)
    first, last = np.searchsorted(cdf(coarse), [1e-13, 1 - 1e-13])
    edges = np.geomspace(coarse[first - 1], coarse[last], points + 1)
    m = np.sqrt(edges[1:] * edges[:-1])
    hazard = np.stack([g.count * g.pdf(m) / g.moments(m)[0] for g in block])
    return Maxima(m, np.diff(cdf(edges)) * hazard / hazard.sum(axis=0))


def over_block(
    block: Sequence[Elements], top: Maxima, of_maximum: np.ndarray, of_others: list[np.ndarray]
) -> float:
    """Expected sum over a block: f(maximum) and, group by group, E[f(element) | maximum]."""
    total = top.weights.sum(axis=0) @ of_maximum
    for index, group in enumerate(block):
        others = group.count - np.eye(len(block))[index]  # one fewer where the maximum is its own
        total += (others @ top.weights) @ of_others[index]
    return float(total)


def expected(
    block: Sequence[Elements],
    fmt: str,
    *,
    amax: float,
    rounding: str = "nearest",
    scale_rounding: str | None = None,
    two_level: bool = True,
    whole_tensor: bool = False,
) -> Expected:
    """What quantizing one block costs, given the amax of its tensor.

    Args:
        block: all elements that share a scale: 16 or 32 of a row, a tile's 256 or 1024, a row.
        whole_tensor: the block is the tensor, so that its maximum is known.
    """
    f = FORMATS[fmt]
    top = maxima(block, amax)
    if whole_tensor:  # one maximum among so many elements: whose it is does not matter
        top = Maxima(np.array([amax]), np.eye(len(block))[:, :1])
    tensor_amax = amax if two_level and f.scale == "e4m3" else None
    scale = block_scales(top.m, f, rounding=scale_rounding, tensor_amax=tensor_amax)

    def total(cells: Cells) -> float:
        others = [below(cells, group, top.m, scale) for group in block]
        return over_block(block, top, at(cells, top.m, scale), others)

    # The end of the grid, with room for the rounding of a maximum that lands on it exactly.
    end = np.minimum(scale * f.largest * (1 + 1e-9), top.m)
    shares = [1 - group.moments(end)[0] / group.moments(top.m)[0] for group in block]
    return Expected(
        elements=sum(group.count for group in block),
        energy=sum(group.energy_below(amax) for group in block),
        error=total(squared_error(f.grid, rounding)),
        clip_loss=total(clipped_away(f.grid)),
        clipped=over_block(block, top, (top.m > end) * 1.0, shares),
    )
