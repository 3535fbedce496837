"""Train a classifier of handwritten digits on eight devices: `python -m shardmap demo`.

The eight devices are virtual: JAX splits the CPU into eight, so this runs anywhere.
Every training step is one call of `train_step`, which `spmap` maps over the first axis
of a batch: each device takes one eighth of the digits, and `lax.pmean` averages the
gradients. The same steps also run on one device, without a map, and the resulting
parameters are compared.

Read this file from the top; it is a whole program.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm
from shardmap.commands.cpu_threads import enough_threads
from shardmap.commands.parsing import Parser
from shardmap.explaining.draw.text import picture

DEVICES = 8
DIGITS_PER_DEVICE = 16
HELD_OUT = 360
LEAST_ACCURACY = 0.95
LARGEST_DIFFERENCE = 1e-5


# The model: two layers, trained by gradient descent with momentum.


Digits = jax.Array | np.ndarray


class State(NamedTuple):
    """The state that a training step reads and replaces."""

    params: Any
    momentum: Any


def initial_state(seed: int = 0, hidden: int = 128) -> State:
    keys = jax.random.split(jax.random.key(seed))
    params = {
        "hidden": _initial_layer(keys[0], 64, hidden),
        "output": _initial_layer(keys[1], hidden, 10),
    }
    return State(params, jax.tree.map(jnp.zeros_like, params))


def _initial_layer(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    weights = jax.random.normal(key, (inputs, outputs)) * np.sqrt(2 / inputs)
    return {"weights": weights, "bias": jnp.zeros(outputs)}


def predict(params: Any, images: Digits) -> jax.Array:
    """The log-probability of each digit, for images of shape (number, 64)."""
    hidden = images @ params["hidden"]["weights"] + params["hidden"]["bias"]
    output = jnp.tanh(hidden) @ params["output"]["weights"] + params["output"]["bias"]
    return jax.nn.log_softmax(output)


def loss_function(params: Any, images: Digits, labels: Digits) -> jax.Array:
    right = jnp.take_along_axis(predict(params, images), labels[:, None], axis=1)
    return -jnp.mean(right)


def descend(state: State, grads: Any, rate: float = 0.1, decay: float = 0.9) -> State:
    momentum = jax.tree.map(lambda m, g: decay * m + g, state.momentum, grads)
    params = jax.tree.map(lambda p, m: p - rate * m, state.params, momentum)
    return State(params, momentum)


# The training step, for eight devices and for one.


@sm.spmap(axis_name="batch", in_axes=(None, 0, 0), out_axes=None)
def train_step(state: State, images: Digits, labels: Digits) -> tuple[State, jax.Array]:
    """One step on one device's share of the batch: images (16, 64), labels (16,)."""
    loss, grads = jax.value_and_grad(loss_function)(state.params, images, labels)
    loss, grads = lax.pmean((loss, grads), "batch")
    return descend(state, grads), loss


@jax.jit
def train_step_on_one_device(
    state: State, images: jax.Array, labels: jax.Array
) -> tuple[State, jax.Array]:
    """The same step on the whole batch: images (8, 16, 64), labels (8, 16)."""
    loss, grads = jax.value_and_grad(loss_function)(
        state.params, images.reshape(-1, 64), labels.reshape(-1)
    )
    return descend(state, grads), loss


# The program.


