"""Compile programs of pods for real machines, and compare what they send and keep.

Nothing runs. Each program is written as `spmap`, by hand with `jax.shard_map` and,
where it can be, as `jax.pmap`. Needs the compilers: pip install
'.[bench,tpu-compiler,gpu-compiler]'.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

import shardmap as sm
from benchmarks.harness import OURS
from benchmarks.machines.programs import BY_HAND, PMAP, PROGRAMS, N

MACHINES = ("v5e:2x4", "h100:8")
TEMPORARIES = 1.02
POD = "v5p:16x16x16"
POD_SECONDS = 1.0
PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- machines -->\n", "<!-- end of machines -->\n"


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program."""

    collectives: int
    sent: int
    """The bytes that a device sends in one call."""
    temporaries: int
    """The bytes of temporary arrays on a device."""

    def verdict(self, other: "Compiled") -> str:
        """Whether this is within the limits, compared with the one by hand."""
        no_more = self.collectives <= other.collectives and self.sent <= other.sent
        within = self.temporaries <= TEMPORARIES * other.temporaries
        return "ok" if no_more and within else "MISS"


def compiled(function: object, avals: Sequence[object]) -> Compiled:
    report = sm.explain(function)(*avals)
    assert report.cost is not None
    assert all(each.count is not None for each in report.collectives), report
    # Several that are sent as one are one.
    runs = [Fraction(each.count, each.together) for each in report.collectives]
    return Compiled(
        collectives=int(sum(runs)),
        sent=sum(each.link_bytes for each in report.collectives),
        temporaries=report.cost.temporary_bytes,
    )


Results = Mapping[tuple[str, str], Mapping[str, Compiled]]


def measure(names: Sequence[str], machines: Sequence[str]) -> Results:
    results = {}
    for name in names:
        for machine in machines:
            forms = PROGRAMS[name](sm.devices(machine))
            results[name, machine] = {k: compiled(*form) for k, form in forms.items()}
            print(".", end="", flush=True)
    print()
    return results


def table(results: Results) -> str:
    """The results as Markdown, a row for each program and machine."""
    rows = [
        "| program | for | collectives | bytes sent | temporary bytes | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for (name, machine), forms in results.items():
        ours, hand, pmap = (forms.get(form) for form in (OURS, BY_HAND, PMAP))
        columns = [
            " / ".join(
                f"{getattr(form, field.name):,}" if form else "-"
                for form in (ours, hand, pmap)
            )
            for field in dataclasses.fields(Compiled)
        ]
        rows.append(
            f"| {name} | {machine} | {' | '.join(columns)} | {ours.verdict(hand)} |"
        )
    return "\n".join(rows) + "\n"


def share_of_explain(machine: str) -> str:
    """A sentence on the CPU seconds that `explain` adds to the compiler's for a pod."""
    devices = sm.devices(machine)
    mapped, (state, batch) = PROGRAMS["data parallel, momentum"](devices[:N])[OURS]
    batches = jax.ShapeDtypeStruct((len(devices), *batch.shape[1:]), batch.dtype)

    def seconds(work: Callable[[Any], object]) -> float:
        # A function of its own each time, for which nothing is cached.
        step = functools.partial(mapped.__wrapped__)
        over = {"in_axes": (None, 0), "out_axes": None, "devices": devices}
        start = time.process_time()
        work(sm.spmap(step, "i", **over))
        return time.process_time() - start

    def compile_it(step: Any) -> None:
        step.lower(state, batches).compile()

    seconds(compile_it)  # The first starts the compiler too.
    compiling = seconds(compile_it)
    share = seconds(lambda step: sm.explain(step)(state, batches)) - compiling
    word = "ok" if share <= POD_SECONDS else "MISS"
    return (
        f"`explain` of the first program for {len(devices):,} chips ({machine}) takes "
        f"{share:.1f} CPU seconds more than the {compiling:.1f} of lowering and "
        f"compiling it, of at most {POD_SECONDS:.0f}: {word}."
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machines", description=__doc__
    )
    parser.add_argument("--only", metavar="NAME", default="", help="programs with NAME")
    parser.add_argument("--for", metavar="MACHINE", nargs="+", default=MACHINES)
    parser.add_argument("--docs", action="store_true", help=f"write into {PAGE.name}")
    options = vars(parser.parse_args(arguments))
    jax.config.update("jax_platforms", "cpu")
    names = [name for name in PROGRAMS if options["only"] in name]
    if not names:
        parser.error(f"no program has {options['only']!r}: {'; '.join(PROGRAMS)}")
    results = measure(names, options["for"])
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "libtpu", "jax-cuda12-pjrt")
    ]
    text = f"{table(results)}\nCompiled with {', '.join(versions)}."
    if not options["only"]:
        text += f" {share_of_explain(POD)}"
    print(text)
    if options["docs"]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}")
    missed = [k for k, v in results.items() if v[OURS].verdict(v[BY_HAND]) != "ok"]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
