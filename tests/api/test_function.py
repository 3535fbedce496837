"""What every mapped function can do, each feature for each of the three that map."""

import contextlib
import copy
import functools
import gc
import inspect
import logging
import pickle
import traceback
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.api.function import Mapped
from tests.api.kinds import KINDS, MESH, SHARDED, X, every_kind, mapped, shifted
from tests.command_line import python


@pytest.mark.few(1)
@every_kind
def test_is_called_and_is_one_class(kind):
    f = mapped(kind, shifted)
    assert isinstance(f, Mapped)
    result = f(X)
    np.testing.assert_array_equal(result, X + 1)
    assert result.sharding.is_equivalent_to(SHARDED, 1)
    for sharding in (jax.devices()[3], NamedSharding(MESH, P()), SHARDED):
        np.testing.assert_array_equal(f(jax.device_put(X, sharding)), X + 1)


@every_kind
def test_is_a_decorator_with_options(kind):
    @mapped(kind)
    def twice(x):
        return 2 * x

    np.testing.assert_array_equal(twice(X), 2 * X)
    assert twice.__name__ == "twice"


@every_kind
def test_is_told_by_its_name_and_docs(kind):
    f = mapped(kind, shifted)
    assert repr(f) == f"<{kind} of shifted>"
    assert (f.__name__, f.__doc__, f.__wrapped__) == ("shifted", "x, moved.", shifted)
    assert inspect.signature(f) == inspect.signature(shifted)
    decorated = functools.wraps(shifted)(lambda x: shifted(x))
    assert mapped(kind, decorated).__wrapped__ is decorated
    assert mapped(kind, f).__wrapped__ is f


@every_kind
def test_arguments_by_keyword(kind):
    f = mapped(kind, lambda x, by: x + by.max())
    # They are mapped along axis 0 by `spmap`, and whole for the others.
    expected = 2 * X if kind == "spmap" else X + 7
    for _ in range(2):
        np.testing.assert_array_equal(f(X, by=X), expected)
    np.testing.assert_array_equal(f.lower(X, by=X).compile()(X, by=X), expected)
    assert set(f.lower(X, by=X).in_specs[1]) == {"by"}


@pytest.mark.few(1)
@every_kind
def test_static_arguments(kind):
    @mapped(kind, static=1)
    def f(x, how):
        assert isinstance(how, str)
        return x + len(how)

    for how in ("a", "ab", "a"):
        np.testing.assert_array_equal(f(X, how), X + len(how))
    np.testing.assert_array_equal(f.lower(X, "abc").compile()(X), X + 3)
    assert f.lower(X, "a").in_specs[1] is None
    np.testing.assert_array_equal(jax.jit(lambda x: f(x, "ab"))(X), X + 2)
    with pytest.raises(ValueError, match=rf"Non-hashable .* {kind} of f: argument 1"):
        f(X, ["a"])


@every_kind
def test_what_is_static_is_not_donated(kind):
    with pytest.raises(ValueError, match=r"static.* and donate_\w+ cannot intersect"):
        mapped(kind, shifted, static=1, donate_argnums=(0, 1))


@every_kind
def test_is_a_method(kind):
    class Scaled:
        def __init__(self, scale):
            self.scale = scale

        @mapped(kind, static=0)
        def times(self, x):
            return self.scale * x

    one, two = Scaled(2), Scaled(3)
    np.testing.assert_array_equal(one.times(X), 2 * X)
    np.testing.assert_array_equal(two.times(X), 3 * X)
    assert isinstance(Scaled.times, Mapped)


@every_kind
def test_is_lowered_and_traced(kind):
    f = mapped(kind, shifted)
    spec = sm.ShardingSpec((sm.Chunked(8),), (sm.ShardedAxis(0),))
    lowered = f.lower(jax.ShapeDtypeStruct((8,), np.float32))
    assert isinstance(lowered, jax.stages.Lowered)
    assert (lowered.in_specs, lowered.out_specs) == ((spec,), spec)
    compiled = lowered.compile()
    for x in (X, jnp.asarray(X), jax.device_put(X, SHARDED)):
        np.testing.assert_array_equal(compiled(x), X + 1)
    with pytest.raises(ValueError, match="input sharding"):
        compiled(jax.device_put(X, jax.devices()[3]))
    traced = f.trace(X)
    assert isinstance(traced, jax.stages.Traced)
    assert traced.out_info.shape == (8,)
    np.testing.assert_array_equal(traced.lower().compile()(X), X + 1)


@every_kind
def test_is_explained(kind):
    report = mapped(kind, shifted).explain(X)
    assert report.num_devices == 8
    assert report.name == "shifted"


@every_kind
def test_is_pickled(kind):
    f = mapped(kind, lambda x: x + 1, donate_argnums=0)
    for read in (cloudpickle.loads(cloudpickle.dumps(f)), copy.deepcopy(f)):
        assert type(read) is type(f)
        x = jax.device_put(X, SHARDED) + 0
        np.testing.assert_array_equal(read(x), X + 1)
        assert x.is_deleted()
    refused = (AttributeError, pickle.PicklingError)
    with pytest.raises(refused, match=r"(?i)can't (get|pickle) .*<lambda>"):
        pickle.dumps(f)


