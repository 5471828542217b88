"""Sphinx: the pages of this folder, and the API from the docstrings of the installed package."""

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # notebook_pages

project = "lightning-dp"
author = "the lightning-dp authors"
release = importlib.metadata.version("lightning-dp")

extensions = ["myst_parser", "notebook_pages", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = project
html_show_copyright = False

myst_enable_extensions = ["attrs_inline"]  # the width of a picture
myst_heading_anchors = 3
add_module_names = False
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"  # types where the docstring speaks of them
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Other projects' pages cannot be reached when the documentation is built, so that their names
# lead nowhere; names of this package must.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!lightning_dp\.).*"),
    ("py:(class|obj)", r"lightning_dp\..*\._\w+"),  # bases and types that one file alone uses
    (
        "py:class",
        r"lightning_dp\.(_\w+\.\w+|run\.PrivateRun|gradients\.(batches|fix|snapshot)\.\w+)",
    ),  # of no use outside
    ("py:class", r"lightning_dp\.accounting\.(steps|external)\.\w+"),
    ("py:class", r"lightning_dp\.accounting\.(events\.AbstractExternal|_pmf\.Node)"),
    ("py:class", r"lightning_dp\.report\.content\.\w+"),  # types of its arguments
    (
        "py:class",
        r"lightning_dp\.isolation\.check\.Outcome",
    ),  # of check_isolation, which describes it
    ("py:class", r"lightning_dp\.strategies\..*"),  # what the callbacks are made of
]
