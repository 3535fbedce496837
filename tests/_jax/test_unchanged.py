"""Nothing of JAX is changed."""

import pathlib

from tests.command_line import python

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import importlib, pathlib, sys
from collections.abc import Mapping
import jax

def callables():
    '''What the modules, classes and tables of JAX have that is called.'''
    found = {}
    for module, namespace in list(sys.modules.items()):
        if namespace is None or module.partition(".")[0] != "jax":
            continue
        for name, value in list(vars(namespace).items()):
            held = vars(value) if isinstance(value, type) else value
            is_table = isinstance(held, Mapping) and not isinstance(held, type)
            items = dict(held) if is_table else {}
            found[module, name, None] = value
            found |= {(module, name, key): item for key, item in items.items()}
    return {key: value for key, value in found.items() if callable(value)}

before = callables()
root = pathlib.Path(sys.argv[1])
for path in sorted(root.glob("shardmap/**/*.py")):
    if path.stem not in ("__main__", "demo"):
        parts = path.relative_to(root).with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
after = callables()
print(len(before) > 10_000)
for (module, name, key), value in before.items():
    if after.get((module, name, key)) is not value and "._src." in module:
        print(module, name, key)
"""


def test_importing_everything_changes_nothing_of_jax():
    result = python("-c", PROGRAM, str(ROOT))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["True"]
