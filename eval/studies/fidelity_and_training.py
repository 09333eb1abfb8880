"""Compare fidelity with training: the divergence of schemes against their gaps.

    python eval/studies/fidelity_and_training.py

Reads records of `metis-hf fidelity` on the control of a comparison, and of `metis-hf compare`.
Nothing is trained. Writes eval/results/prediction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from publish import RESULTS, publish_table
from scipy.stats import spearmanr

from metis_hf.lab.compare.statistics import Interval
from metis_hf.lab.fidelity.scheme_fidelity import SchemeFidelity
from metis_hf.lab.show.figure import COLORS, MARKERS, figure_axes, tidy
from metis_hf.lab.show.table import markdown_table
from metis_hf.schemes import CONTROL

OUT = RESULTS / "prediction"
PAGE = OUT / "README.md"
MARK = "fidelity and training"
DIRECT = "nvfp4-rne"  # gaps and divergences are drawn relative to this scheme's
# These train weights as factors, which causes a gap by itself.
STORED_SPLIT = ("bf16-split", "metis-paper", "svdquant")


@dataclass(frozen=True)
class Setting:
    """A model, the schemes that it was measured in, and the runs that trained in them.

    Attributes:
        title: in the table and the figure.
        measured: the record of fidelity.
        trained: records of comparisons; the first one that has a variant counts.
        called: variant -> its name in the record of fidelity, if different.
    """

    title: str
    measured: str
    trained: tuple[str, ...]
    called: Mapping[str, str] = field(default_factory=dict)


DIRECTIONS = {
    "metis 6 %, dy 1.5 %": "metis-6-dy-1.5",
    "metis, x 6 %": "metis-x-06",
    "metis, x 12 %": "metis-x-12",
    "metis, x 18 %": "metis-x-18",
    "metis 18 %, dy 4.5 %": "metis-18-dy-4.5",
    "metis, nothing split": "metis-nothing-split",
}
SETTINGS = (
    Setting(
        "width 96, 3.2M tokens",
        "prediction/tiny",
        # The newer record first: it trained the measured `metis`; methods-tiny also split weights.
        ("methods-tiny-newer", "methods-tiny", "methods-tiny-averis"),
        {"metis": "metis-32-and-32"},
    ),
    Setting(
        "width 96, 1.2M tokens",
        "prediction/width-96",
        tuple(
            f"width-96{part}"
            for part in ("-directions", "-operands", "-places", "-searched", "", "-quarter")
        ),
        DIRECTIONS,
    ),
    Setting(
        "width 384, 1.2M tokens",
        "prediction/width-384",
        ("width-384-directions",),
        DIRECTIONS,
    ),
    Setting("width 256, 5.0M tokens", "prediction/width-256", ("width-256",)),
    *(
        Setting(
            f"width 64, {tokens}M tokens",
            f"prediction/tokens-{ratio}",
            (f"tokens-{ratio}",),
            DIRECTIONS,
        )
        for ratio, tokens in ((5, 0.8), (10, 1.7), (20, 3.3), (40, 6.6))
    ),
    Setting(
        "SmolLM2, 49k tokens further",
        "real-model/prose-c",
        ("real-model/continued",),
        {"metis rank 9": "metis, rank 9"},
    ),
)


@dataclass(frozen=True)
class Point:
    """One scheme of a setting.

    Attributes:
        variant: its name in the comparison.
        measured: by fidelity, without training.
        gap: of the trained models' losses to the control's, percent.
    """

    variant: str
    measured: SchemeFidelity
    gap: Interval

    @property
    def divergence(self) -> float:
        """The KL in training rounding, nats per token."""
        return self.measured.kl_in_training.mean


def read(setting: Setting) -> list[Point]:
    """Return the schemes that were both measured and trained, in the records' order."""
    record = json.loads((RESULTS / setting.measured / "results.json").read_text())
    measured = {row["name"]: SchemeFidelity(**row) for row in record["schemes"]}
    found: dict[str, Point] = {}
    for name in setting.trained:
        for summary in json.loads((RESULTS / f"{name}.json").read_text())["summaries"]:
            variant = summary["name"]
            row = measured.get(setting.called.get(variant, variant))
            if variant in (CONTROL, *STORED_SPLIT, *found) or row is None:
                continue
            found[variant] = Point(variant, row, Interval(**summary["gap"]))
    return list(found.values())


