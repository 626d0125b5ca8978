"""Sphinx: ``make docs`` builds these pages, and takes every warning for an error."""

project = "qkvpass"
author = "the qkvpass authors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "measured"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "qkvpass"
