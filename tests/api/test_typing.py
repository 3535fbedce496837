"""What a type checker tells a user about mapped functions."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

pytest.importorskip("mypy")
pytestmark = pytest.mark.deep  # `make types` runs them.

PROGRAM = """
import jax
import numpy as np
import shardmap as sm

mesh = sm.make_mesh({"i": 8})
x = jax.numpy.ones(8)

def scaled(x: jax.Array, by: float = 2.0) -> jax.Array:
    return x * by

@sm.spmap
def bare(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, x

@sm.spmap(axis_name="i", in_axes=(0,))
def elements(x: jax.Array) -> dict[str, jax.Array]:
    return {"x": x}

@sm.mesh_map(mesh=mesh, in_axes={"i": 0}, out_axes={"i": 0})
def blocks(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y

@sm.sharded_jit(in_parts=(8,), out_parts=(8,))
def parts(x: jax.Array) -> jax.Array:
    return x

class Model:
    @sm.spmap(axis_name="i", static_broadcasted_argnums=0)
    def apply(self, x: jax.Array) -> jax.Array:
        return x

REVEALED
"""

# What is written, and what a checker says it is.
REVEALED = {
    "sm.spmap(scaled)": "MappedFunction[[x: Array, by: float",
    "sm.spmap(scaled, 'i')(x, by=3.0)": "Array",
    "bare(x)": "tuple[Array, Array]",
    "elements(x)": "dict[str, Array]",
    "elements.lower(x)": "Lowered",
    "elements.lower(x).in_specs": "tuple[Any, ...]",
    "sm.shard_of(x, 1)": "Array",
    "sm.unstack(x)": "list[Array]",
    "sm.unreplicate(elements(x))": "dict[str, Array]",
    "sm.compat.pmap(scaled)": "Any",
    "elements.trace(x)": "Traced",
    "elements.explain(x)": "Explanation",
    "blocks": "MeshMappedFunction[[x: Array, y: Array], Array]",
    "blocks(x, x)": "Array",
    "sm.mesh_map(scaled, mesh, {}, {})": "MeshMappedFunction[[x: Array, by: float",
    "parts(x)": "Array",
    "sm.sharded_jit(scaled, None, None, 2)": "ShardedFunction[[x: Array, by: float",
    "Model().apply(x)": "Array",
    "Model.apply": "MappedFunction[[self: ",
}

WRONG = {
    "bare(x, x)": r"Too many arguments",
    "elements(y=x)": r"[Uu]nexpected keyword argument \"y\"",
    "blocks(x)": r"(Too few|Missing).* argument",
    "parts('x')": r"incompatible type \"str\"",
    "Model().apply('x')": r"incompatible type \"str\"",
    "sm.spmap(scaled, lowering='gspmd')": r"No overload variant|incompatible type",
    "sm.mesh_map(scaled, in_axes={})": r"No overload variant|[Mm]issing",
    "sm.spmap(scaled, in_axis=0)": r"No overload variant",
    "sm.spmap(in_axis=0)": r"did you mean \"in_axes\"",
    "sm.mesh_map(mesh=mesh, in_axes={}, out_axis={})": r"No overload variant",
    "sm.sharded_jit(in_part=2, out_parts=None)": r"No overload variant",
    "sm.chunked(memry=2)": r"did you mean \"memory\"",
    "sm.spmap(3)": r"No overload variant|incompatible type",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What mypy says, by the line that it is about."""
    lines = [f"reveal_type({text})" for text in REVEALED] + list(WRONG)
    program = PROGRAM.replace("REVEALED", "\n".join(lines))
    path = tmp_path_factory.mktemp("typed") / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        check=False,
    )
    by_line = {}
    for number, message in re.findall(
        r"^.*program\.py:(\d+): \w+: (.*)$", done.stdout, re.MULTILINE
    ):
        text = program.splitlines()[int(number) - 1]
        by_line[text] = f"{by_line.get(text, '')}{message}\n"
    assert by_line, done.stdout + done.stderr
    return by_line


def test_only_what_is_asked_and_what_is_wrong_is_told(said):
    revealed = {f"reveal_type({text})" for text in REVEALED}
    assert set(said) == revealed | set(WRONG)


@pytest.mark.parametrize("text", REVEALED)
def test_a_checker_knows(text, said):
    told = said[f"reveal_type({text})"]
    # Where a class is defined depends on the version of JAX.
    told = re.sub(r"\b(\w+\.)+(?=[A-Z])", "", told)
    assert REVEALED[text] in told


@pytest.mark.parametrize("text", WRONG)
def test_a_checker_refuses(text, said):
    assert re.search(WRONG[text], said[text])