@pytest.mark.few(1)
@every_kind
def test_is_transformed(kind):
    f = mapped(kind, lambda x: x * x)
    np.testing.assert_array_equal(jax.jit(f)(X), X * X)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), 2 * X)
    np.testing.assert_array_equal(jax.vmap(f)(np.stack([X, X])), [X * X, X * X])
    with jax.disable_jit():
        np.testing.assert_array_equal(f(X), X * X)
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(f(X), X * X)


@pytest.mark.parametrize("kind", [*KINDS, "plan"])
def test_a_leaked_tracer_is_told_as_by_jit(kind):
    leaked = []
    jax.jit(lambda x: leaked.append(x) or x)(1.0)

    def fun(x):
        return x + leaked[0]

    plan = functools.partial(sm.plan, fun, in_slices={0: 2})
    f = plan if kind == "plan" else mapped(kind, fun)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="unexpected tracer"):
        f(X)


# Memory, and how often


def test_a_level_of_nesting_costs_as_much_as_the_one_below(monkeypatch):
    made, init = [], Mapped.__init__

    def counted(self, *args):
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(Mapped, "__init__", counted)
    levels = [shifted]
    for k in range(40):
        levels.append(sm.spmap(levels[-1], f"a{k}"))
    assert len(made) == 40
    result = jax.eval_shape(levels[20], jax.ShapeDtypeStruct((2,) * 20, np.float32))
    assert result.ndim == 20
    assert len(made) < 40 + 20 * 40


@pytest.mark.usefixtures("young_heap")
@pytest.mark.few(1)
@every_kind
def test_is_freed_with_its_function(kind):
    def references():
        def fun(x):
            return x + 1

        f = mapped(kind, fun)
        f(X)
        f(jax.device_put(X, SHARDED))
        jax.grad(lambda x: mapped(kind, fun)(x).sum())(X)
        counted = Counted()
        mapped(kind, counted.method)(X)
        return weakref.ref(fun), weakref.ref(counted)

    function, owner = references()
    jax.clear_caches()
    gc.collect()
    assert (function(), owner()) == (None, None)


class Counted:
    """A function that counts how often it is run, and fails when asked to."""

    def __init__(self, error=None):
        self.runs = 0
        self.error = error

    def __call__(self, x):
        self.runs += 1
        if x.shape[-1:] in ((2,), (3,)) and self.error is not None:
            raise self.error("it is the user's")
        return x + 1

    def method(self, x):
        return self(x)


@pytest.mark.few(1)
@every_kind
def test_equal_calls_run_the_function_once(kind):
    counted = Counted()

    def fun(x):
        return counted(x)

    mapped(kind, fun)(X)
    assert counted.runs == 1
    for x in (X, jax.device_put(X, SHARDED), X + 1, jax.device_put(X)):
        mapped(kind, fun)(x)
    assert counted.runs == 1


@pytest.mark.few(3)
@every_kind
@pytest.mark.parametrize("is_set", [False, True], ids=["alone", "under set_mesh"])
def test_a_call_is_read_once(kind, is_set, monkeypatch):
    f = mapped(kind, lambda x: x + 1)
    reads = []
    read = type(f._transformed).trace_call

    def counting(self, args, *rest, **kwargs):
        reads.append(args)
        return read(self, args, *rest, **kwargs)

    monkeypatch.setattr(type(f._transformed), "trace_call", counting)
    with jax.set_mesh(MESH) if is_set else contextlib.nullcontext():
        for _ in range(3):
            f(X)
            assert len(reads) == 1
        del reads[:]
        f.lower(X)
        f.trace(X)
    assert len(reads) == 2


@every_kind
def test_a_users_error_is_raised_once_and_alone(kind):
    counted = Counted(TypeError)
    f = mapped(kind, lambda x: counted(x), **_ranks(kind))
    # The program for this one is tried first for what comes next.
    for _ in range(2):
        f(jax.device_put(X, SHARDED))
    counted.runs = 0
    with pytest.raises(TypeError, match="it is the user's") as raised:
        f(jax.device_put(np.ones((8, 2), np.float32), SHARDED))
    assert counted.runs == 1
    assert raised.value.__context__ is None
    assert raised.value.__cause__ is None
    told = "".join(traceback.format_exception(raised.value))
    assert "KeyError" not in told
    assert "During handling" not in told
    with pytest.raises(TypeError, match="it is the user's") as raised:
        f(np.ones((8, 3), np.float32))
    assert raised.value.__context__ is None
    # The map still works, and as fast.
    runs = counted.runs
    np.testing.assert_array_equal(f(X), X + 1)
    assert counted.runs == runs


def _ranks(kind):
    return (
        {"in_parts": None, "out_parts": None, "num_partitions": 8}
        if (kind == "sharded_jit")
        else {}
    )


