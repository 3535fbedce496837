"""Programs over several devices take turns: who is told what, and what may hang."""

import _thread
import queue
import textwrap
import threading

import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.api.kinds import every_kind, mapped
from tests.command_line import python

EIGHT = np.arange(8, dtype=np.float32)
ROWS = np.ones(8, np.float32)
CALLBACK = """
import faulthandler, sys
faulthandler.dump_traceback_later(100, exit=True)
import jax, numpy as np, shardmap as sm
from jax import lax

rows = np.ones(4, np.float32)
total = sm.spmap(lambda x: lax.psum(x, "i"), "i")
total(rows)

def host(x):
    try:
        total(rows)
    except RuntimeError as error:
        print(error, flush=True)
    return np.asarray(x)

kinds = {
    "tap": lambda x: sm.tap(host, x),
    "debug": lambda x: (jax.debug.callback(host, x), x)[1],
    "pure": lambda x: jax.pure_callback(host, x, x, vmap_method="sequential"),
}
for kind, call in kinds.items():
    def body(x):
        return lax.psum(call(x), "j")

    print(kind, sm.spmap(body, "j")(rows[:2]), flush=True)
    sm.taps_barrier()
    jax.effects_barrier()
    print(total(rows), flush=True)

# Without collectives, the callbacks of both devices keep all threads of the pool.
alone = np.asarray(sm.spmap(lambda x: kinds["tap"](x) + 1)(rows[:2]))
print("alone", alone, flush=True)
sm.taps_barrier()
"""


@pytest.mark.deep
def test_a_callback_that_needs_the_turn_of_its_own_program_is_told():
    result = python(
        *("-c", CALLBACK),
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        JAX_PLATFORMS="cpu",
    )
    assert result.returncode == 0, result.stderr
    told = (
        "<lambda> is called by a callback on the host while body runs: on CPU runs "
        "with collectives take turns"
    )
    # Both devices may print at once.
    assert result.stdout.count(told) == 6
    assert result.stdout.count("a callback on the host while a program runs") == 2
    assert "alone [2. 2.]" in result.stdout
    for kind in ("tap", "debug", "pure"):
        assert f"{kind} [2. 2.]" in result.stdout
    assert result.stdout.count("[4. 4. 4. 4.]\n") == 3


def test_a_thread_that_python_did_not_start_waits_for_its_turn():
    total = sm.spmap(lambda x: lax.psum(x, "i"), "i")
    expected = total(ROWS)
    started, go, results = threading.Event(), threading.Event(), queue.Queue()

    def host(x):
        started.set()
        go.wait(60)
        return x

    def waiting(x):
        x = jax.pure_callback(host, x, x, vmap_method="sequential")
        return lax.psum(x, "i")

    def foreign():
        try:
            results.put(total(ROWS))
        except RuntimeError as error:
            results.put(error)

    holder = threading.Thread(target=sm.spmap(waiting, "i"), args=(ROWS[:2],))
    holder.start()
    assert started.wait(60)
    _thread.start_new_thread(foreign, ())
    with pytest.raises(queue.Empty, match=r"^$"):
        results.get(timeout=0.5)
    go.set()
    np.testing.assert_array_equal(results.get(timeout=60), expected)
    holder.join(60)


def test_turns_are_taken_under_the_mesh_that_is_set():
    total = sm.spmap(lambda x: lax.psum(x, "i"), "i")
    one, eight = sm.make_mesh({"a": 1}), sm.make_mesh({"a": 8})
    with jax.set_mesh(one):
        total(ROWS)
    told = []

    def host(x):
        try:
            with jax.set_mesh(eight):
                total(ROWS)
        except RuntimeError as error:
            told.append(str(error))
        return x

    def body(x):
        return lax.psum(jax.pure_callback(host, x, x, vmap_method="sequential"), "i")

    sm.spmap(body, "i")(ROWS[:2])
    assert len(told) == 2
    assert "is called by a callback on the host while body runs" in told[0]


@every_kind
def test_a_program_without_collectives_takes_no_turn(kind):
    started, go, results = threading.Event(), threading.Event(), []

    def host(x):
        started.set()
        go.wait(60)
        return x

    def waiting(x):
        x = jax.pure_callback(host, x, x, vmap_method="sequential")
        return lax.psum(x, "i")

    alone = mapped(kind, lambda x: x + 1)
    others = (
        lambda: results.append(sm.spmap(waiting, "i")(EIGHT[:2])),
        lambda: results.append(alone(EIGHT)),
    )
    holder, free = (threading.Thread(target=run, daemon=True) for run in others)
    holder.start()
    assert started.wait(60)
    free.start()
    free.join(20)
    first = len(results)
    go.set()
    holder.join(60)
    assert first == 1
    np.testing.assert_array_equal(results[0], EIGHT + 1)


