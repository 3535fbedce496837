"""What is said of a compiled program agrees with its text, which is read here anew."""

import collections
import math
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

MESH = sm.make_mesh({"data": 4, "model": 2})
LINE = sm.make_mesh({"i": 8})
EXPLICIT = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,))
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "bf16": 2, "pred": 1}
RING = [(k, (k + 1) % 8) for k in range(8)]


def ones(*shape):
    return np.ones(shape, np.float32)


def lines_with(*comments):
    """The numbers of the lines of this file that end in a comment."""
    text = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    return [
        next(k for k, line in enumerate(text, 1) if line.endswith(f"# {comment}"))
        for comment in comments
    ]


def line_of(collective):
    assert collective.source.startswith(("tests/explain/read/test_against_hlo.py", "/"))
    return int(collective.source.split(" ")[0].rpartition(":")[2])


def moved(text):
    """Kind and bytes out of each value that is sent, with how often: another reading.

    A loop's steps are counted by walking from each computation up to its callers.
    """
    callers, inside, name = {}, collections.defaultdict(list), ""
    for line in text.splitlines():
        if line.endswith("{") and (
            header := re.match(r"(?:ENTRY )?%([\w.\-]+) ", line)
        ):
            name = header[1]
        inside[name].append(line)
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        for called in re.findall(r"(?:body|calls|to_apply)=%([\w.\-]+)", line):
            callers[called] = (name, int(trips[1]) if trips else 1)
    found = collections.Counter()
    for name, lines in inside.items():
        times, at = 1, name
        while at in callers:
            at, trips = callers[at]
            times *= trips
        for line in lines:
            sent = re.match(rf".* = (.*) ({KINDS})\(", line)
            if sent is None:
                continue
            values = [
                WIDTHS[dtype] * math.prod(int(n) for n in sizes.split(",") if n)
                for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", sent[1])
            ]
            if sent[2] == "all-to-all":  # One piece of one value for each device.
                values = [sum(values)]
            for size in values:
                found[sent[2], size] += times
    return found


def said(report):
    found = collections.Counter()
    for each in report.collectives:
        if each.in_compiled:
            found[each.kind, each.bytes_out] += each.count
    return found


# Programs whose axes are explicit


def total(x):
    return lax.psum(x, "i")


def test_an_explicit_mesh_that_is_set_is_a_mesh_of_devices():
    with jax.set_mesh(EXPLICIT):
        fun = jax.jit(jax.shard_map(total, in_specs=P("i"), out_specs=P()))
        x = jax.device_put(ones(8, 4), P("i"))
        report = sm.explain(fun)(x)
        text = fun.lower(x).compile().as_text()
    assert report.notes == ()
    assert report.device_kind == "cpu"
    assert report.cost is not None
    assert [each.in_compiled for each in report.collectives] == [True]
    assert said(report) == moved(text)


def test_reduced_and_unreduced_values():
    large = ones(1 << 19)
    with jax.set_mesh(EXPLICIT):
        spec = P(None, reduced={"i"})
        fun = jax.shard_map(jnp.sin, in_specs=spec, out_specs=spec)
        x = jax.device_put(large, NamedSharding(EXPLICIT, spec))
        report = sm.explain(lambda x: fun(jnp.cos(x)))(x)
    assert any("made outside the map" in each.text for each in report.remarks)


