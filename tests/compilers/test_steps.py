"""What is said of training steps is what can be counted on paper."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.compilers import steps
from tests.compilers.steps import BATCH, HIDDEN, LAYERS, LENGTH, WEIGHTS, WIDTH

MACHINES = ("v5e:4x4", "v5p:2x2x2", "v6e:2x4", "h100:8", "h100:4x8")
MODEL = 4
# Of a layer, forward.
PROJECTIONS = 2 * BATCH * LENGTH * (4 * WIDTH**2 + 2 * WIDTH * HIDDEN)
ATTENTION = 2 * 2 * BATCH * LENGTH**2 * WIDTH
# Forward, again without the last product, and twice as much backward.
PRODUCTS = LAYERS * (
    4 * (PROJECTIONS + ATTENTION) - 2 * BATCH * LENGTH * WIDTH * HIDDEN
)
GRADIENTS = 2 * WEIGHTS  # Bytes: XLA sums bfloat16, and then converts.


def sent(step, count):
    """The bytes that a device sends, at least and at most, of ``count`` devices."""
    if step is steps.DATA:
        bytes_ = 2 * (count - 1) / count * GRADIENTS
        return bytes_, bytes_
    if step is steps.FULLY:
        # Weights are gathered forward and backward, gradients summed and scattered.
        bytes_ = 3 * (count - 1) / count * GRADIENTS
        # Where a product runs meanwhile, parts go around both ways, up to twice more
        # than there are other devices; and a sum may come to all devices.
        return bytes_, max(1.2, (count + 1) / (count - 1)) * bytes_
    data = count // MODEL
    values = BATCH // data * LENGTH * WIDTH * 2 * (MODEL - 1) / MODEL
    slopes = 2 * (data - 1) / data * GRADIENTS / MODEL
    # Before and after both halves of a layer, forward and backward, and all but the
    # last again; XLA may keep one that was gathered.
    return slopes + 10 * LAYERS * values, slopes + 11 * LAYERS * values


@pytest.mark.parametrize("name", ["DATA", "FULLY", "MEGATRON"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_training_step_is_told_as_on_paper(machine, name):
    step, devices = getattr(steps, name), sm.devices(machine)
    count = len(devices)
    sizes = (count // MODEL, MODEL) if step is steps.MEGATRON else (count,)
    fun, *arguments = steps.program(step, devices, sizes)
    report = sm.explain(fun)(*arguments)
    # Also sums and products of elements.
    assert 0.995 * PRODUCTS <= report.cost.flops * count <= 1.025 * PRODUCTS
    least, most = sent(step, count)
    assert 0.99 * least <= report.sent_bytes <= 1.01 * most
    for each in report.collectives:
        assert each.count is not None
        assert each.axes
        assert {*each.axes} <= {*step.axes}
        assert each.source.startswith("tests/compilers/steps.py:")
        assert (each.cause or "").startswith("expected"), each
        assert each.advice is None
    weights = [each for each in report.collectives if "weights" in each.cause]
    assert bool(weights) == (step is steps.FULLY)
    again = [each for each in report.remarks if "jax.checkpoint" in each.text]
    assert bool(again) == (step is steps.MEGATRON)
    # Memory: what is there is never more than the peak, which arguments are part of.
    assert report.fits
    held = sum(each.bytes for each in report.largest)
    assert held <= report.peak_bytes - report.cost.argument_bytes + (
        report.cost.donated_bytes or 0
    )
    assert report.cost.argument_bytes > 4 * WEIGHTS / count
    # Only TPUs' compilers estimate cycles.
    shares = [share for _, share in report.busiest]
    assert bool(shares) == machine.startswith("v")
    assert 0.5 * bool(shares) < sum(shares) <= 1 or not shares


def test_a_sum_of_which_each_device_keeps_a_part_is_remarked():
    """XLA for GPUs scatters no sum that is transposed before it is cut."""
    mesh = sm.make_mesh({"data": 8}, devices=sm.devices("h100:8"))
    rows, heads = (
        NamedSharding(mesh, P(*names)) for names in (["data"], [None, "data"])
    )
    x, y = (
        jax.ShapeDtypeStruct((4096, n), jnp.float32, sharding=rows) for n in (512, 1024)
    )

    def gradient(x, y):
        return lax.with_sharding_constraint((x.T @ y).T.reshape(8, 128, 512), heads)

    report = sm.explain(jax.jit(gradient))(x, y)
    (sent,) = report.collectives
    assert (sent.kind, sent.advice) == ("all-reduce", None)
    assert sent.cause.endswith("of which each device then keeps a part")
    (remark,) = report.remarks
    assert remark.text == (
        "3.5 MiB a step are sent for a sum of which each device keeps a part"
    )
    assert "A reduce-scatter sends half" in remark.advice