@pytest.mark.parametrize("place", ["argument", "closed over", "one device"])
def test_chunked_takes_its_turn_where_arrays_are_on_several_devices(place):
    rows = np.arange(64, dtype=np.float32).reshape(8, 8)
    cut = jax.device_put(rows, sm.pmap_sharding(rows.shape))
    other = cut if place == "closed over" else rows
    run = sm.chunked(lambda x: x - other.mean(0, keepdims=True), {0: 4})
    x = cut if place == "argument" else rows
    started, go, results = threading.Event(), threading.Event(), queue.Queue()

    def host(x):
        started.set()
        go.wait(60)
        return x

    def waiting(x):
        x = jax.pure_callback(host, x, x, vmap_method="sequential")
        return lax.psum(x, "i")

    holder = threading.Thread(target=sm.spmap(waiting, "i"), args=(EIGHT[:2],))
    holder.start()
    assert started.wait(60)
    threading.Thread(target=lambda: results.put(run(x)), daemon=True).start()
    if place != "one device":
        with pytest.raises(queue.Empty, match=r"^$"):
            results.get(timeout=3)
        go.set()
    expected = rows - rows.mean(0, keepdims=True)
    np.testing.assert_allclose(results.get(timeout=60), expected)
    go.set()
    holder.join(60)


def assert_runs_to_its_end(program, timeout):
    result = python("-c", textwrap.dedent(program), timeout=timeout, without=())
    assert result.stdout == "ran to the end\n", result.stderr[-2000:]


def test_many_collectives_in_flight_do_not_hang():
    assert_runs_to_its_end(
        """
        import jax, jax.numpy as jnp, numpy as np, shardmap as sm
        from jax import lax

        @sm.spmap(axis_name="i")
        def step(x):
            parts = [lax.psum(x * k, "i") for k in range(8)]
            moved = [lax.ppermute(x + k, "i", [(j, (j + 1) % 8) for j in range(8)])
                     for k in range(8)]
            return sum(lax.all_gather(m, "i").sum(0) for m in moved) + sum(parts)

        x = np.ones((8, 64), np.float32) / 1e6
        for _ in range(8):
            results = [step(x + k) for k in range(20)]
            jax.block_until_ready(results)
        print("ran to the end")
        """,
        timeout=240,
    )


@pytest.mark.deep
def test_chunked_in_many_threads_does_not_hang():
    """Without turns, the first calls do, and jaxlib ends the process."""
    assert_runs_to_its_end(
        """
        from concurrent.futures import ThreadPoolExecutor
        import jax, numpy as np, shardmap as sm

        mesh = jax.sharding.Mesh(jax.devices(), "i")
        cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        x = jax.device_put(np.ones((64, 32), np.float32), cut)
        apart = lambda x: x.mean(0, keepdims=True) - (x @ x.T).sum(0)[:, None]
        run = sm.chunked(apart, {0: 4})
        with ThreadPoolExecutor(16) as pool:
            for results in pool.map(lambda _: [run(x) for _ in range(40)], range(16)):
                np.testing.assert_array_equal(results[-1], np.full((64, 32), -2047))
        print("ran to the end")
        """,
        timeout=120,
    )


@pytest.mark.deep
def test_steps_of_a_loop_do_not_hang_on_a_busy_machine():
    """Without turns, this hangs for good in the first seconds, jax.pmap's too."""
    assert_runs_to_its_end(
        """
        import multiprocessing, os
        import jax, numpy as np, shardmap as sm
        from jax import lax

        def spin(parent):
            while os.getppid() == parent:
                pass

        @sm.spmap(axis_name="i")
        def step(w, x):
            w = w - lax.pmean(x @ (x.T @ w), "i") / 1e3
            return w, lax.pmean(w.sum(), "i")

        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            busy = [
                context.Process(target=spin, args=(os.getpid(),), daemon=True)
                for _ in range(6)
            ]
            for process in busy:
                process.start()
            x = np.ones((8, 16, 3), np.float32)
            for _ in range(25):
                w = np.ones((8, 16), np.float32)
                for _ in range(60):
                    w, total = step(w, x)
                w.block_until_ready()
            for process in busy:
                process.kill()
            print("ran to the end")
        """,
        timeout=240,
    )


def test_the_next_run_waits_for_one_that_was_interrupted(monkeypatch):
    """Otherwise both are in flight, and may wait for each other for good."""
    first = sm.spmap(lambda x: lax.psum(x, "i"), "i")
    second = sm.spmap(lambda x: 2 * lax.psum(x, "i"), "i")
    expected = first(ROWS), second(ROWS)
    wait, waited = jax.block_until_ready, []

    def interrupted(results):
        monkeypatch.setattr(jax, "block_until_ready", noted)
        raise KeyboardInterrupt

    def noted(results):
        waited.append(results)
        return wait(results)

    monkeypatch.setattr(jax, "block_until_ready", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        first(ROWS)
    for _ in range(2):
        np.testing.assert_array_equal(second(ROWS), expected[1])
    # Once for the first map, and for each of the two runs.
    np.testing.assert_array_equal(waited, [expected[0], expected[1], expected[1]])
