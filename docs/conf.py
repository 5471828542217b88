"""Sphinx: the pages of this folder, and the API from the docstrings of the installed package."""

import importlib.metadata

project = "lightning-dp"
author = "the lightning-dp authors"
release = importlib.metadata.version("lightning-dp")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
html_show_copyright = False

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
    ("py:class", r"lightning_dp\..*\._\w+"),  # bases that a few classes of one file share
    ("py:class", r"lightning_dp\.(_\w+\.\w+|run\.PrivateRun)"),  # of no use outside
    ("py:class", r"lightning_dp\.accounting\.steps\.\w+"),
    ("py:class", r"lightning_dp\.strategies\..*"),  # what the callbacks are made of
]
