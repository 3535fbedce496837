"""Uses of old names, and the edits that replace them."""

import functools
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from shardmap.compat.names import ATTRIBUTES, EDITS, IDLE, MODULES, new_name

PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_STANDARD = sysconfig.get_path("stdlib")
_OURS = str(Path(__file__).parent.parent)

_OR_SPMAP = ", with `import shardmap.compat`; in new code shardmap.spmap"

# `import a.b`, `from a import b`, or `a.b` in an expression.
Form = Literal["import", "from", "name"]


class Use(NamedTuple):
    """A use of an old name.

    Attributes:
      file, line, name, form: where it is, and how it is written.
      asname: what an import renames it to.
      edit: the edit of this place; None: the name tells it.
    """

    file: str
    line: int
    name: str
    form: Form
    asname: str | None = None
    edit: str | None = None


def edit(old: str, form: Form, asname: str | None = None) -> str:
    """The edit that replaces an old name.

    >>> edit("jax.tree_map", "name")
    'jax.tree_map -> jax.tree.map'
    >>> edit("jax.tree_multimap", "from")
    'from jax import tree_multimap -> from jax.tree import map as tree_multimap'
    >>> edit("jax.linear_util", "import", "lu")
    'import jax.linear_util as lu -> import jax.extend.linear_util as lu'
    >>> edit("jax.pmap", "name").partition(" -> ")[2]
    'shardmap.compat.pmap, with `import shardmap.compat`; in new code shardmap.spmap'
    """
    if old in EDITS and form == "name":
        return EDITS[old]
    if old.startswith("jax.Array."):
        return ATTRIBUTES[old.removeprefix("jax.Array.")][0]
    new = new_name(old)
    old_module, _, old_name = old.rpartition(".")
    renamed = f" as {asname}" if asname else ""
    statement = {
        "name": old,
        "import": f"import {old}{renamed}",
        "from": f"from {old_module} import {old_name}{renamed}",
    }[form]
    if old in IDLE or new in IDLE.values():
        rules = (
            "; jax.interpreters.mlir.register_lowering takes the rules of primitives"
        )
        return f"{statement} -> leave it out{rules * ('translation' in old)}"
    if new is None:
        return f"{statement} -> leave it out, with the new names in their places"
    if form == "name":
        return f"{statement} -> {new}{_OR_SPMAP * (new == 'shardmap.compat.pmap')}"
    if form == "import":
        return f"{statement} -> import {new}{renamed}"
    module, _, name = new.rpartition(".")
    kept = asname or old_name
    start = f"from {module} " if module else ""
    return f"{statement} -> {start}import {name}" + (f" as {kept}" * (name != kept))


def without_repetitions(every: Iterable[Use]) -> list[Use]:
    """Sorts the uses, and drops those that another edit covers.

    >>> use, inside = ("train.py", 1, "jax.api"), ("train.py", 2, "jax.api.jit")
    >>> used = Use(*use, "from"), Use(*inside, "name")
    >>> [use.name for use in without_repetitions(used)]
    ['jax.api']
    """
    uses = set(every)
    imported = {
        (use.file, use.name) for use in uses if use.form == "from" or use.asname
    }
    # Edits of an element, whose line has the name of the map over a tree too.
    whole = {(use.file, use.line) for use in uses if use.edit and "lambda" in use.edit}
    longer = {(use.file, use.line, use.name.rpartition(".")[0]) for use in uses}

    def is_repeated(use: Use) -> bool:
        module, _, name = use.name.rpartition(".")
        if use.form != "name":
            return False
        if (use.file, use.line, use.name) in longer or (use.file, use.name) in imported:
            return True
        if (use.file, use.line) in whole and new_name(use.name) == "jax.tree.map":
            return True
        same = new_name(use.name) == f"{MODULES.get(module)}.{name}"
        return same and (use.file, module) in imported

    return sorted((use for use in uses if not is_repeated(use)), key=lambda u: u[:4])


def told(use: Use, file: str) -> str:
    """One line that describes a use in a file.

    >>> told(Use("/home/train.py", 3, "jax.tree_map", "name"), "train.py")
    'train.py:3: jax.tree_map -> jax.tree.map'
    """
    return f"{file}:{use.line}: {use.edit or edit(use.name, use.form, use.asname)}"


def caller() -> tuple[str, int]:
    """The file and line of the program that called this package.

    Frames of Python's own modules are skipped.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@functools.cache
def _is_machinery(file: str) -> bool:
    return file.startswith(("<frozen", _OURS)) or (
        file.startswith(_STANDARD) and not file.startswith(PACKAGES)
    )
