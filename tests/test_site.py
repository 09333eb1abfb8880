"""`make docs`: the site builds, a broken link fails the build, and no page fetches anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from paths import ROOT

pytest.importorskip("mkdocs", reason="needs the extra docs")
pytest.importorskip("mkdocstrings", reason="needs the extra docs")

FETCHED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\"> ]+")


def build(config, out):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", config, "-d", out],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_site_builds_and_fetches_nothing(tmp_path):
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    fetched = {found for page in pages for found in FETCHED.findall(page.read_text())}
    assert not fetched
    index = (tmp_path / "site/index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f'"{page.stem}.html' in index, f"{page.name} is not in the navigation of mkdocs.yml"
    figure = re.search(r'<img[^>]*src="([^"]+)"', index)
    assert figure
    assert (tmp_path / "site" / figure[1]).exists()
    signature = (tmp_path / "site/api/train.html").read_text()
    assert "get_metis_model" in signature
    assert "Raises:" in signature


def test_broken_links_fail_the_build(tmp_path):
    links = ["nowhere.md", "index.md#nothing", "../eval/absent.md"]
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "docs/site_hooks.py", docs)
    for name in ("recipes/README.md", "benchmarks/README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# A page\n")
    (docs / "index.md").write_text("# A page\n" + "".join(f"\n[a]({link})\n" for link in links))
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    del config["nav"], config["extra_css"], config["plugins"]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    for target in ("nowhere.md", "#nothing", "absent.md"):
        assert target in done.stderr
