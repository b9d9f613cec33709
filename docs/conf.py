"""How the site is built: ``sphinx-build -W -c docs . build/site``, without a network.

The source of the site is the whole repository, so that every page and notebook stays where a code
host shows it, and a link between two of them holds in both.
"""

from pathlib import Path

import minineo
from minineo.cli.compare import PROMPT

project = "minineo"
author = "the minineo authors"
copyright = author
version = release = minineo.__version__

extensions = ["myst_nb", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/**",
    "weights/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["build", "dist", "**/.*"]

nb_execution_mode = "off"  # the outputs are committed; the tests execute the notebooks
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the docstrings say more: shapes, units, what is refused
numpydoc_show_class_members = False  # autodoc shows them

html_theme = "furo"
html_title = "minineo"
html_static_path = ["_static"]
html_css_files = ["minineo.css"]
templates_path = ["_templates"]
html_additional_pages = {"index": "to-docs.html"}  # the front page lies in docs/
html_copy_source = False
html_show_sphinx = False


def write_explore_page(app, error):
    """Write the page that docs/explore.md shows in a frame, from a run made now."""
    if error is None and app.builder.format == "html":
        page = minineo.explore(minineo.load("tiny"), PROMPT, max_new_tokens=24)
        page.save(Path(app.outdir, "_static", "explore.html"))


def setup(app):
    """Leave out what a NamedTuple says of its fields: the docstring above says it better."""
    app.connect(
        "autodoc-skip-member", lambda *event: type(event[3]).__name__ == "_tuplegetter" or None
    )
    app.connect("build-finished", write_explore_page)
