"""Opens a page in headless Chromium: its DOM after scripts ran, what the console said, a picture.

A test adds a script of its own to a copy of the page, since the page itself has no hooks.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
)
_CONSOLE = re.compile(r'CONSOLE[^"]*"(.*)", source:')
# Scripts for `open_page`: what a browser made of the pictures, and of a click on a table's head.
IMAGES = """
const found = [...document.images];
document.body.dataset.images = found.map((i) => i.complete ? i.naturalWidth : 0).join(" ");
document.body.dataset.fetched = performance.getEntriesByType("resource")
  .filter((entry) => !entry.name.startsWith("data:")).length;
"""
_SORT = """
const table = document.querySelector("table");
const head = [...table.tHead.rows[0].cells].find((h) => h.textContent === COLUMN);
const order = () => [...table.tBodies[0].rows].map((r) => r.cells[head.cellIndex].textContent);
document.body.dataset.before = order().join("|");
head.click(); document.body.dataset.up = order().join("|");
document.body.dataset.mark = head.getAttribute("aria-sort");
head.click(); document.body.dataset.down = order().join("|");
"""
# A page that waits for the network would take longer; nothing here has a reason to.
_TIMEOUT = 90  # s


@dataclass(frozen=True)
class View:
    """What the browser made of a page.

    Attributes:
        dom: the document as HTML, after its scripts ran.
        console: messages and uncaught errors of the page's console.
    """

    dom: str
    console: list[str]

    def result(self, name: str) -> str:
        """What a test's script left in `document.body.dataset[name]`."""
        found = re.search(rf'data-{name}="([^"]*)"', self.dom)
        assert found, f"the page's script left no data-{name}; console: {self.console}"
        return html.unescape(found[1])


def sort_by(column: str) -> str:
    """A script that sorts the first table by a column, up and then down."""
    return _SORT.replace("COLUMN", repr(column))


def find_browser() -> str:
    """The browser's executable; skips the test where none is installed."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path:
            return path
    pytest.skip(f"no Chromium is installed; looked for {', '.join(BROWSERS)}")


def open_page(page: Path, folder: Path, script: str = "") -> View:
    """Loads a page and gives its DOM.

    Args:
        page: an HTML file.
        folder: an empty one for the browser's profile and the copy of the page.
        script: JavaScript that runs at the end of the page, in a copy of it.
    """
    if script:
        text = page.read_text(encoding="utf-8")
        page = folder / f"tried-{page.name}"
        page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    args = ("--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom")
    done = _run(folder, *args, page.resolve().as_uri())
    return View(done.stdout, _CONSOLE.findall(done.stderr))


def _run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [find_browser(), *FLAGS, f"--user-data-dir={folder / 'profile'}", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done
