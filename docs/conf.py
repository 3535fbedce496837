"""The settings of the site that `make site` builds from this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import shardmap

project = "shardmap"
release = shardmap.__version__
copyright = "the shardmap authors, Apache-2.0"
html_title = f"shardmap {release}"
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]
myst_heading_anchors = 3
nitpicky = False

# In the docstrings, `name` between single backquotes is code.
default_role = "code"
# Signatures without types: they stand in the code, and the texts say what they mean.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
napoleon_use_ivar = True
