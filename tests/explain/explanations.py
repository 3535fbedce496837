"""Explanations, built by hand to have everything in them that a page must bear."""

import os
from unittest import mock

from shardmap import (
    Chunked,
    Explanation,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
)
from shardmap.explaining.report import (
    ArrayLayout,
    Axis,
    Collective,
    Cost,
    Remark,
)

LONG = "a_name_that_is_much_longer_than_any_that_a_person_would_ever_want_to_read_" * 2
MARKUP = "</title></style><script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


def printed(report, width=80):
    """What ``print`` writes in a terminal of so many columns."""
    with mock.patch.dict(os.environ, COLUMNS=str(width)):
        return str(report)


def axis(**changes):
    fields = {
        "name": "batch",
        "size": 256,
        "kind": "spmap",
        "devices": 8,
        "vectorised": 32,
        "steps": 1,
        "depth": 0,
        "inside": None,
        "source": "train.py:12 (step)",
    }
    return Axis(**{**fields, **changes})


def array(spec, shape, **changes):
    fields = {
        "role": "input",
        "path": "x['w'][0]",
        "shape": shape,
        "dtype": "float32",
        "spec": spec,
        "shard_shape": None if spec is None else spec.shard_shape(shape),
        "bytes": 123456,
        "shard_bytes": None if spec is None else 1234,
        "layout": "dimension 0 in 4 shards, each on 2 devices",
    }
    return ArrayLayout(**{**fields, **changes})


def collective(**changes):
    fields = {
        "kind": "all-reduce",
        "operation": "psum",
        "axes": ("data", "model"),
        "group_size": 8,
        "count": 100,
        "bytes_in": 4096,
        "bytes_out": 4096,
        "source": "train.py:12 (step)",
        "added_by_partitioner": False,
    }
    return Collective(**{**fields, **changes})


ROWS = ShardingSpec((Chunked(4), None), (ShardedAxis(0), Replicated(2)))
BOTH = ShardingSpec((Chunked(2), Chunked(4)), (ShardedAxis(1), ShardedAxis(0)))
CUBE = ShardingSpec(
    (Chunked(8), Chunked(2), Unstacked(3), None), map(ShardedAxis, range(3))
)
LARGE = ShardingSpec((Chunked((64, 16)), Chunked(4)), map(ShardedAxis, range(3)))
SCALAR = ShardingSpec((), (Replicated(8),))
STRIDED = ShardingSpec((Chunked(2),), (Replicated(8), ShardedAxis(0)))


def explanation(**changes):
    fields = {
        "name": "step",
        "mesh": (("data", 4), ("model", 2)),
        "num_devices": 8,
        "device_kind": "cpu",
        "axes": (axis(),),
        "arrays": (array(ROWS, (8, 64)), array(SCALAR, (), path="result")),
        "collectives": (collective(),),
        "cost": Cost(1.5e12, 2e9, 3 * 2**30, 2**30, 2**20, 12),
        "remarks": (Remark("x is replicated on every device", "cut it", "x"),),
        "notes": ("XLA counts the body of a loop once.",),
    }
    return Explanation(**{**fields, **changes})


def with_everything():
    """Every kind of value, also the missing ones."""
    unknown = collective(
        operation=None,
        axes=(),
        group_size=None,
        count=None,
        source=None,
        added_by_partitioner=True,
        cause="reduce_sum reduces a sharded dimension",
    )
    return explanation(
        axes=(
            axis(),
            axis(name=None, kind="loop", devices=1, steps=100, depth=1, inside=0),
            axis(name="i", size=None, kind="while", steps=None, depth=2, source=None),
            axis(name="deep", kind="vmap", depth=12, inside=2),
        ),
        arrays=(
            array(ROWS, (8, 64)),
            array(BOTH, (16, 64), path="y"),
            array(CUBE, (800, 64, 3, 5), path="cube"),
            array(SCALAR, (), path="loss"),
            array(STRIDED, (4,), path="strided"),
            array(ShardingSpec((None,), ()), (4,), path="here"),
            array(None, (1000, 1000), path="nowhere", layout="nobody knows"),
        ),
        collectives=(collective(), unknown),
    )


def large():
    """Thousands of devices, hundreds of arrays."""
    return explanation(
        mesh=(("pod", 4), ("data", 64), ("model", 16)),
        num_devices=4096,
        arrays=tuple(
            array(LARGE, (1 << 20, 4096), path=f"params['layers'][{number}]['kernel']")
            for number in range(60)
        ),
        collectives=(collective(count=10**9, bytes_in=2**40),) * 30,
    )


def long_words():
    """Names without a place to break a line at."""
    return explanation(
        name=LONG,
        mesh=((LONG, 4), ("b", 2)),
        axes=(axis(name=LONG, source=f"{LONG}.py:1 ({LONG})"),),
        arrays=(array(ROWS, (8, 64), path=LONG, layout=LONG),),
        collectives=(collective(axes=(LONG,), source=LONG),),
        remarks=(Remark(LONG, LONG, LONG),),
        notes=(LONG,),
    )


def hostile():
    """Markup wherever a text can stand."""
    return explanation(
        name=MARKUP,
        mesh=((MARKUP, 4), ("b", 2)),
        device_kind=MARKUP,
        axes=(axis(name=MARKUP, source=MARKUP),),
        arrays=(
            array(ROWS, (8, 64), path=MARKUP, dtype=MARKUP, layout=MARKUP, role=MARKUP),
        )
        * 30,
        collectives=(
            collective(kind=MARKUP, operation=MARKUP, axes=(MARKUP,), source=MARKUP),
        ),
        remarks=(Remark(MARKUP, MARKUP, MARKUP),),
        notes=(MARKUP,),
    )


def bare():
    """As little as there can be."""
    return explanation(
        mesh=(),
        num_devices=1,
        axes=(),
        arrays=(),
        collectives=(),
        cost=None,
        remarks=(),
        notes=(),
    )


BY_NAME = {
    "everything": with_everything,
    "large": large,
    "long words": long_words,
    "hostile": hostile,
    "bare": bare,
}
