"""What a compiled program says: where arrays are, what it costs."""

from typing import Any

import jax

from shardmap.explain.read import arrays
from shardmap.explain.read.hlo.cost import Loops
from shardmap.explain.read.hlo.text import Module
from shardmap.explain.report import Cost


def layouts_of(
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    traced: jax.stages.Traced,
) -> tuple[list[Any], list[Any]]:
    """How inputs and outputs are sharded: by the map's word, or by the compiler's."""
    tree_in: Any = jax.tree.structure(traced.args_info)
    count_in = tree_in.num_leaves
    count_out = len(jax.tree.leaves(traced.out_info))
    specs_in = jax.tree.leaves(getattr(lowered, "in_specs", None))
    specs_out = jax.tree.leaves(getattr(lowered, "out_specs", None))
    if len(specs_in) != count_in:
        specs_in = [
            arrays.UNUSED if sharding is None else sharding
            # An argument that is not used has None, which is no leaf; a None that was
            # passed is none either.
            for sharding in tree_in.flatten_up_to(compiled.input_shardings)
        ]
    if len(specs_out) != count_out:
        specs_out = jax.tree.leaves(compiled.output_shardings)
    return specs_in, specs_out


def cost_of(compiled: jax.stages.Compiled, loops: Loops) -> Cost:
    """The compiler's numbers, with every step of a loop where it counts only one."""
    analysis = compiled.cost_analysis() or {}

    def number(key: str, times: float) -> float | None:
        value = analysis.get(key)
        # The compiler says -1 where it does not know.
        return None if value is None or value < 0 else value * times

    memory = compiled.memory_analysis()
    sizes: list[Any] = [
        getattr(memory, f"{part}_size_in_bytes", None)
        for part in ("argument", "output", "temp", "alias")
    ]
    peak = None
    if memory is not None:
        # Temporary values are in one block, which is there as long as the call runs.
        argument, output, temporary, alias = sizes
        peak = argument + output + temporary - alias
    return Cost(
        flops=number("flops", loops.factors.flops),
        transcendentals=number("transcendentals", loops.factors.transcendentals),
        bytes_accessed=number("bytes accessed", loops.factors.bytes),
        peak_bytes=peak,
        argument_bytes=sizes[0],
        output_bytes=sizes[1],
        temporary_bytes=sizes[2],
        donated_bytes=sizes[3],
    )


_NO_VALUES = ("bitcast", "broadcast", "constant", "parameter")


def library_bytes(module: Module) -> int:
    """The most bytes that XLA's library on CPU holds of values inside one fusion.

    The buffers that XLA assigns leave them out. The library may hold each of them, or
    compute them in parts.
    """
    fusions = [
        each
        for instructions in module.computations.values()
        for each in instructions
        if each.opcode == "fusion" and "__ynn_fusion" in each.line
    ]
    return max(
        (
            sum(
                part.bytes
                for part in module.parts_of(each)
                if part.opcode not in _NO_VALUES and not part.is_root
            )
            for each in fusions
        ),
        default=0,
    )
