"""`python -m shardmap picture`: a sharding in all forms, from a picture to Shardy."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import shardmap as sm
from shardmap.commands.parsing import Parser, evaluate
from shardmap.explaining.draw.text import picture
from shardmap.sharding.spec import ShardingSpec
from shardmap.units import shown

EXAMPLES = (
    "python -m shardmap picture \"P('data', None)\" --shape 8,64 --mesh data=4,model=2",
    'python -m shardmap picture "ShardingSpec((Chunked(4), None), '
    '(ShardedAxis(0), Replicated(2)))" --shape 8,64',
)
MOST_DEVICES = 2**20
NAMES = {
    **{"jax": jax, "sm": sm, "shardmap": sm},
    **{"P": PartitionSpec, "PartitionSpec": PartitionSpec},
    **{"ShardingSpec": sm.ShardingSpec, "Chunked": sm.Chunked},
    **{"Unstacked": sm.Unstacked, "NoSharding": sm.NoSharding},
    **{"ShardedAxis": sm.ShardedAxis, "Replicated": sm.Replicated},
}
"""The names that SPEC may use."""


def main(arguments: Sequence[str]) -> int:
    """Prints the sharding and returns the exit code."""
    parser = Parser(
        "picture",
        "Show which device holds which part of an array, and the same layout as "
        "OpSharding\nproto, HLO text and Shardy text. No device is needed.",
        EXAMPLES,
    )
    parser.add_argument(
        "spec", metavar="SPEC", help="a ShardingSpec, or a PartitionSpec, also as P"
    )
    parser.add_argument(
        "--shape", required=True, help="the array's, such as 8,64; () for a scalar"
    )
    parser.add_argument(
        "--mesh",
        help="names and sizes of its axes, such as data=4,model=2, which a "
        "PartitionSpec needs",
    )
    options = parser.parse_args(arguments)
    try:
        text = page(options.spec, options.shape, options.mesh)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(text)
    return 0


def page(spec_text: str, shape_text: str, mesh_text: str | None) -> str:
    """The layout as text.

    Raises:
      ValueError, TypeError: the arguments cannot be read, or do not fit each other.

    >>> print(page("P('x')", "4", "x=2").partition("OpSh")[0].rstrip())
    P('x') on a mesh of x=2
    ShardingSpec((Chunked((2,)),), (ShardedAxis(0),))
    <BLANKLINE>
    (4,) on 2 devices, (2,) on each: dimension 0 across
           0:2   2:4
         +-----+-----+
         |  0  |  1  |
         +-----+-----+
    """
    shape = read_shape(shape_text)
    mesh = {} if mesh_text is None else read_mesh(mesh_text)
    of_mesh = ", ".join(f"{name}={size}" for name, size in mesh.items())
    _check_count(math.prod(mesh.values()))
    spec = evaluate(spec_text, f"SPEC {shown(spec_text)}", NAMES)
    lines = []
    if isinstance(spec, PartitionSpec):
        lines = [f"P({', '.join(map(repr, spec))}) on a mesh of {of_mesh}"]
        spec = _spec_of_partitions(spec, len(shape), mesh)
    elif not isinstance(spec, ShardingSpec):
        raise ValueError(
            f"SPEC must be a ShardingSpec or a PartitionSpec, got {spec!r}"
        )
    elif mesh and tuple(mesh.values()) != spec.mesh_shape:
        raise ValueError(
            f"--mesh {of_mesh} has the shape {tuple(mesh.values())}, but the "
            f"mesh of {spec!r} has {spec.mesh_shape}: give one name=size for each "
            "entry of mesh_mapping, or leave --mesh out"
        )
    _check_count(spec.num_shards)
    lines += [repr(spec), "", picture(spec, shape)]
    outside = spec.stacked()
    if outside != spec:
        lines.append(
            "\nThe forms below have no Unstacked: they are the array from outside the "
            f"map,\n{outside!r}"
        )
    hlo = outside.hlo_sharding()
    # Protobuf prints a note above the fields, and no field for the kind of number 0.
    fields = [line for line in str(hlo.to_proto()).splitlines() if ": " in line]
    for title, text in (
        ("OpSharding proto", "\n".join(fields or ["type: REPLICATED"])),
        ("HLO", str(hlo)),
        ("Shardy", outside.sdy(list(mesh) or None)),
    ):
        lines += [f"\n{title}", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(lines)


def read_shape(text: str) -> tuple[int, ...]:
    """Parses a shape such as ``8,64``.

    >>> read_shape("8, 64"), read_shape("(8,)"), read_shape("()")
    ((8, 64), (8,), ())
    """
    sizes = [size for size in text.strip(" ()").split(",") if size.strip()]
    if not all(size.strip().isdecimal() for size in sizes):
        raise ValueError(f"--shape needs whole numbers, such as 8,64, got {text!r}")
    return tuple(map(int, sizes))


def read_mesh(text: str) -> dict[str, int]:
    """Parses a mesh such as ``data=4,model=2``.

    >>> read_mesh("data=4, model=2")
    {'data': 4, 'model': 2}
    """
    parts = [part.partition("=") for part in text.split(",")]
    mesh = {
        name.strip(): int(size)
        for name, _, size in parts
        if name.strip() and size.strip().isdecimal() and int(size)
    }
    if len(mesh) != len(parts):
        raise ValueError(
            "--mesh needs a name=size for each axis, names that differ and sizes of 1 "
            f"or more, such as data=4,model=2; got {text!r}"
        )
    return mesh


def _check_count(devices: int) -> None:
    if devices > MOST_DEVICES:
        raise ValueError(
            f"the mesh has {devices:,} devices, and picture draws at most "
            f"{MOST_DEVICES:,}"
        )


def _spec_of_partitions(
    partitions: PartitionSpec, ndim: int, mesh: dict[str, int]
) -> ShardingSpec:
    if not mesh:
        raise ValueError(
            "a PartitionSpec names the axes of a mesh: give their sizes, such as "
            "--mesh data=4,model=2"
        )
    auto = (AxisType.Auto,) * len(mesh)
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=auto)
    try:
        sharding = NamedSharding(abstract, partitions)
    except Exception as error:  # JAX's own errors of a spec are of several types.
        raise ValueError(f"SPEC {partitions}: {error}") from None
    return ShardingSpec.from_named_sharding(sharding, ndim)
