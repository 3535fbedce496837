"""A function whose results go to stores, cut to fit: in one pass, or rechunked.

Pieces that end at chunks of the results may not fit, or read chunks of the arguments
often. Then results are cut where chunks of the arguments begin, kept in ``scratch``,
and cut anew where their own begin. The idea is rechunker's.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardmap.planning.engine.nodes import Operand, Value, nbytes
from shardmap.planning.engine.rules import Cut
from shardmap.planning.memory.chunks import Chunks
from shardmap.planning.memory.search import Problem, program_within
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.out import shared_chunks
from shardmap.planning.sources.stores import borders, decoded_bytes


def program_in_chunks(problem: Problem, make: Callable[..., CutProgram]) -> CutProgram:
    """The function, cut to fit; ``make`` takes the cuts anew of its results, too."""
    chunks, inputs = problem.chunks, problem.graph.inputs
    anew = _anew(problem)
    if not any(cut.at for row in anew for cut in row):
        return program_within(problem)
    rechunked = replace(
        problem,
        make=functools.partial(make, anew=anew),
        chunks=Chunks(problem.graph, problem.rules, chunks.leaves),
    )
    try:
        one_pass = program_within(problem)
    except ValueError as error:
        try:
            return program_within(rechunked)
        except ValueError:
            raise error from None
    # To keep a byte and read it again takes about as long as to decode one.
    kept = sum(nbytes(value) for value, _ in chunks.out)
    if _moved(problem, one_pass) > sum(map(nbytes, inputs)) + 2 * kept:
        with contextlib.suppress(ValueError):
            cut_program = program_within(rechunked)
            if _moved(problem, cut_program) + kept < _moved(problem, one_pass):
                return cut_program
    return one_pass


def _anew(problem: Problem) -> list[Sequence[Cut]]:
    """Cuts of the results into as few pieces of whole chunks as fit."""
    rows: dict[Operand, Sequence[Cut]] = {}
    chunks = problem.chunks
    arrays = [*chunks.leaves, *(array for _, array in chunks.out)]
    room = (problem.memory - max(map(decoded_bytes, arrays), default=0)) // 2
    for value, array in chunks.out:
        slab, row = nbytes(value), []
        for axis, size in enumerate(value.shape):
            ends = (0, *(borders(array, axis) or ()), size)
            longest = max(b - a for a, b in itertools.pairwise(ends))
            slab = max(slab * longest // max(size, 1), 1)
            several = max(room // slab, 1)
            row.append(Cut(ends[several:-1:several], False, frozenset()))
            slab *= min(several, len(ends) - 1)
        rows[value] = row
    return [rows.get(value, ()) for value in problem.graph.outputs]


def _moved(problem: Problem, cut_program: CutProgram) -> float:
    """The bytes of chunks that are read and written, also again."""
    outputs = dict(zip(problem.graph.outputs, cut_program.graph.outputs, strict=True))
    pairs = ((outputs[value], array) for value, array in problem.chunks.out)
    places = [(value, array) for value, array in pairs if isinstance(value, Value)]
    written = {value: float(nbytes(value)) for value, _ in places}
    for value, _, _, again in shared_chunks(cut_program, places):
        written[value] *= again
    times = [cut_program.chunks_read.get(name, 1) for name in cut_program.names]
    read = sum(map(operator.mul, times, map(nbytes, problem.graph.inputs)))
    return read + sum(written.values())