@every_kind
def test_what_jax_is_told_anew_is_traced_anew(kind):
    f = mapped(kind, lambda x: x * 2)
    assert f(np.arange(8)).dtype == np.int32
    with jax.enable_x64(True):
        assert f(np.arange(8)).dtype == np.int64
    assert f(np.arange(8)).dtype == np.int32


@every_kind
def test_a_ready_call_under_another_configuration_is_traced_anew(kind):
    runs = []

    def fun(x):
        runs.append(x)
        return x + 1

    f, x = mapped(kind, fun), jax.device_put(X, SHARDED)
    for _ in range(3):
        f(x)
    before = len(runs)
    with jax.default_matmul_precision("highest"):
        f(x)
    assert len(runs) > before


@pytest.mark.parametrize("is_moved", [False, True])
def test_scalars_of_weak_and_of_other_types_in_turn(is_moved):
    def fun(x, by):
        return x.astype(np.int16 if jax.typeof(by).weak_type else np.int8)

    f = sm.spmap(fun, in_axes=(0, None))
    x = X if is_moved else jax.device_put(X, SHARDED)
    for by in (jnp.asarray(2), jnp.int32(2), 2, np.int32(2)) * 2:
        assert f(x, by).dtype == jax.jit(fun)(x, by).dtype


@every_kind
def test_one_line_for_each_compile(kind, caplog):
    f = mapped(kind, lambda x: x + 1)
    with caplog.at_level(logging.WARNING, logger="shardmap"), jax.log_compiles():
        for _ in range(2):
            f(X)
            f(np.ones(16, np.float32))
    lines = [m for m in caplog.messages if "shardmap: compiling" in m]
    assert len(lines) == 2
    axis = "_partitions0" if kind == "sharded_jit" else "i"
    assert lines[0] == (
        f"shardmap: compiling <lambda>: mesh {{'{axis}': 8}}, devices "
        "[0, 1, 2, 3, 4, 5, 6, 7], arguments (float32[8])"
    )


# Refusals


@every_kind
def test_what_cannot_be_called_is_refused(kind):
    with pytest.raises(TypeError, match=rf"{kind} expects a callable, but got 3"):
        mapped(kind, 3)


@every_kind
@pytest.mark.parametrize("positions", ["a", True, (0, 1.5)])
@pytest.mark.parametrize("parameter", ["static", "donate_argnums"])
def test_positions_that_are_no_ints_are_refused(kind, parameter, positions):
    named = {"static": r"static_\w+"}.get(parameter, parameter)
    with pytest.raises(TypeError, match=rf"{kind} {named} must be an int or several"):
        mapped(kind, shifted, **{parameter: positions})


@every_kind
def test_what_jax_cannot_compute_with_is_refused(kind):
    with pytest.raises(TypeError, match=rf"{kind} argument name of type .*str.*static"):
        mapped(kind, lambda name, x: x)("a", X)


@every_kind
def test_lowering_inside_another_map_is_refused_or_done(kind):
    inner = mapped(kind, lambda x: x)

    @sm.spmap
    def outer(x):
        inner.lower(x)
        return x

    if kind == "spmap":
        with pytest.raises(ValueError, match="cannot be lowered inside another map"):
            outer(np.ones((2, 8)))
    else:
        outer(np.ones((2, 8), np.float32))


FAILS = """
import os, traceback
import jax, numpy as np, shardmap as sm

def element(x):
    raise IndexError("of the user's")

mesh = sm.make_mesh({"i": 2})
for f in (
    sm.spmap(element),
    jax.jit(sm.spmap(element)),
    sm.spmap(element).lower,
    sm.mesh_map(element, mesh, {"i": 0}, {"i": 0}),
    sm.sharded_jit(element, (2,), (2,)),
    sm.spmap(element).explain,
    sm.explain(element),
    lambda x: sm.plan(element, x, in_slices={0: 2}),
    sm.chunked(element, {0: 2}),
    sm.chunked(element, {0: 2}).explain,
):
    try:
        f(np.ones(2))
    except IndexError as error:
        frames = traceback.extract_tb(error.__traceback__)
        package = os.path.dirname(sm.__file__)
        print([frame.filename.startswith(package) for frame in frames])
"""


def test_an_error_of_the_user_has_at_most_one_frame_of_ours():
    result = python(
        "-c", FAILS, JAX_NUM_CPU_DEVICES="2", JAX_TRACEBACK_FILTERING="auto"
    )
    assert result.returncode == 0, result.stderr
    lines = [eval(line) for line in result.stdout.splitlines()]
    assert len(lines) == 10
    assert all(sum(ours) <= 1 and not ours[-1] for ours in lines)


def test_keyword_arguments_of_any_name():
    def fun(x, *, self, name, program, calls_host):
        return x / jax.lax.psum(self + name + program + calls_host, "i")

    x = np.arange(8, dtype=np.float32)
    named = dict.fromkeys(["self", "name", "program", "calls_host"], x)
    for _ in range(2):
        np.testing.assert_allclose(sm.spmap(fun, "i")(x, **named), x / 112)