def main(arguments: Sequence[str] = ()) -> int:
    """Runs the demo; returns 0 if both checks at its end pass, else 1."""
    parser = Parser(
        "demo",
        "Train a digit classifier, and show where everything is.",
        ("python -m shardmap demo --epochs 10",),
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data")
    epochs = parser.parse_args(arguments).epochs

    os.environ.update(enough_threads(os.environ))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)

    rng = np.random.default_rng(0)
    images, labels = load_digits(rng)
    held_out_images, held_out_labels = images[:HELD_OUT], labels[:HELD_OUT]
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]
    print(
        f"{len(images)} handwritten digits to learn from, {HELD_OUT} held out, "
        f"{jax.device_count()} devices ({jax.devices()[0].platform})"
    )

    state = single_state = initial_state()
    show_layout(state, *next(batches(images, labels, np.random.default_rng(0))))

    print(f"Training, {DEVICES} x {DIGITS_PER_DEVICE} digits a step")
    accuracy = 0.0
    for epoch in range(1, epochs + 1):
        for batch in batches(images, labels, rng):
            state, loss = train_step(state, *batch)
            single_state, _ = train_step_on_one_device(single_state, *batch)
        accuracy = held_out_accuracy(state, held_out_images, held_out_labels)
        bar = "#" * round(30 * epoch / epochs)
        print(
            f"  epoch {epoch:2} of {epochs} [{bar:<30}] loss {loss:.4f}  "
            f"held-out accuracy {accuracy:.3f}",
            flush=True,
        )

    return report(accuracy, largest_difference(state.params, single_state.params))


def load_digits(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The 1,797 digits that scikit-learn ships, shuffled; pixels between 0 and 1."""
    from sklearn import datasets  # Only this program needs it, so it is an extra.

    images, labels = datasets.load_digits(return_X_y=True)
    order = rng.permutation(len(images))
    return (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)


def batches(
    images: np.ndarray, labels: np.ndarray, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the digits in random order, as (8, 16, 64) images and (8, 16) labels."""
    size = DEVICES * DIGITS_PER_DEVICE
    order = rng.permutation(len(images))
    for start in range(0, len(images) - size + 1, size):
        chosen = order[start : start + size].reshape(DEVICES, DIGITS_PER_DEVICE)
        yield images[chosen], labels[chosen]


def show_layout(state: State, images: np.ndarray, labels: np.ndarray) -> None:
    """Prints how each argument of `train_step` is sharded."""
    lowered = train_step.lower(state, images, labels)
    state_specs, images_spec, labels_spec = lowered.in_specs
    first_spec, *others = jax.tree.leaves(state_specs)

    print("\nHow the arguments of train_step are sharded\n")
    print(f"state: {len(others) + 1} arrays, a copy on every device; the first of them")
    print(picture(first_spec, jax.tree.leaves(state)[0].shape))
    print("images")
    print(picture(images_spec, images.shape))
    print("labels")
    print(picture(labels_spec, labels.shape))
    print(f"\nThe images' spec\n     {images_spec}\nand its OpSharding proto")
    for line in str(images_spec.hlo_sharding().to_proto()).splitlines():
        if ": " in line:  # Skips the note that protobuf prints above the fields.
            print(f"     {line}")
    print()


def held_out_accuracy(state: State, images: np.ndarray, labels: np.ndarray) -> float:
    params = jax.tree.map(np.asarray, state.params)
    return float(np.mean(np.argmax(predict(params, images), axis=1) == labels))


def largest_difference(tree: Any, other_tree: Any) -> float:
    differences = jax.tree.map(
        lambda a, b: np.max(np.abs(np.asarray(a) - np.asarray(b))), tree, other_tree
    )
    return float(max(jax.tree.leaves(differences)))


def report(accuracy: float, difference: float) -> int:
    accurate = accuracy >= LEAST_ACCURACY
    equal = difference < LARGEST_DIFFERENCE
    print(
        f"\n{'ok  ' if accurate else 'MISS'} held-out accuracy {accuracy:.3f}, "
        f"at least {LEAST_ACCURACY} wanted"
    )
    print(
        f"{'ok  ' if equal else 'MISS'} the parameters differ by at most "
        f"{difference:.1e} from the same steps on one device,\n"
        f"     less than {LARGEST_DIFFERENCE:.0e} wanted (float32; "
        "the two add the same numbers in another order)"
    )
    print(
        "\nNext: read shardmap/demo.py, which is the whole program.\n"
        "For a function of yours: python -m shardmap explain MODULE:FUNCTION "
        "--arg 'f32[8,128]' --devices 8"
    )
    return 0 if accurate and equal else 1
