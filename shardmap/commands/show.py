"""`python -m shardmap show`: a sharding in every form, from indices to Shardy text.

It needs no devices.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import shardmap as sm
from shardmap.commands.parsing import Parser, evaluate
from shardmap.explain.draw.grids import GAP
from shardmap.explain.draw.text import picture
from shardmap.sharding.spec import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
)

EXAMPLES = (
    """python -m shardmap show "P('data', None)" --shape 8,64 --mesh data=4,model=2""",
    'python -m shardmap show "ShardingSpec((Chunked(4), None), '
    '(ShardedAxis(0), Replicated(2)))" --shape 8,64',
)
MOST_DEVICES = 2**20
INDICES_SHOWN = 12


def main(arguments: Sequence[str]) -> int:
    """Prints the sharding and returns the exit code."""
    parser = Parser(
        "show",
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
    parser.add_argument(
        "--json", action="store_true", help="write the same as JSON, for programs"
    )
    options = parser.parse_args(arguments)
    shown = page_as_json if options.json else page
    try:
        text = shown(options.spec, options.shape, options.mesh)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(text)
    return 0


def page(spec_text: str, shape_text: str, mesh_text: str | None) -> str:
    """The text of the page.

    >>> print(page("P('x')", "4", "x=2").partition("Indices")[0].rstrip())
    P('x') on a mesh of x=2
    ShardingSpec((Chunked((2,)),), (ShardedAxis(0),))
    <BLANKLINE>
    (4,) on 2 devices, (2,) on each: dimension 0 across
           0:2   2:4
         +-----+-----+
         |  0  |  1  |
         +-----+-----+
    """
    asked = _Asked.read(spec_text, shape_text, mesh_text)
    title = [repr(asked.spec)]
    if asked.partitions is not None:
        title.insert(0, f"{asked.partitions} on a mesh of {_mesh_text(asked.mesh)}")
    return "\n".join(
        [
            *title,
            "",
            picture(asked.spec, asked.shape),
            *_forms(asked.spec, asked.shape, asked.names),
        ]
    )


def page_as_json(spec_text: str, shape_text: str, mesh_text: str | None) -> str:
    """The content of `page` without the picture, for all devices.

    >>> found = json.loads(page_as_json("P('x')", "4", "x=2"))
    >>> found["shard_shape"], found["indices"]
    ([2], [[[0, 2]], [[2, 4]]])
    """
    asked = _Asked.read(spec_text, shape_text, mesh_text)
    spec, shape = asked.spec, asked.shape
    outside = spec.stacked()
    return json.dumps(
        {
            "spec": repr(spec),
            "partition_spec": asked.partitions,
            "shape": shape,
            "shard_shape": spec.shard_shape(shape),
            "mesh_shape": spec.mesh_shape,
            "mesh_axes": asked.names,
            # Of each device, row-major over the mesh: a number, or start and stop.
            "indices": [
                [
                    item if isinstance(item, int) else item.indices(size)[:2]
                    for item, size in zip(index, shape, strict=True)
                ]
                for index in spec.indices(shape).flat
            ],
            "op_sharding": "\n".join(_proto_fields(outside)),
            "hlo": str(outside.hlo_sharding()),
            "sdy": outside.sdy(asked.names),
        }
    )


class _Asked(NamedTuple):
    """The parsed arguments.

    Attributes:
      spec: the layout.
      shape: the shape of the array.
      mesh: the sizes of mesh axes by name, if given.
      partitions: the PartitionSpec as text, if given.
    """

    spec: ShardingSpec
    shape: tuple[int, ...]
    mesh: dict[str, int] | None
    partitions: str | None

    @property
    def names(self) -> list[str] | None:
        return list(self.mesh) if self.mesh else None

    @classmethod
    def read(cls, spec_text: str, shape_text: str, mesh_text: str | None) -> Self:
        shape = read_shape(shape_text)
        mesh = None if mesh_text is None else read_mesh(mesh_text)
        _check_count(math.prod((mesh or {}).values()))
        given = evaluate(spec_text, "SPEC", _NAMES)
        partitions = None
        if isinstance(given, PartitionSpec):
            spec = _spec_of_partitions(given, len(shape), mesh)
            partitions = _written(given)
        elif isinstance(given, ShardingSpec):
            spec = given
            if mesh and tuple(mesh.values()) != spec.mesh_shape:
                raise ValueError(
                    f"--mesh {_mesh_text(mesh)} has the shape {tuple(mesh.values())}, "
                    f"but the mesh of {spec!r} has {spec.mesh_shape}: give one "
                    "name=size for each entry of mesh_mapping, or leave --mesh out"
                )
        else:
            raise ValueError(
                f"SPEC must be a ShardingSpec or a PartitionSpec, got {given!r}"
            )
        _check_count(spec.num_shards)
        return cls(spec, shape, mesh, partitions)


def _check_count(devices: int) -> None:
    if devices > MOST_DEVICES:
        raise ValueError(
            f"the mesh has {devices:,} devices, and show draws at most {MOST_DEVICES:,}"
        )


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


_NAMES = {
    "jax": jax,
    "sm": sm,
    "shardmap": sm,
    "P": PartitionSpec,
    "PartitionSpec": PartitionSpec,
    "ShardingSpec": ShardingSpec,
    "Chunked": Chunked,
    "Unstacked": Unstacked,
    "NoSharding": NoSharding,
    "ShardedAxis": ShardedAxis,
    "Replicated": Replicated,
}


def _spec_of_partitions(
    partitions: PartitionSpec, ndim: int, mesh: dict[str, int] | None
) -> ShardingSpec:
    if mesh is None:
        raise ValueError(
            "a PartitionSpec names the axes of a mesh: give their sizes, such as "
            "--mesh data=4,model=2"
        )
    abstract = AbstractMesh(
        tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh)
    )
    try:
        sharding = NamedSharding(abstract, partitions)
    except Exception as error:  # JAX's own errors of a spec are of several types.
        raise ValueError(f"SPEC {partitions}: {error}") from None
    return ShardingSpec.from_named_sharding(sharding, ndim)


def _mesh_text(mesh: dict[str, int] | None) -> str:
    return ", ".join(f"{name}={size}" for name, size in (mesh or {}).items())


def _written(partitions: PartitionSpec) -> str:
    """As JAX prints it, without the comma of a tuple of one.

    >>> _written(PartitionSpec("x"))
    "P('x')"
    """
    return f"P({', '.join(map(repr, partitions))})"


def _forms(
    spec: ShardingSpec, shape: tuple[int, ...], names: Sequence[str] | None
) -> Iterator[str]:
    """The indices, the proto, the HLO text and the Shardy text, each with a heading."""
    yield "\nIndices"
    yield from _indices(spec, shape)
    outside = spec.stacked()
    if outside != spec:
        yield (
            "\nThe forms below have no Unstacked: they are the array from outside the "
            f"map,\n{outside!r}"
        )
    yield "\nOpSharding proto"
    yield from _indented(_proto_fields(outside))
    yield "\nHLO"
    yield from _indented([str(outside.hlo_sharding())])
    yield "\nShardy"
    yield from _indented(outside.sdy(names).splitlines())


def _proto_fields(outside: ShardingSpec) -> list[str]:
    """The proto's text, in the compact form."""
    # Protobuf prints a note above the fields, and no field for the kind of number 0.
    text = str(outside.hlo_sharding().to_proto())
    fields = [line for line in text.split("\n") if ": " in line]
    return fields or ["type: REPLICATED"]


def _indices(spec: ShardingSpec, shape: tuple[int, ...]) -> Iterator[str]:
    indices = spec.indices(shape)
    count = spec.num_shards
    width = len(str(count - 1))
    shown = (
        range(count)
        if count <= INDICES_SHOWN
        else itertools.chain(range(INDICES_SHOWN - 2), [count - 1])
    )
    previous = -1
    for device in shown:
        if device != previous + 1:
            yield f"  {GAP}"
        previous = device
        place = np.unravel_index(device, spec.mesh_shape)
        yield f"  device {device:{width}}  {_index_text(indices[place])}"


def _index_text(index: tuple[int | slice, ...]) -> str:
    """An index as written between brackets.

    >>> _index_text((3, slice(None), slice(0, 2))), _index_text(())
    ('[3, :, 0:2]', '[()]')
    """
    parts = [
        str(item)
        if isinstance(item, int)
        else ":"
        if item == slice(None)
        else f"{item.start}:{item.stop}"
        for item in index
    ]
    return f"[{', '.join(parts) or '()'}]"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
