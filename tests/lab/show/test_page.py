"""Pages: what they contain, and that a real browser shows and sorts them."""

from __future__ import annotations

import io
import math
import re

import matplotlib.image
import numpy as np
import pytest

from lab.show import browser
from metis_hf.lab.show.page import Cell, Page, number


def png(width=30, height=20):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).random((height, width, 3))
    matplotlib.image.imsave(buffer, pixels, format="png")
    return buffer.getvalue()


@pytest.fixture
def page():
    made = Page("A <page>", "of 3 & more").section("First", "Some text.").notice("half <written>")
    made.cards(("loss", "2.5", "step 3")).figure(png(), "Noise.").figure(png(), "", wide=False)
    rows = [
        [Cell("b"), number(10.0), Cell("x")],
        [Cell("a"), number(math.nan), Cell("y")],
        [Cell("c"), Cell("9", 9.0, 0.5, "close"), Cell("z")],
    ]
    return made.section("Second").table(["name", "value", "word"], rows, "Three rows.")


class TestText:
    def test_is_escaped_and_self_contained(self, page):
        text = page.render()
        assert "A &lt;page&gt;" in text
        assert "of 3 &amp; more" in text
        assert "<page>" not in text
        assert '<p class="notice" role="note">half &lt;written&gt;</p>' in text
        assert not re.findall(r"https?://|//cdn|@import", text)
        assert all(src.startswith("data:") for src in re.findall(r'src="([^"]*)"', text))
        anchors = re.findall(r'href="#(\w+)"', text)  # contents lead to sections
        assert len(anchors) == 2
        assert all(f'id="{anchor}"' in text for anchor in anchors)

    def test_what_is_not_finite_is_flagged(self):
        for value in (math.nan, math.inf, -math.inf):
            cell = number(value)
            assert cell.text == str(value)
            assert (cell.shade, cell.note) == (1.0, "not finite")
        assert number(3.14159, ".2f").text == "3.14"

    def test_words_are_flush_left_and_numbers_right(self, page):
        heads = re.findall(r'<th scope="col"( class="words")?>(\w+)</th>', page.render())
        assert heads == [(' class="words"', "name"), ("", "value"), (' class="words"', "word")]

    def test_rows_are_as_long_as_the_header(self):
        with pytest.raises(ValueError, match="a row has 1 cells, but the header has 2"):
            Page("x").table(["a", "b"], [["1"]])
        assert "<tbody>" in Page("x").table(["a", "b"], []).render()

    def test_is_written_whole_or_not_at_all(self, page, tmp_path, monkeypatch):
        target = tmp_path / "page.html"
        page.save(target)
        before = target.read_text()
        monkeypatch.setattr(Page, "render", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            page.save(target)
        assert target.read_text() == before
        assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


class TestBrowser:
    @pytest.mark.parametrize(
        ("column", "up", "down"),
        [("value", "9|10|nan", "10|9|nan"), ("name", "a|b|c", "c|b|a")],
    )
    def test_shows_images_fetches_nothing_and_sorts_at_a_click(
        self, page, tmp_path, column, up, down
    ):
        """Numbers as numbers; NaN is last in both directions."""
        page.save(tmp_path / "page.html")
        script = browser.IMAGES + browser.sort_by(column)
        view = browser.open_page(tmp_path / "page.html", tmp_path, script)
        assert view.console == []
        assert (view.result("images"), view.result("fetched")) == ("30 30", "0")
        assert view.result("up") == up
        assert view.result("mark") == "ascending"
        assert view.result("down") == down

    def test_a_folded_section_opens_from_the_contents(self, tmp_path):
        page = Page("x").section("First", "seen").section("Second", "hidden", folded=True)
        page.section("Third", "seen").save(tmp_path / "page.html")
        script = """
        const fold = document.querySelector("details"), shown = document.body.dataset;
        shown.inside = fold.querySelector("p").textContent;
        shown.before = fold.open;
        document.querySelectorAll("nav a")[1].click();
        shown.after = fold.open;
        """
        view = browser.open_page(tmp_path / "page.html", tmp_path, script)
        assert view.console == []
        assert view.result("inside") == "hidden"
        assert (view.result("before"), view.result("after")) == ("false", "true")
        assert re.search(r"</details>\s*<h2[^>]*>Third</h2>", view.dom)

    def test_infinity_is_the_largest_number(self, tmp_path):
        """As of noise that never crosses; what was not measured is last in both directions."""
        cells = [Cell("n/a", math.nan), Cell("never", math.inf), number(300.0), number(-math.inf)]
        rows = [[cell] for cell in (*cells, Cell("never", math.inf), number(20.0))]
        Page("x").table(["step"], rows).save(tmp_path / "page.html")
        view = browser.open_page(tmp_path / "page.html", tmp_path, browser.sort_by("step"))
        assert view.result("up") == "-inf|20|300|never|never|n/a"
        assert view.result("down") == "never|never|300|20|-inf|n/a"

    def test_the_helper_sees_a_broken_page(self, tmp_path):
        """Else the tests above would pass whatever a page does."""
        broken = tmp_path / "broken.html"
        broken.write_text(
            '<body><img src="data:image/png;base64,AAAA"><script>missing()</script></body>'
        )
        view = browser.open_page(broken, tmp_path, browser.IMAGES)
        assert any("missing is not defined" in line for line in view.console)
        assert view.result("images") == "0"
