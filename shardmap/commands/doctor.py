"""`python -m shardmap doctor`: checks whether shardmap works here.

JAX is started in another process, because a wrong flag can end or hang it.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax import lax

import shardmap as sm
from shardmap.commands.cpu_threads import ENOUGH, VARIABLE, has_enough_threads
from shardmap.commands.parsing import Parser, one_line
from shardmap.sharding.mesh import virtual_devices

EXAMPLES = ("python -m shardmap doctor",)
# Prefixes of the environment variables that affect JAX.
FLAGS = ("JAX_", "XLA_", "LIBTPU_", "CUDA_VISIBLE_DEVICES", VARIABLE)
SECONDS = 120
PROBE = "from shardmap.commands import doctor; doctor.probe()"


def main(arguments: Sequence[str]) -> int:
    """Prints the findings, and returns 0, or 1 if shardmap does not work here."""
    parser = Parser(
        "doctor",
        "Show the versions, check the devices and a small map over them. List the "
        "flags\nthat are set, and what is known not to work here. Ends with code 1 if "
        "something\nis broken.",
        EXAMPLES,
    )
    parser.parse_args(arguments)
    broken = 0
    print(f"shardmap {sm.__version__}, Python {platform.python_version()}")
    print(f"jax {version('jax')}, jaxlib {version('jaxlib')}\n")
    facts = start_jax()
    for problem, text in devices(facts):
        print(f"{'BROKEN' if problem else 'ok    '}  {text}")
        broken += problem
    for title, lines in (
        ("Flags", flags(os.environ)),
        ("Known not to work here", limits(facts, os.environ)),
    ):
        print("\n".join(["", title, *(f"  {line}" for line in lines or ["none"])]))
    return 1 if broken else 0


def start_jax(seconds: float = SECONDS) -> dict[str, Any]:
    """The result of `probe` in another process, or ``{"error": ...}``."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"JAX did not start and run a map within {seconds} seconds"}
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = [line for line in result.stderr.splitlines() if line.strip()]
    return {"error": one_line(said[-1]) if said else f"code {result.returncode}"}


def probe() -> None:
    """Starts JAX, maps over all its devices, and prints what it finds as JSON."""
    count = jax.local_device_count()
    numbers = np.arange(1, count + 1, dtype=np.float32)
    total = sm.spmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)(numbers)
    config: Any = jax.config  # The flags are not in its types.
    facts = {
        "platform": jax.local_devices()[0].platform,
        "kind": jax.local_devices()[0].device_kind,
        "count": count,
        "cores": os.cpu_count(),
        "x64": config.jax_enable_x64,
        "disable_jit": config.jax_disable_jit,
        "sum": float(total),
        "right": float(np.sum(numbers)),
    }
    print(json.dumps(facts))


def devices(facts: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Checks that JAX starts and that a small map over its devices is right.

    Yields whether there is a problem, and a line of text.
    """
    if "error" in facts:
        yield True, f"JAX does not start: {facts['error']}"
        return
    count = facts["count"]
    several = "s" * (count != 1)
    yield (
        False,
        f"{count} device{several} on platform {facts['platform']} ({facts['kind']}), "
        f"{facts['cores']} CPU cores",
    )
    wrong = facts["sum"] != facts["right"]
    yield (
        wrong,
        f"a psum over {count} device{several} is "
        + (f"{facts['sum']:g}, not {facts['right']:g}" if wrong else "right"),
    )


def flags(environment: Mapping[str, str]) -> list[str]:
    """The environment variables that JAX reads.

    >>> flags({"JAX_PLATFORMS": "cpu", "HOME": "/root"})
    ['JAX_PLATFORMS=cpu']
    """
    return [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(FLAGS)
    ]


def limits(facts: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """The known limits with these devices and flags."""
    if "error" in facts:
        return []
    result = []
    on_cpu = facts["platform"] == "cpu"
    count = facts["count"]
    if count == 1:
        result.append(
            "more than one device: there is one. For 8 virtual ones on CPU call\n    "
            f"{virtual_devices(8, facts['platform'])} before any other use of JAX"
        )
    if on_cpu and count > facts["cores"]:
        result.append(
            f"timing: {count} devices share {facts['cores']} cores, so nothing gets "
            "faster with more devices"
        )
    if on_cpu and count > 1 and not has_enough_threads(environment):
        result.append(
            "several runs with collectives in flight under a jax.jit of your own, or "
            f"under jax.pmap:\n    jaxlib can hang. Wait for each, or set {VARIABLE}="
            f"{ENOUGH}, the number of its threads. Maps take turns"
        )
    if not facts["x64"]:
        result.append("64-bit numbers: JAX makes them 32-bit unless JAX_ENABLE_X64=1")
    if facts["disable_jit"]:
        result.append("measuring: JAX_DISABLE_JIT is on, and operations run one by one")
    return result
