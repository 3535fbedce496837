"""A population of models, each trained on shared data: `python examples/population.py`.

Eight classifiers of handwritten digits have different initial parameters and learning
rates. Two nested maps share a mesh of 4 x 2 devices: the outer map is over the members
of the population, two on each row of the mesh, and the inner map over the shares of a
batch, one on each column. At the end the members vote, which is a sum over them.

The reference is `jax.vmap` in place of both maps, on one device.

JAX makes eight virtual devices of the CPU, so this runs anywhere.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm

MEMBERS = 8
MESH = {"member": 4, "data": 2}
BATCH = 128
HELD_OUT = 360
LEAST_ACCURACY = 0.93
LARGEST_DIFFERENCE = 1e-5


class Member(NamedTuple):
    """One model: its parameters and how fast it learns."""

    params: Any
    rate: jax.Array


def new_member(key: jax.Array, rate: jax.Array) -> Member:
    keys = jax.random.split(key)
    params = {
        "hidden": jax.random.normal(keys[0], (64, 64)) / 8,
        "output": jax.random.normal(keys[1], (64, 10)) / 8,
    }
    return Member(params, rate)


def log_probabilities(params: Any, images: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(jnp.tanh(images @ params["hidden"]) @ params["output"])


def train_step(member: Member, images: jax.Array, labels: jax.Array) -> Member:
    """One step of one member on one share of a batch: images (64, 64), labels (64,)."""

    def loss_function(params: Any) -> jax.Array:
        log_p = log_probabilities(params, images)
        return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()

    grads = lax.pmean(jax.grad(loss_function)(member.params), "data")
    params = jax.tree.map(lambda p, g: p - member.rate * g, member.params, grads)
    return Member(params, member.rate)


def vote(member: Member, images: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The predictions of one member, and of all members together."""
    log_p = log_probabilities(member.params, images)
    everyone = lax.psum(jnp.exp(log_p), "member")
    return log_p.argmax(-1), everyone.argmax(-1)


def population_of(
    over_members: Callable[..., Any], over_data: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`train_step` and `vote` of a population. The two arguments are maps."""
    step = over_data(train_step, axis_name="data", in_axes=(None, 0, 0), out_axes=None)
    steps = over_members(step, axis_name="member", in_axes=(0, None, None))
    votes = over_members(
        vote, axis_name="member", in_axes=(0, None), out_axes=(0, None)
    )
    return steps, votes


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 64 pixels between 0 and 1, shuffled; their digits."""
    from sklearn.datasets import load_digits  # The diagrams of the docs do without.

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)


def batches(
    images: np.ndarray, labels: np.ndarray, steps: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (2, 64, 64) images and (2, 64) labels."""
    rng = np.random.default_rng(1)
    for _ in range(steps):
        chosen = rng.integers(len(images), size=(MESH["data"], BATCH // MESH["data"]))
        yield images[chosen], labels[chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; the exit code is 0 when both checks at its end hold."""
    parser = argparse.ArgumentParser(description="A population on a mesh of 4 x 2.")
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args(arguments)

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", MESH["member"] * MESH["data"])

    mesh = sm.make_mesh(MESH)
    train, vote_of = population_of(
        functools.partial(sm.spmap, mesh=mesh, mesh_axes="member"),
        functools.partial(sm.spmap, mesh=mesh, mesh_axes="data"),
    )
    train_on_one_device = jax.jit(population_of(jax.vmap, jax.vmap)[0])

    keys = jax.random.split(jax.random.key(0), MEMBERS)
    members = jax.vmap(new_member)(keys, jnp.geomspace(0.03, 1.0, MEMBERS))
    images, labels = load_images()
    held_out, held_out_labels = images[:HELD_OUT], labels[:HELD_OUT]
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]

    batch = next(batches(images, labels, 1))
    specs = train.lower(members, *batch).in_specs
    print(f"hidden weights: {specs[0].params['hidden']}")
    print(f"images:         {specs[1]}")

    reference, difference = members, 0.0
    for number, batch in enumerate(batches(images, labels, options.steps)):
        members = train(members, *batch)
        if number < 20:
            reference = train_on_one_device(reference, *batch)
            difference = max(
                float(np.max(np.abs(np.asarray(ours) - np.asarray(theirs))))
                for ours, theirs in zip(
                    jax.tree.leaves(members), jax.tree.leaves(reference), strict=True
                )
            )

    alone, together = vote_of(members, held_out)
    right = np.mean(np.asarray(alone) == held_out_labels, axis=1)
    for rate, accuracy in zip(np.asarray(members.rate), right, strict=True):
        print(f"rate {rate:.3f}: held-out accuracy {accuracy:.3f}")
    accuracy = float(np.mean(np.asarray(together) == held_out_labels))
    print(f"all of them together: {accuracy:.3f}, at least {LEAST_ACCURACY} wanted")
    print(
        f"after 20 steps it differs by {difference:.1e} from one device's, "
        f"less than {LARGEST_DIFFERENCE:.0e} wanted"
    )
    return 0 if accuracy >= LEAST_ACCURACY and difference < LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
