"""The settings of the site that `make site` builds from this folder."""

import inspect
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import desc_addname, pending_xref
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.search.en import SearchEnglish

sys.path.insert(0, str(Path(__file__).parent.parent))

import shardmap

project = "shardmap"
release = shardmap.__version__
copyright = "the shardmap authors, Apache-2.0"
html_title = f"shardmap {release}"
html_theme = "furo"
pygments_dark_style = "lightbulb"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["build"]
myst_heading_anchors = 3
nitpicky = False

# `name` between single backquotes is code, and a link if it is known.
default_role = "py:obj"
# Signatures without types, which would hide them: each stands with its argument.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
# A cut has many forms, which its argument describes.
autodoc_type_aliases = {"InSlices": "Cuts"}
autosummary_generate = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# What is copied is what one types: no prompts, no output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def reachable(url: str) -> bool:
    """Whether names can be linked to the pages there, which needs a network."""
    try:
        with urllib.request.urlopen(url + "objects.inv", timeout=5):
            return True
    except OSError:
        print(f"{url} cannot be reached: names of its pages are no links")
        return False


intersphinx_mapping = {
    name: (url, None)
    for name, url in {
        "jax": "https://docs.jax.dev/en/latest/",
        "numpy": "https://numpy.org/doc/stable/",
        "python": "https://docs.python.org/3/",
    }.items()
    if reachable(url)
}

# A report, as `report.save` writes it, is shown on the page of `explain`.
EXTRA = Path(__file__).parent.parent / "build" / "extra"
EXTRA.mkdir(parents=True, exist_ok=True)
REPORT = """
import jax, sys
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np, shardmap as sm

def share(x):
    return x / jax.lax.psum(x, "i")

x = jax.ShapeDtypeStruct((16,), np.float32)
sm.explain(sm.spmap(share, "i"))(x).save(sys.argv[1])
"""
subprocess.run(
    [sys.executable, "-c", REPORT, EXTRA / "report.html"],
    cwd=Path(__file__).parent.parent,
    check=True,
)
html_extra_path = [str(EXTRA)]


SHORT = {
    "jax": "jax",
    "lax": "jax.lax",
    "jnp": "jax.numpy",
    "numpy": "numpy",
    "np": "numpy",
}


def link_names(app: Sphinx, doctree: nodes.document) -> None:
    """Makes names of the API in the prose of a page links, as those of docstrings are.

    What no page has stays as it is: an argument, or a name of JAX without a network.
    """
    for literal in [*doctree.findall(nodes.literal)]:
        name = re.sub(r"\(\)$", "", literal.astext())
        first, _, rest = name.partition(".")
        if first in ("sm", "shardmap"):
            name = f"shardmap.{rest}"
        elif first in shardmap.extend.__all__:
            name = f"shardmap.extend.{name}"
        elif first in shardmap.__all__ or first in ("compat", "extend"):
            name = f"shardmap.{name}"
        elif first in SHORT:
            name = f"{SHORT[first]}.{rest}"
        else:
            continue
        of_a_link = isinstance(literal.parent, (nodes.reference, pending_xref))
        if of_a_link or not re.fullmatch(r"[\w.]+", name):
            continue
        link = pending_xref(
            "",
            literal.deepcopy(),
            refdomain="py",
            reftype="obj",
            reftarget=name,
            refexplicit=True,
            refwarn=False,
            refdoc=app.env.docname,
        )
        literal.replace_self(link)


PUBLIC = ("shardmap", "shardmap.compat", "shardmap.extend")


def shorten_names(app: Sphinx, doctree: nodes.document) -> None:
    """Leaves out what says nothing: modules that are not public, and `Any`."""
    for field in [*doctree.findall(nodes.field)]:
        if [part.astext() for part in field] == ["Return type", "Any"]:
            field.parent.remove(field)
    for before in [*doctree.findall(desc_addname)]:
        if before.parent.get("module") not in PUBLIC:
            before.parent.remove(before)


def one_signature(app: Sphinx) -> None:
    """Shows the signature of a function, not those of all its overloads."""
    public = [getattr(shardmap, name) for name in shardmap.__all__]
    for module in {each.__module__ for each in public if inspect.isfunction(each)}:
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.clear()


NAMED = re.compile(r"^\.\. (?:auto)?\w+:: (shardmap\.\S+)$", re.M)
TABLE = "```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n   {}\n```\n"


def add_tables(app: Sphinx, docname: str, source: list[str]) -> None:
    """Begins each page of `api/` with a table of its names; `api` has all tables."""
    if docname.startswith("api/"):
        title, _, text = source[0].partition("\n")
        source[0] = f"{title}\n\n{table(text)}\n{text}"
    elif docname == "api":
        for name in re.findall(r"^api/\w+$", source[0], re.M):
            title, _, text = Path(app.srcdir, f"{name}.md").read_text().partition("\n")
            source[0] += f"\n## [{title[2:]}]({name}.md)\n\n{table(text)}"


def table(text: str) -> str:
    names = [f"~{name}" for name in NAMED.findall(text)]
    return TABLE.format("\n   ".join(names))


def break_names(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Lets names in tables break after dots and underscores, as on a phone.

    In the page, not in its nodes: the search finds whole names.
    """
    context["body"] = re.sub(
        r"(?s)<table.*?</table>",
        lambda table: re.sub(
            r'(?<=<span class="pre">)[^<]+',
            lambda name: re.sub(r"([._])(?=\w)", r"\1<wbr>", name[0]),
            table[0],
        ),
        context.get("body", ""),
    )


class English(SearchEnglish):
    """Finds `donate_argnums` when asked for "donate"."""

    def split(self, input: str) -> list[str]:
        words = super().split(input)
        return words + [
            part for word in words if "_" in word for part in word.split("_")
        ]


def setup(app: Sphinx) -> None:
    app.add_search_language(English)
    app.connect("builder-inited", one_signature)
    app.connect("source-read", add_tables)
    app.connect("doctree-read", shorten_names)
    app.connect("doctree-read", link_names)
    app.connect("html-page-context", break_names)
