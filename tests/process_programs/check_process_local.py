"""Each process passes process-local data and gets such back."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from world import (
    DEVICES,
    LOCAL,
    PROCESS,
    PROCESSES,
    centered,
    equal,
    equal_global,
    numbers,
    on_all_devices,
    on_own_devices,
    own,
    pointers,
    refused,
)

import shardmap as sm
from shardmap.arrays import process_local

# Process-local data in and out


def check_rows_in_rows_out():
    whole, mine = numbers(LOCAL, 3)
    y = sm.spmap(centered, "i")(mine)
    assert y.is_fully_addressable
    assert y.sharding.device_set == set(jax.local_devices())
    equal(y, own(whole - whole.mean(0)))


def check_results_are_arguments_again():
    whole, mine = numbers(LOCAL, 3)
    step = sm.spmap(lambda x: x + lax.psum(x, "i"), "i")
    x, expected = mine, whole
    for _ in range(3):
        x, expected = step(x), expected + expected.sum(0)
    equal(x, own(expected))


def check_index_and_size_are_global():
    def place(x):
        return lax.axis_index("i"), lax.axis_size("i"), lax.psum(1, "i")

    index, size, count = sm.spmap(place, "i")(np.zeros(LOCAL))
    equal(index, PROCESS * LOCAL + np.arange(LOCAL))
    equal(size, np.full(LOCAL, DEVICES))
    equal(count, np.full(LOCAL, DEVICES))


def check_collectives():
    whole, mine = numbers(LOCAL, DEVICES, 2)

    def body(x):
        n = lax.axis_size("i")
        turn = [(k, (k + 1) % n) for k in range(n)]
        return (
            lax.pmax(x, "i"),
            lax.all_gather(x, "i"),
            lax.ppermute(x, "i", turn),
            lax.all_to_all(x, "i", 0, 0),
            lax.psum_scatter(x, "i"),
        )

    expected = jax.vmap(body, axis_name="i")(whole)
    for result, reference in zip(sm.spmap(body, "i")(mine), expected, strict=True):
        equal(result, own(np.asarray(reference)))


def check_pytrees_axes_keywords_and_statics():
    whole, mine = numbers(LOCAL, 3)
    across = np.moveaxis(mine, 0, 1)

    def body(a, power, w, *, k):
        return {"y": a["x"] ** power * w + k, "m": lax.pmean(k, "i")}

    mapped = sm.spmap(
        body,
        "i",
        in_axes=({"x": 1}, None, None),
        out_axes={"y": 1, "m": None},
        static_broadcasted_argnums=1,
    )
    for power in (1, 2, 1):
        out = mapped({"x": across}, power, 2.0, k=mine)
        equal(out["y"], np.moveaxis(mine**power * 2 + mine, 0, 1))
        equal(out["m"], whole.mean(0))
        assert out["m"].is_fully_addressable


def check_scalars_stay_weak():
    mapped = sm.spmap(lambda x, s: x * s, in_axes=(0, None))
    for scalar in (2, jnp.asarray(2)):
        assert mapped(np.ones(LOCAL, np.int8), scalar).dtype == np.int8


def check_random_keys():
    keys = jax.random.split(jax.random.key(0), DEVICES)
    expected = jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)
    mine = jax.random.wrap_key_data(own(np.asarray(jax.random.key_data(keys))))

    def body(key):
        key, again = jax.random.split(key)
        return key, jax.random.key_data(again)

    equal(
        sm.spmap(lambda k: jax.random.normal(k, (3,)))(mine), own(np.asarray(expected))
    )
    key, again = sm.spmap(body)(mine)
    reference = jax.vmap(body)(mine)
    equal(jax.random.key_data(key), jax.random.key_data(reference[0]))
    equal(again, reference[1])


def check_closures():
    whole, mine = numbers(LOCAL, 3)
    w = jnp.arange(3.0)
    mapped = sm.spmap(lambda x: centered(x) * w, "i")
    equal(mapped(mine), own((whole - whole.mean(0)) * np.arange(3.0)))
    x = on_all_devices(whole)
    by_w = jax.grad(lambda w, x: sm.spmap(lambda x: jnp.sum(x * w))(x).sum())
    by_w = jax.jit(by_w)(w, x)
    equal_global(by_w, whole.sum(0))


def check_no_arrays():
    assert sm.spmap(lambda: (), axis_size=DEVICES)() == ()
    out = sm.spmap(lambda x: jnp.zeros((0,)))(np.ones(LOCAL))
    assert out.shape == (LOCAL, 0)


def check_soft_and_ragged_rows():
    for count in (1, LOCAL, 2 * LOCAL, 3 * LOCAL, 3, 5):
        whole, mine = numbers(count, 2)

        def body(x):
            return centered(x) + lax.axis_index("i").astype(x.dtype)

        expected = jax.vmap(body, axis_name="i")(whole)
        y = sm.spmap(body, "i")(mine)
        equal(y, own(np.asarray(expected)))
        assert y.is_fully_addressable


def check_batch_size():
    whole, mine = numbers(4 * LOCAL, 2)
    y = sm.spmap(lambda x: lax.psum(x, "i"), "i", batch_size=2)(mine)
    equal(y, own(np.tile(whole.sum(0), (len(whole), 1))))


def check_the_spmd_lowering():
    whole, mine = numbers(LOCAL, 2)
    equal(sm.spmap(centered, "i", lowering="spmd")(mine), own(whole - whole.mean(0)))


def check_no_mapped_argument():
    mapped = sm.spmap(lambda: lax.axis_index("i"), "i", axis_size=DEVICES)
    equal(mapped(), PROCESS * LOCAL + np.arange(LOCAL))


def check_axis_size_counts_all_elements():
    mapped = sm.spmap(centered, "i", axis_size=DEVICES)
    equal(mapped(np.ones(LOCAL)), np.zeros(LOCAL))
    refused(
        ValueError,
        f"spmap got axis_size {DEVICES}, which counts the elements on all processes, "
        f"but {DEVICES} on each of {PROCESSES} are {DEVICES * PROCESSES}",
        mapped,
        np.ones(DEVICES),
    )


def check_devices():
    backwards = [
        device
        for process in range(PROCESSES)
        for device in reversed(jax.local_devices(process))
    ]
    mapped = sm.spmap(centered, "i", devices=backwards)
    whole, mine = numbers(LOCAL)
    y = mapped(mine)
    equal(y, own(whole - whole.mean(0)))
    assert y.addressable_shards[0].device == jax.local_devices()[-1]


def check_a_local_map_runs_alone():
    local = sm.spmap(centered, "i", devices=jax.local_devices())
    if PROCESS == 0:
        _, mine = numbers(LOCAL, 3)
        equal(local(mine), mine - mine.mean(0))


def check_devices_out_of_order_are_refused():
    if LOCAL > 1:
        refused(
            ValueError,
            "equally many devices, which stand together",
            sm.spmap(centered, "i", devices=sorted(jax.devices(), key=_last_first)),
            np.ones(LOCAL),
        )
    others = [d for d in jax.devices() if d.process_index != PROCESS]
    refused(
        ValueError,
        f"process {PROCESS} has none of these devices",
        sm.spmap(centered, "i", devices=others),
        np.ones(LOCAL),
    )


def _last_first(device):
    return jax.local_devices(device.process_index).index(device), device.id


# No copies


def check_rows_and_the_whole_are_the_same_buffers():
    x = on_own_devices(numbers(LOCAL, 1024)[1])
    mesh = sm.make_mesh({"i": DEVICES}, jax.devices())
    layout = process_local.shardings_along(NamedSharding(mesh, P("i")), 0, PROCESSES)
    whole = process_local.to_global(x, layout)
    assert whole.shape == (DEVICES, 1024)
    assert pointers(whole) == pointers(x)
    own_again = process_local.to_local(whole, layout)
    assert pointers(own_again) == pointers(x)


def check_a_donated_buffer_is_the_result():
    step = sm.spmap(lambda x: x + 1, donate_argnums=0)
    x = on_own_devices(numbers(LOCAL, 1024)[1])
    for _ in range(3):
        before = pointers(x)
        x = step(x)
        assert pointers(x) == before


def check_lower_and_compile():
    whole, mine = numbers(LOCAL, 3)
    lowered = sm.spmap(centered, "i").lower(mine)
    assert str(lowered.in_specs[0]) == (
        f"ShardingSpec((Chunked(({DEVICES},)), None), (ShardedAxis(0),))"
    )
    compiled = lowered.compile()
    y = compiled(on_all_devices(whole))
    equal(y.addressable_data(0), own(whole - whole.mean(0))[:1])
    assert isinstance(compiled, jax.stages.Compiled)
    assert "all-reduce" in compiled.as_text()
    refused(TypeError, "compiled with", compiled, mine)
    traced = sm.spmap(centered, "i").trace(mine)
    assert traced.jaxpr.in_avals[0].shape == whole.shape
