"""The site: ``make docs``. It is docs/*.md as they are, and a reference that is written from the code."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import write_reference
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

write_reference.main()

project = "Rallypoint"
author = "The Rallypoint authors"
copyright = "the Rallypoint authors, Apache-2.0"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 6  # a link to a heading that is not there is a warning, and `make docs` makes warnings errors
myst_enable_extensions = ["colon_fence"]
smartquotes = False  # or --option becomes a dash and "option"
html_theme = "furo"
html_title = "Rallypoint"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False


def setup(app: Sphinx) -> None:
    app.add_lexer("mermaid", TextLexer)  # GitHub draws these; here their source is shown
