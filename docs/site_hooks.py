"""Hooks of the documentation site: pages and figures outside docs/ join it, and links lead to them.

A page says where a file lies in the repository (`../eval/results/refresh.md`), so that its links
work there too. On the site a file of docs/ keeps its place, any other file that a page links to is
below `project/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "project/"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NAVIGATED = ("recipes/README.md", "benchmarks/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
NAVIGATED += tuple(
    str(page.relative_to(ROOT)) for page in sorted((ROOT / "eval/results/report").glob("*.md"))
)


def place_on_site(path: str) -> str:
    """Return where the repository's file `path` is on the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def place_in_repository(uri: str) -> str:
    """Return the repository's path of the site's file `uri`."""
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def linked(page: str, text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each link from `page` to a file of the repository: the match, and the file's path."""
    code = [match.span() for match in FENCE.finditer(text)]
    for match in LINK.finditer(text):
        inside = any(start <= match.start() < end for start, end in code)
        if not inside and "://" not in match[2] and not match[2].startswith("mailto:"):
            yield match, posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page links to, and that such a file links to in turn."""
    known = {place_in_repository(file.src_uri) for file in files}
    waiting = [path for path in known if path.endswith(".md")]
    for path in NAVIGATED:
        waiting.append(path)
        files.append(File.generated(config, place_on_site(path), abs_src_path=str(ROOT / path)))
        known.add(path)
    while waiting:
        page = waiting.pop()
        for _, path in linked(page, (ROOT / page).read_text()):
            if path in known or not (ROOT / path).is_file():
                continue  # a link that leads nowhere is left to the strict build
            known.add(path)
            source = str(ROOT / path)
            files.append(File.generated(config, place_on_site(path), abs_src_path=source))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links into the site's, and mark examples with prompts as a Python console."""
    source = place_in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)
    parts, at = [], 0
    for match, path in linked(source, markdown):
        target = posixpath.relpath(place_on_site(path), folder or ".")
        parts += [markdown[at : match.start()], match[1], target, match[3]]
        at = match.end()
    markdown = "".join([*parts, markdown[at:]])
    return markdown.replace("```python\n>>>", "```pycon\n>>>")
