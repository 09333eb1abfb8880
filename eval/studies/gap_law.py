"""Fit the gap of FP4 training as a law of size and tokens: report/beside-published.md.

    python eval/studies/gap_law.py

Every recorded run is a point: the published grid of Quartet II and the records of `metis-hf
compare`. The law is ln(gap) = level + a ln(D/N) + b ln(N), fitted by least squares: gap in percent
of the control's loss, D tokens, N parameters of blocks and norms. Intervals are Student's t, 95 %.
Our schemes share the control's runs, so their errors are clustered by place (N, D). Nothing is
trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import gap_law_figure
import numpy as np
from publish import RESULTS, ROOT, page_with
from regression import Array, Estimate, Fit, clustered, least_squares
from scipy import stats
from transformers import AutoConfig

from metis_hf.lab.analyze.analysis import rounded
from metis_hf.lab.compare.published import NAMES, body_parameters, grid
from metis_hf.lab.compare.statistics import CONFIDENCE, gaps_percent, t_interval
from metis_hf.lab.show.table import markdown_table
from metis_hf.schemes import CONTROL

PAGE = ROOT / "eval" / "results" / "report" / "beside-published.md"
TARGET = RESULTS / "gap-law"
PUBLISHED = "Quartet II's grid"
TINY = "methods-tiny"
NOT_QUANTIZED = (CONTROL, "bf16-split")
IN_PART = "rne-"  # prefix of the schemes of training_parts.py
# `metis` in records with older defaults: 32 directions of inputs and of output gradients, with
# weights split too or dense.
_OF_WEIGHTS, _DENSE = "metis, 32 directions, of weights too", "metis, 32 directions"
EARLIER = {
    ("methods-tiny", "metis"): _OF_WEIGHTS,
    ("methods-tiny-switch", "metis"): _OF_WEIGHTS,
    ("methods-tiny-newer", "metis"): _DENSE,
    ("width-384", "metis"): _DENSE,
}
# (record, scheme) -> the reason, shown on the page, to leave a gap that is not positive, and so has
# no log, out of the fits.
LEFT_OUT: dict[tuple[str, str], str] = {}
RATIO, SIZE = 100.0, 1e8  # tokens per parameter, and parameters, at which levels are given


@dataclass(frozen=True)
class Point:
    """One scheme trained at one size on one number of tokens.

    Attributes:
        source: the name of the grid or of our record.
        scheme: the variant's name in its source.
        parameters: N, of blocks and norms.
        width: of the hidden state.
        tokens: D.
        gap: held-out loss above the control's, percent; mean over seeds.
        half_width: of the gap's interval over seeds; NaN for one seed.
        seeds: number of seeds.
    """

    source: str
    scheme: str
    parameters: int
    width: int
    tokens: int
    gap: float
    half_width: float
    seeds: int = 1

    @property
    def ratio(self) -> float:
        """Return tokens per parameter."""
        return self.tokens / self.parameters


def design(points: Sequence[Point], form: str = "power", series: Sequence[str] = ()) -> Array:
    """Return the columns [points, k] of one form of the law.

    Args:
        points: rows.
        form: "power": ln(D/N) and ln N; "width": ln(D/N) and ln of the width; "curved": power plus
            ln(D/N) squared and ln(D/N) times ln N.
        series: labels of the points, one level per label. Empty: one level for all points.
    """
    ratio = np.log([point.ratio / RATIO for point in points])
    size = np.log([point.parameters / SIZE for point in points])
    second = np.log([point.width for point in points]) if form == "width" else size
    levels = [[float(label == own) for own in series] for label in dict.fromkeys(series)]
    columns = [*(levels or [np.ones(len(points))]), ratio, second]
    if form == "curved":
        columns += [ratio**2, ratio * size]
    return np.array(columns, dtype=np.float64).T


def fit(points: Sequence[Point], form: str = "power", series: Sequence[str] = ()) -> Fit:
    """Fit the logs of the gaps; arguments as for `design`.

    With `series`, the points at one place share the control's runs, so errors are clustered by
    place.

    Raises:
        ValueError: a gap is not positive and has no log; or too few points.
    """
    if low := next((point for point in points if not point.gap > 0), None):
        raise ValueError(
            f"a gap of {low.gap:.3f} % ({low.scheme} of {low.source}) has no logarithm; add it to "
            "LEFT_OUT in gap_law.py, with the reason"
        )
    columns, logs = design(points, form, series), np.log([point.gap for point in points])
    if not series:
        return least_squares(columns, logs)
    return clustered(columns, logs, [(point.parameters, point.tokens) for point in points])


def law(points: Sequence[Point], form: str = "power") -> Callable[[Point, Array], Array]:
    """Fit the points; return a function (point, ratios) -> gaps at the point's size."""
    coefficients = fit(points, form).coefficients

    def gaps(point: Point, ratios: Array) -> Array:
        along = [replace(point, tokens=round(ratio * point.parameters)) for ratio in ratios]
        return np.exp(design(along, form) @ coefficients)

    return gaps


