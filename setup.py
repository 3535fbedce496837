"""The package's metadata; pyproject.toml holds only the tools' settings."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "shardmap/_version.py").read_text(), re.MULTILINE
)[1]

# An index page has no files beside it: there, links to files are their text alone.
LINK_TO_A_FILE = re.compile(r"!?\[([^\]]+)\]\((?!https?:|#)[^)]+\)")

EXTRAS = {
    # What the tests of `make test` need; some of the others skip without "dev".
    "test": [
        "cloudpickle",
        "dask[array]",
        "diffrax",
        "distributed",
        "equinox",
        "flatbuffers",
        "fsspec",
        "h5py",
        "hypothesis",
        "loky",
        "pytest>=9",
        "pytest-xdist",
        "setuptools",
        "tqdm",
        "xarray",
        "zarr",
    ],
    # The checkers are pinned: new ones find new faults.
    "check": ["mypy==2.4.*", "nbconvert", "ruff==0.17.*"],
    "demo": ["scikit-learn"],
    # Shards that travel to other processes, and a bar.
    "plan": ["flatbuffers", "tqdm"],
    # A cluster as the executor of a plan.
    "dask": ["dask[array]", "distributed"],
    # The checkpoints of a plan in object stores, which have packages of their own too.
    "store": ["fsspec"],
    # A server of S3, and a client of it, for a deep test.
    "s3": ["moto[server]", "s3fs"],
    # Many files as one store, for the test of a recipe.
    "virtual": ["virtualizarr"],
    # Arrays with labels, as arguments of a plan.
    "xarray": ["xarray"],
    "examples": ["flax", "numpyro", "optax", "scikit-learn"],
    "docs": ["furo", "myst-parser", "sphinx", "sphinx-copybutton"],
    # What the benchmarks compare with besides JAX, and what draws the picture of them.
    "bench": ["dask[array]", "matplotlib", "optax", "zarr"],
    # What a release is built with, and what runs the checks before each commit.
    "release": ["build", "pre-commit"],
}
# Everything, for whoever works on shardmap itself.
EXTRAS["dev"] = sorted({name for names in EXTRAS.values() for name in names})
# Compilers of devices that are not here, 150 to 300 MB. JAX 0.12 needs Python 3.12.
EXTRAS["tpu-compiler"] = [
    "libtpu==0.0.42.1; python_version < '3.12'",
    "libtpu==0.0.52; python_version >= '3.12'",
]
EXTRAS["gpu-compiler"] = ["jax[cuda12-local]", "nvidia-cuda-nvcc-cu12"]

setup(
    name="shardmap",
    version=VERSION,
    description="pmap's programming model on current JAX, extended.",
    long_description=LINK_TO_A_FILE.sub(r"\1", (ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
    author="the shardmap authors",
    license="Apache-2.0",
    keywords=["jax", "pmap", "spmd", "sharding", "parallel", "gpu", "tpu", "xla"],
    packages=find_packages(include=["shardmap", "shardmap.*"]),
    package_data={"shardmap": ["py.typed", "__init__.pyi"]},
    python_requires=">=3.11",
    entry_points={"console_scripts": ["shardmap = shardmap.__main__:console"]},
    install_requires=[
        "jax>=0.10.2,<0.13",
        "jaxlib>=0.10.2,<0.13",
        "numpy",
    ],
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
