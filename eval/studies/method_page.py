"""What the studies of a trained model share: their command line, their tables in docs/method.md."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "method.md"


def arguments(description: str, out: str) -> argparse.Namespace:
    """model, data and out from the command line.

    Args:
        description: a docstring; its first line is shown.
        out: where the record goes if nothing else is said.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a trained bf16 checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="chunked held-out tokens")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser.parse_args()


def markdown(titles: Sequence[str], rows: Sequence[tuple[str, Sequence[float], float]]) -> str:
    """A table of (name, errors, rise of the held-out loss in percent)."""
    lines = ["| | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
    for name, errors, rise in rows:
        cells = [*(f"{error:.3f}" for error in errors), f"{rise:+.2f} %"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def placed(page: str, mark: str, table: str) -> str:
    """The page with a table between `<!-- mark -->` and the next `<!-- end -->`.

    Raises:
        ValueError: the page does not have that place, or not just one.
    """
    place = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = place.subn(lambda match: match[1] + table + match[2], page)
    if count != 1:
        raise ValueError(f"{PAGE} has {count} places for <!-- {mark} -->, expected one")
    return page