def slope(points: Sequence[Point]) -> float:
    """Return the gap per nat of divergence: the least-squares line through the origin."""
    pairs = [(point.divergence, point.gap.mean) for point in points]
    return sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)


def rank_correlation(points: Sequence[Point], value: Callable[[SchemeFidelity], float]) -> float:
    """Return Spearman's rank correlation between a fidelity value and the gap."""
    return float(spearmanr([value(p.measured) for p in points], [p.gap.mean for p in points])[0])


Settings = Sequence[tuple[Setting, Sequence[Point]]]
_VALUES: Mapping[str, Callable[[SchemeFidelity], float]] = {
    "KL in training": lambda r: r.kl_in_training.mean,
    "KL": lambda r: r.mean("kl").mean,
    "loss rise": lambda r: r.rise.mean,
    "gradient error": lambda r: r.gradient("error").mean,
}


def table(settings: Settings) -> str:
    """Return the table: a row for each setting."""
    header = ["Setting", "Schemes", "Gaps, %", "Gap, % for a nat", "Gap over the line's"]
    header += [
        f"Rank correlation: {name}" if name == "KL in training" else name for name in _VALUES
    ]
    rows = []
    for setting, points in settings:
        gaps = [point.gap.mean for point in points]
        line = slope(points)
        over = [p.gap.mean / (line * p.divergence) for p in points if p.divergence]
        numbers = [f"{min(gaps):+.2f} to {max(gaps):+.2f}", f"{line:.0f}"]
        numbers.append(f"{min(over):.2f} to {max(over):.2f}")
        ranks = (f"{rank_correlation(points, value):.2f}" for value in _VALUES.values())
        rows.append([setting.title, str(len(points)), *numbers, *ranks])
    return markdown_table(header, rows)


def draw(settings: Settings, path: Path) -> None:
    """Draw gap against divergence, both relative to plain rounding, with 95 % intervals."""
    figure, axes = figure_axes(1, 1, (8, 6))
    axis = axes[0][0]
    farthest = highest = 0.0
    for index, (setting, points) in enumerate(settings):
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        (direct,) = (point for point in points if point.variant == DIRECT)
        x = [point.divergence / direct.divergence for point in points]
        y = [point.gap.mean / direct.gap.mean for point in points]
        halves = [point.gap.half_width / direct.gap.mean for point in points]
        axis.errorbar(x, y, yerr=halves, fmt="none", ecolor=color, elinewidth=0.8, alpha=0.25)
        axis.plot(x, y, marker, color=color, ms=5, alpha=0.85, label=setting.title)
        farthest, highest = max(farthest, *x), max(highest, *y)
    axis.plot([0, farthest], [0, farthest], color="black", lw=0.8, label="in proportion")
    axis.set_title("Llamas from scratch, and SmolLM2 trained further")
    axis.set_xlim(-0.05, 1.05 * farthest)
    axis.set_ylim(-0.25, 1.1 * highest)
    axis.set_xlabel(f"KL in training, over that of {DIRECT}: nothing trained")
    axis.set_ylabel(f"gap after training, over that of {DIRECT}")
    tidy(axis)
    axis.legend(loc="upper left")
    figure.savefig(path)


def main() -> None:
    settings = [(setting, read(setting)) for setting in SETTINGS]
    text = table(settings)
    publish_table(OUT, MARK, text, PAGE)
    draw(settings, OUT / "gap.png")
    print(text)


if __name__ == "__main__":
    main()
