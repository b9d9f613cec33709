"""The site: built without a warning, whole, and without a link that leads nowhere."""

import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent


def test_the_picture_of_the_imports_is_drawn_from_them():
    drawn = subprocess.run(
        [sys.executable, ROOT / "docs/imports.py"], capture_output=True, check=True
    )
    assert drawn.stdout == (ROOT / "docs/imports.svg").read_bytes()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as CONTRIBUTING says."""
    pytest.importorskip("sphinx")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_every_page_and_notebook_is_in_the_site(site):
    pages = [
        page.relative_to(ROOT)
        for pattern in ("docs/**/*.md", "notebooks/**/*.ipynb", "weights/*.md", "C*.md")
        for page in ROOT.glob(pattern)
        if ".ipynb_checkpoints" not in page.parts
    ]
    assert len(pages) > 30
    assert [page for page in pages if not (site / page.with_suffix(".html")).is_file()] == []


@pytest.mark.slow
def test_no_link_inside_the_site_is_broken(site):
    broken = []
    for page in site.rglob("*.html"):
        for link in links_and_names(page)[0]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            there = target.is_file()
            # the way back from a source knows one page only for what two pages show
            if there and parts.fragment and "_modules" not in page.parts:
                there = unquote(parts.fragment) in links_and_names(target)[1]
            if not there:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


@cache
def links_and_names(page):
    """Return where a page points to, and what can be pointed at in it."""
    reader = LinkReader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader.links, reader.names


class LinkReader(HTMLParser):
    """Collects the links of a page and the names of its parts."""

    def __init__(self):
        super().__init__()
        self.links, self.names = [], {""}

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value and value != "#":
                self.links.append(value)
            elif name == "id":
                self.names.add(value)