def published_points() -> list[Point]:
    """Collect the grid's runs, without the control."""
    points = []
    for scheme in grid()["schemes"]:
        for model in grid()["models"].values():
            losses = zip(model["tokens"], model["losses"][scheme], model["losses"][CONTROL])
            for tokens, loss, control in losses:
                gap, place = 100 * (loss / control - 1), (model["parameters"], model["width"])
                points.append(Point(PUBLISHED, scheme, *place, tokens, gap, math.nan))
    return [point for point in points if point.scheme != CONTROL]


def recorded() -> list[str]:
    """Return the names of the recorded comparisons that train from scratch, `TINY` first.

    Records at half and twice a learning rate are left out: others have the same variants at the
    best learning rate.
    """
    paths = sorted(RESULTS.glob("*.json"), key=lambda path: (path.stem != TINY, path.stem))
    plans = {p.stem: json.loads(p.read_text()).get("plan") for p in paths if "-lr-" not in p.stem}
    return [n for n, plan in plans.items() if plan and not plan["experiment"].get("checkpoint")]


def our_points() -> list[Point]:
    """Collect our recorded comparisons of schemes that quantize all operands.

    If several records hold a variant at one place, the first with the most seeds counts.
    """
    best: dict[tuple[str, int, int], tuple[int, Point]] = {}
    for name in recorded():
        experiment, tokens, losses = _read(name)
        model = experiment["model"]
        place = (body_parameters(AutoConfig.for_model(**model)), model["hidden_size"], tokens)
        for scheme in losses:
            if scheme in NOT_QUANTIZED or scheme.startswith(IN_PART) or (name, scheme) in LEFT_OUT:
                continue
            label = EARLIER.get((name, scheme), scheme)
            gap = t_interval(list(gaps_percent(losses[scheme], losses[CONTROL]).values()))
            point = Point(name, label, *place, gap.mean, gap.half_width, gap.count)
            here = (label, point.parameters, tokens)
            if here not in best or gap.count > best[here][0]:
                best[here] = (gap.count, point)
    return [point for _, point in best.values()]


def _read(name: str) -> tuple[dict[str, Any], int, dict[str, dict[str, float]]]:
    """Return a record's experiment, its tokens, and variant -> seed -> loss."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    losses = {summary["name"]: summary["losses"] for summary in record["summaries"]}
    return record["plan"]["experiment"], record["tokens"], losses


def mean_points(points: Sequence[Point], name: str) -> list[Point]:
    """Return the geometric mean gap of the schemes at each size and number of tokens.

    Schemes at one place share the control's run, so their errors are not independent; the means
    over schemes are independent.
    """
    places: dict[tuple[int, int, int], list[Point]] = {}
    for point in points:
        places.setdefault((point.parameters, point.width, point.tokens), []).append(point)
    return [
        Point(name, name, *place, math.exp(np.mean(np.log([p.gap for p in here]))), math.nan)
        for place, here in places.items()
    ]


def f_test(points: Sequence[Point]) -> float:
    """Return the p-value of the hypothesis that the curved form's two extra columns are zero."""
    plain, curved = fit(points), fit(points, "curved")
    sums = [found.residual**2 * found.freedom for found in (plain, curved)]
    ratio = (sums[0] - sums[1]) / (plain.freedom - curved.freedom) / curved.residual**2
    return float(stats.f.sf(ratio, plain.freedom - curved.freedom, curved.freedom))


def study() -> dict[str, Any]:
    """Return the record: points, fits, and our gaps next to the published law."""
    published, ours = published_points(), our_points()
    schemes = dict.fromkeys(point.scheme for point in published)
    groups = {grid()["schemes"][s]: [p for p in published if p.scheme == s] for s in schemes}
    tiny = {p.scheme: p for p in ours if p.source == TINY}
    # If several of our trained schemes match one published scheme, take the first.
    shared = {theirs: mine for mine, theirs in reversed(NAMES.items()) if mine in tiny}
    both = [p for p in published if p.scheme in shared]
    both += [tiny[mine] for mine in shared.values()]
    means = mean_points(published, "mean")
    groups[f"mean of {len(schemes)}"] = means
    fits = {name: _described(points) for name, points in groups.items()}
    joint = f"mean of {len(shared)}, with ours as one law"
    fits[joint] = _described(mean_points(both, "mean"))
    repeated = [p for p in ours if sum(p.scheme == other.scheme for other in ours) > 1]
    alone = fit(repeated, series=[p.scheme for p in repeated])
    fits["ours alone"] = _summary(alone, len(repeated), -2)
    extrapolated = {}
    for theirs, mine in shared.items():
        law = fit([p for p in published if p.scheme == theirs])
        middle, low, high = law.predict(design([tiny[mine]])[0])
        extrapolated[mine] = {
            "published as": grid()["schemes"][theirs], "law": middle, "low": low, "high": high,
            "ours": tiny[mine].gap, "half_width": tiny[mine].half_width,
            "seeds": tiny[mine].seeds,
        }  # fmt: skip
    return {
        "source": grid()["source"],
        "points": [asdict(point) for point in (*published, *ours)],
        "fits": fits,
        "left out": [f"`{s}` of `{record}`: {why}" for (record, s), why in LEFT_OUT.items()],
        "published schemes": len(schemes),
        "local exponents": local_exponents(means),
        "parameters extrapolated to": next(iter(tiny.values())).parameters,
        "extrapolated": extrapolated,
    }


