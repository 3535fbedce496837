"""Many Markov chains with NumPyro: `python examples/chains.py`.

A logistic regression tells malignant from benign tumours, in the breast cancer data of
scikit-learn. NumPyro's NUTS draws from its posterior, with more chains than devices.
NumPyro accepts any map as its `chain_method`; `spmap` places 24 chains on 8 devices, 3
on each.

The number of gradients in a step of NUTS depends on the state of the chain. Vectorised
chains wait for the slowest of them in every step. With `batch_size=1` the chains of a
device run one after the other, and none waits. The draws of each chain are then the
same bits as if it had run alone, which is checked here.

JAX makes eight virtual devices of the CPU, so this runs anywhere.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC, NUTS
from sklearn.datasets import load_breast_cancer

import shardmap as sm

DEVICES = 8
FEATURES = ["mean texture", "mean area", "mean smoothness", "mean concavity"]
LARGEST_R_HAT = 1.1  # 1 where the chains have forgotten where they started.


def model(x: jax.Array, benign: jax.Array) -> None:
    """Features (n, 4) and outcomes (n,)."""
    bias = numpyro.sample("bias", dist.Normal(0, 3))
    prior = dist.Normal(0, 3).expand([len(FEATURES)]).to_event(1)
    weights = numpyro.sample("weights", prior)
    numpyro.sample("y", dist.Bernoulli(logits=x @ weights + bias), obs=benign)


def load() -> tuple[np.ndarray, np.ndarray]:
    """569 tumours: their features, standardised, and whether they are benign."""
    data = load_breast_cancer()
    x = data.data[:, np.isin(data.feature_names, FEATURES)]
    x = (x - x.mean(0)) / x.std(0)
    return x.astype(np.float32), data.target.astype(np.float32)


def draw(
    keys: jax.Array, steps: int, chain_method: str | Callable[..., Any]
) -> dict[str, np.ndarray]:
    """The draws of each chain: "bias" (chains, steps), "weights" (chains, steps, 4)."""
    sampler = MCMC(
        NUTS(model),
        num_warmup=steps,
        num_samples=steps,
        num_chains=len(keys),
        chain_method=chain_method,
        progress_bar=False,
    )
    sampler.run(keys if len(keys) > 1 else keys[0], *load())
    return jax.tree.map(np.asarray, sampler.get_samples(group_by_chain=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; the exit code is 0 when both checks at its end hold."""
    parser = argparse.ArgumentParser(description="NUTS on many chains, on 8 devices.")
    parser.add_argument("--chains", type=int, default=24)
    parser.add_argument("--steps", type=int, default=500, help="to warm up, and drawn")
    options = parser.parse_args(arguments)

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)

    one_after_the_other = functools.partial(sm.spmap, batch_size=1)
    keys = jax.random.split(jax.random.key(0), options.chains)
    draws = draw(keys, options.steps, one_after_the_other)

    values = np.concatenate([draws["bias"][..., None], draws["weights"]], axis=-1)
    r_hat = gelman_rubin(values)
    size = effective_sample_size(values)
    print(f"{'':16}    mean  deviation  r hat  effective draws")
    for k, name in enumerate(["bias", *FEATURES]):
        mean, deviation = values[..., k].mean(), values[..., k].std()
        print(
            f"{name:16}  {mean:6.2f}  {deviation:9.2f}  {r_hat[k]:.3f}  {size[k]:15.0f}"
        )

    last = draw(keys[-1:], options.steps, "sequential")
    same = all(np.array_equal(draws[name][-1], last[name][0]) for name in last)
    worst = float(r_hat.max())
    print(f"the largest r hat is {worst:.3f}, less than {LARGEST_R_HAT} wanted")
    print(f"the last chain draws {'the same' if same else 'OTHER VALUES'} alone")
    return 0 if worst < LARGEST_R_HAT and same else 1


if __name__ == "__main__":
    raise SystemExit(main())