def test_the_package_is_imported_under_any_mesh():
    program = """
        import jax
        from jax.sharding import AxisType
        explicit = (AxisType.Explicit,) * 2
        with jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=explicit)):
            import shardmap as sm
            sm.spmap, sm.explain, sm.plan, sm.chunked
            import shardmap.compat
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


# Which is which


def test_a_dead_collective_does_not_take_the_match_of_a_live_one():
    def fun(x):
        lax.ppermute(x, "i", RING)  # Dead.

        def step(x, _):
            return lax.ppermute(x, "i", RING) * 2, None  # Live.

        return lax.scan(step, x, None, length=4)[0]

    mapped = jax.shard_map(fun, mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    dead, live = sm.explain(mapped)(ones(8, 4)).collectives
    assert (dead.in_compiled, live.in_compiled, live.count) == (False, True, 4)
    assert [line_of(dead), line_of(live)] == lines_with("Dead.", "Live.")


def test_values_sent_together_under_names_with_colons():
    def fun(x):
        with jax.named_scope("a:b"):
            one = lax.psum(x, "i")
        with jax.named_scope("c:d"):
            return one * lax.psum(x.sum(), "i")

    mapped = jax.shard_map(fun, mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    report = sm.explain(mapped)(ones(8, 4))
    assert [each.in_compiled for each in report.collectives] == [True, True]
    assert [each.bytes_in for each in report.collectives] == [16, 4]


def test_values_sent_together_take_the_time_of_one():
    def fun(x):
        return [lax.psum(x * k, "i") for k in range(60)]

    mapped = jax.shard_map(fun, mesh=LINE, in_specs=P("i"), out_specs=P())
    report = sm.explain(mapped, interconnect="nvlink4")(ones(8, 4))
    together = sum(each.bytes_in for each in report.collectives)
    assert len(report.collectives) == 60
    messages = len(re.findall(r" all-reduce\(", compiled(mapped, ones(8, 4))))
    assert messages == 1
    expected = report.interconnect.time("all-reduce", together, 8)
    assert report.seconds == pytest.approx(expected)


def test_a_collective_moved_out_of_a_loop_counts_as_often_as_it_runs():
    def fun(x, y):
        def step(x, _):
            return x + lax.psum(y, "i"), None

        return lax.scan(step, x, None, length=5)[0]

    mapped = jax.shard_map(fun, mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    report = sm.explain(mapped)(ones(8, 4), ones(8, 4))
    assert said(report) == moved(compiled(mapped, ones(8, 4), ones(8, 4)))


def compiled(fun, *args):
    fun = fun if hasattr(fun, "lower") else jax.jit(fun)
    return fun.lower(*args).compile().as_text()


# Random sharded programs


def random_program(seed):
    """A chain of products, sums and moves over arrays that are cut anyhow."""
    random = np.random.default_rng(seed)
    specs = [P(), P("data"), P("model"), P(None, "model"), P("data", "model")]
    specs += [P(("data", "model")), P(None, "data")]

    def pick():
        return NamedSharding(MESH, specs[random.integers(len(specs))])

    operations = [
        lambda x, w: x @ w,
        lambda x, w: x - x.mean(0, keepdims=True),
        lambda x, w: x / (1 + jnp.abs(x).sum(1, keepdims=True)),
        lambda x, w: x.T,
        lambda x, w: jnp.roll(x, 1, 0),
        lambda x, w: jnp.sort(x, 0),
        lambda x, w: x[::-1] + w,
        lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0],
    ]
    steps = [(operations[random.integers(len(operations))], pick()) for _ in range(3)]

    def fun(x, w):
        for operation, sharding in steps:
            x = lax.with_sharding_constraint(operation(x, w), sharding)
        return x.sum() if seed % 3 == 0 else x

    if seed % 4 == 0:
        fun = jax.grad(lambda x, w, fun=fun: jnp.sum(fun(x, w) ** 2))
    return jax.jit(fun, in_shardings=(pick(), pick()))


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_send_what_their_text_says(seed):
    fun, args = random_program(seed), (ones(16, 16), ones(16, 16))
    report = sm.explain(fun)(*args)
    assert said(report) == moved(compiled(fun, *args))
    for each in report.collectives:
        assert each.source is not None
        assert f"{pathlib.Path(__file__).name}:" in each.source
        if each.kind != "collective-permute":
            sizes = dict(report.mesh)
            assert math.prod(sizes[name] for name in each.axes) in (
                each.group_size,
                1 if not each.axes else 0,
            )


def test_the_other_reading_sees_a_planted_lie():
    fun, args = random_program(1), (ones(16, 16), ones(16, 16))
    text = compiled(fun, *args)
    kind = re.search(rf"({KINDS})\(", text)[0]
    assert moved(text.replace(kind, f"planted-{kind}", 1)) != moved(text)
