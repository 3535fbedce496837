"""Where old names are used, and the edit that puts the new one there."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from shardmap.compat.names import ATTRIBUTES, MODULES, new_name

# `import a.b`, `from a import b` (and `import a.b as c`), or `a.b` in an expression.
Form = Literal["import", "from", "name"]


class Use(NamedTuple):
    """Where an old name is used."""

    file: str
    line: int
    name: str
    form: Form


def edit(old: str, form: Form) -> str:
    """The edit that puts the new name for an old one.

    >>> edit("jax.tree_map", "name")
    'jax.tree_map -> jax.tree.map'
    >>> edit("jax.pmap", "from")
    'from jax import pmap -> from shardmap import spmap as pmap'
    >>> edit("jax.experimental.maps", "from")
    'from jax.experimental import maps -> from shardmap.compat import maps'
    >>> edit("jax.experimental.maps", "import")
    'import jax.experimental.maps -> import shardmap.compat.maps'
    """
    if old.startswith("jax.Array."):
        name = old.removeprefix("jax.Array.")
        return f"x.{name} -> {ATTRIBUTES[name]}"
    new = new_name(old)
    old_module, _, old_name = old.rpartition(".")
    statement = {
        "name": old,
        "import": f"import {old}",
        "from": f"from {old_module} import {old_name}",
    }[form]
    if new is None:
        return f"{statement} -> leave it out, with the new names in their places"
    if form != "from":
        return f"{statement} -> {'import ' * (form == 'import')}{new}"
    module, _, name = new.rpartition(".")
    renamed = "" if name == old_name else f" as {old_name}"
    start = f"from {module} " if module else ""
    return f"{statement} -> {start}import {name}{renamed}"


def without_repetitions(found: Iterable[Use]) -> list[Use]:
    """Sorted, without those that another edit makes right.

    >>> use, inside = ("train.py", 1, "jax.api"), ("train.py", 2, "jax.api.jit")
    >>> used = Use(*use, "from"), Use(*inside, "name")
    >>> [use.name for use in without_repetitions(used)]
    ['jax.api']
    """
    uses = set(found)
    imported = {(use.file, use.name) for use in uses if use.form == "from"}
    longer = {(use.file, use.line, use.name.rpartition(".")[0]) for use in uses}

    def is_repeated(use: Use) -> bool:
        module, _, name = use.name.rpartition(".")
        if use.form != "name":
            return False
        if (use.file, use.line, use.name) in longer:
            return True
        same = new_name(use.name) == f"{MODULES.get(module)}.{name}"
        return same and (use.file, module) in imported

    return sorted(use for use in uses if not is_repeated(use))


def told(use: Use, file: str) -> str:
    """One line for a use, with this name for its file.

    >>> told(Use("/home/train.py", 3, "jax.tree_map", "name"), "train.py")
    'train.py:3: jax.tree_map -> jax.tree.map'
    """
    return f"{file}:{use.line}: {edit(use.name, use.form)}"