def _described(points: Sequence[Point]) -> dict[str, Any]:
    """Fit every form to one set of points, and return the numbers."""
    power, curved = fit(points), fit(points, "curved")
    width = fit(points, "width").estimate(2)
    return _summary(power, len(points), 1) | {
        "gap at 100 tokens a parameter, 100M": math.exp(power.coefficients[0]),
        "width": asdict(width),
        "curved": {
            "residual": curved.residual,
            "p": f_test(points),
            "ln(D/N)^2": asdict(curved.estimate(3)),
            "ln(D/N) ln(N)": asdict(curved.estimate(4)),
        },
    }


def _summary(found: Fit, count: int, column: int) -> dict[str, Any]:
    """Return both exponents of a fit: ln(D/N) at `column`, ln N at the next."""
    return {
        "points": count,
        "D/N": asdict(found.estimate(column)),
        "N": asdict(found.estimate(column + 1)),
        "residual": found.residual,
    }


def local_exponents(points: Sequence[Point]) -> list[dict[str, float]]:
    """Return d ln(gap) / d ln(D/N) of the curved form at the corners of the grid."""
    curved = fit(points, "curved")
    found = []
    for parameters in (3e7, 1e8):
        for ratio in (25.0, 800.0):
            x, n = math.log(ratio / RATIO), math.log(parameters / SIZE)
            row = np.array([0, 1, 0, 2 * x, n])
            error = math.sqrt(row @ curved.covariance @ row)
            quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, curved.freedom))
            value = float(row @ curved.coefficients)
            found.append({"parameters": parameters, "ratio": ratio, "value": value,
                          "half_width": quantile * error})  # fmt: skip
    return found


def _cell(estimate: dict[str, float]) -> str:
    return str(Estimate(**estimate))


def tables(record: dict[str, Any]) -> dict[str, str]:
    """Return the text between the markers of each table."""
    rows = []
    for name, found in record["fits"].items():
        curved = found.get("curved")
        rows.append([
            name, str(found["points"]), _cell(found["D/N"]), _cell(found["N"]),
            _cell(found["width"]) if curved else "", f"{100 * found['residual']:.1f}",
            f"{100 * curved['residual']:.1f}" if curved else "",
            f"{curved['p']:.1g}" if curved else "",
        ])  # fmt: skip
    header = ["Runs", "Points", "Exponent of D/N", "Exponent of N", "Of the width, in place of N",
              "Residual, %", "With curvature, %", "p of no curvature"]  # fmt: skip
    local = [
        [f"{row['parameters'] / 1e6:.0f}M", f"{row['ratio']:.0f}",
         f"{row['value']:+.3f} ± {row['half_width']:.3f}"]
        for row in record["local exponents"]
    ]  # fmt: skip
    beside = [
        [f"`{name}`", row["published as"], f"{row['law']:.2f} ({row['low']:.2f} to "
         f"{row['high']:.2f})", f"{row['ours']:.2f} ± {row['half_width']:.2f}",
         f"{row['ours'] / row['law']:.2f}"]
        for name, row in record["extrapolated"].items()
    ]  # fmt: skip
    left_out = "".join(f"- Left out: {text}\n" for text in record["left out"])
    return {
        "gap law": markdown_table(header, rows) + (left_out and f"\n{left_out}"),
        "gap law local": markdown_table(["N", "D/N", "Exponent of D/N there"], local),
        "gap law ours": markdown_table(
            ["Ours", "Published as", "Law, %", "Ours, %", "Ours / law"], beside
        ),
    }


def with_tables(page: str, record: dict[str, Any]) -> str:
    """Return the page with every table between its markers.

    Raises:
        ValueError: the page has no such marker.
    """
    for marker, text in tables(record).items():
        page = page_with(marker, text, page)
    return page


def main() -> None:
    """Write the record, its tables and figure, and the tables of the page."""
    record = rounded(study())
    TARGET.mkdir(parents=True, exist_ok=True)
    (TARGET / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (TARGET / "table.md").write_text("\n".join(tables(record).values()))
    points = mean_points(published_points(), "mean")
    gap_law_figure.draw(record, points, law(points), law(points, "curved"), TARGET / "gap.png")
    PAGE.write_text(with_tables(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
