"""Data-parallel training with flax and optax: `python examples/data_parallel.py`.

A convolutional network learns the handwritten digits of scikit-learn. `spmap` maps
`train_step` over the first axis of a batch: every device has a share of the images, and
`lax.pmean` averages the gradients. `nn.BatchNorm` gets the name of the axis, so it
normalises by the whole batch.

The reference is `jax.vmap` of the same step, on one device.

JAX makes eight virtual devices of the CPU, so this runs anywhere.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

import shardmap as sm

DEVICES = 8
IMAGES_PER_DEVICE = 16
HELD_OUT = 360
LEAST_ACCURACY = 0.95
LARGEST_DIFFERENCE = 1e-5


class Network(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False)(images)
        x = nn.BatchNorm(not train, momentum=0.9, axis_name="batch")(x)
        x = nn.relu(x)
        x = nn.Conv(32, (3, 3), strides=(2, 2))(x)
        x = nn.relu(x).reshape(len(images), -1)
        return nn.Dense(10)(x)


class State(NamedTuple):
    """The state of the training: parameters, statistics and optimizer."""

    params: Any
    batch_stats: Any
    opt_state: Any


network = Network()
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


def initial_state() -> State:
    images = jnp.zeros((1, 8, 8, 1))
    variables = jax.jit(network.init, static_argnums=2)(
        jax.random.key(0), images, False
    )
    params = variables["params"]
    return State(params, variables["batch_stats"], optimizer.init(params))


def train_step(
    state: State, images: jax.Array, labels: jax.Array
) -> tuple[State, jax.Array]:
    """One step on a device's share: images (16, 8, 8, 1), labels (16,)."""

    def loss_function(params: Any) -> tuple[jax.Array, Any]:
        logits, updates = network.apply(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            True,
            mutable="batch_stats",
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, updates["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_function, has_aux=True)(
        state.params
    )
    loss, grads, batch_stats = lax.pmean((loss, grads, batch_stats), "batch")
    updates, opt_state = optimizer.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return State(params, batch_stats, opt_state), loss


axes = dict(axis_name="batch", in_axes=(None, 0, 0), out_axes=None)
train_step_on_devices = sm.spmap(train_step, **axes)
train_step_on_one_device = jax.jit(jax.vmap(train_step, **axes))


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images (8, 8, 1), shuffled, pixels between 0 and 1; their digits."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = images.reshape(-1, 8, 8, 1)[order] / 16
    return images.astype(np.float32), labels[order].astype(np.int32)


def batches(
    images: np.ndarray, labels: np.ndarray, epochs: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (8, 16, 8, 8, 1) images and (8, 16) labels, in random order each epoch."""
    rng = np.random.default_rng(1)
    size = DEVICES * IMAGES_PER_DEVICE
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - size + 1, size):
            chosen = order[start : start + size].reshape(DEVICES, IMAGES_PER_DEVICE)
            yield images[chosen], labels[chosen]


@jax.jit
def predict(state: State, images: jax.Array) -> jax.Array:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return network.apply(variables, images, False).argmax(-1)


def largest_difference(tree: Any, other: Any) -> float:
    differences = jax.tree.map(
        lambda a, b: np.max(np.abs(np.asarray(a) - np.asarray(b))), tree, other
    )
    return float(max(jax.tree.leaves(differences)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; the exit code is 0 when both checks at its end hold."""
    parser = argparse.ArgumentParser(description="Data-parallel training on 8 devices.")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the data")
    options = parser.parse_args(arguments)

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)

    images, labels = load_images()
    held_out, held_out_labels = images[:HELD_OUT], labels[:HELD_OUT]
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]

    # The first steps are taken on one device too. Later ones would differ: training
    # amplifies what is rounded otherwise.
    state = reference = initial_state()
    difference = 0.0
    for number, batch in enumerate(batches(images, labels, options.epochs)):
        state, loss = train_step_on_devices(state, *batch)
        if number < 3:
            reference, _ = train_step_on_one_device(reference, *batch)
            difference = max(difference, largest_difference(state, reference))
        if number % 20 == 0:
            print(f"step {number:3}: loss {loss:.4f}", flush=True)

    predicted = predict(state, held_out)
    accuracy = float(np.mean(np.asarray(predicted) == held_out_labels))
    print(f"held-out accuracy {accuracy:.3f}, at least {LEAST_ACCURACY} wanted")
    print(
        f"in 3 steps the state differs by {difference:.1e} from one device's, "
        f"less than {LARGEST_DIFFERENCE:.0e} wanted"
    )
    return 0 if accuracy >= LEAST_ACCURACY and difference < LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
