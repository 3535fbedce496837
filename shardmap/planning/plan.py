"""`plan` and its result, a `ShardPlan` of `Shard`s."""

import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from shardmap._jax import api_boundary
from shardmap._jax.types import PyTree
from shardmap.planning import report
from shardmap.planning.arguments import Arguments, static_keys, with_statics
from shardmap.planning.cutting import cut_function
from shardmap.planning.engine.stages import Stage
from shardmap.planning.in_slices import InSlices
from shardmap.planning.memory.compiled import peak_bytes, read_bytes
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.disk.scratch import checked
from shardmap.planning.run.run import run
from shardmap.planning.run.shards import Shard, Shards, index_of
from shardmap.units import bytes_of, check_bool, shown


@api_boundary
def plan(
    fun: Callable[..., PyTree],
    *args: PyTree,
    in_slices: "InSlices" = None,
    out_slices: "InSlices" = None,
    partial: bool = True,
    memory: int | str | None = None,
    scratch: Any = None,
    out: PyTree = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **kwargs: PyTree,
) -> "ShardPlan":
    """Cuts a function into independent shards.

    Args:
      fun: a function of arrays that JAX can trace.
      *args: its arguments, pytrees of arrays. Their values are not read. Leaves may
        also be `jax.ShapeDtypeStruct`, `numpy.memmap`, h5py datasets, zarr arrays, and
        types with a handler (`extend.register_shard_handler`). The function gets xarray
        arrays and datasets with their labels.
      in_slices: how the arguments are cut, a pytree prefix of ``args``. Each leaf is
        None (whole), a dict {axis: cut}, or `EACH`. A cut is a number of pieces of
        nearly equal length, at most the length of the axis; a tuple of lengths; a list
        of (start, stop) pairs or slices; `Pieces` of a length; `AS_CHUNKED`; `EACH`; or
        `AUTO`, as few pieces as fit into ``memory``. Pieces begin at chunks if an array
        has enough of them. For xarray, an axis is the name of a dimension, and arrays
        without it stay whole. Default: with ``memory``, the axes that save the most;
        otherwise nothing is cut.
      out_slices: how the results are cut, in the same form, a pytree prefix of the
        results. Use it for results that do not depend on an argument that is cut, such
        as random numbers.
      partial: whether to cut axes that the function reduces. Shards then return partial
        results.
      memory: a bound for `ShardPlan.peak_bytes`, the bytes that a shard uses with the
        values kept for later stages: an int, or a text such as ``"2 GB"``. Values that
        do not fit are computed again instead. Cuts of your own have to fit too. In this
        process, two shards run at once if both fit. Other processes, and threads of an
        executor, use as much each.
      scratch: a folder where runs store values of more than 1 MiB for later stages.
        Default: in memory, or the folder of `tempfile` for a result on its way to
        ``out``.
      out: where `ShardPlan.run` writes the result, as it takes it. With ``memory``,
        axes that reach the result are cut where chunks of these arrays begin, so that
        each chunk is written once. Where this would read chunks of the arguments often,
        the result is kept in ``scratch``, and written from there.
      static_argnums: the positions of arguments that are not arrays, as for `jax.jit`.
        In ``in_slices`` they are None; `ShardPlan.run` takes them again.
      static_argnames: the names of such arguments.
      **kwargs: keyword arguments of the function. They are not cut. If one has the name
        of a parameter of ``plan`` or `ShardPlan.run`, bind it with `functools.partial`.

    Returns:
      The plan. Nothing runs yet.

    Warns:
      UserWarning: arguments have 64 bits, which JAX reduces to 32 without
        ``jax_enable_x64``; no cut is given, or none has an effect; or nothing depends
        on an argument.

    Raises:
      TypeError, ValueError: ``in_slices`` or ``out_slices`` does not fit; ``memory`` is
        not a size, or too little for these cuts or for any; ``scratch`` is not a place;
        or the function has an effect or a collective, so its shards cannot run alone.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((6, 4), jnp.float32)
      >>> w = jax.ShapeDtypeStruct((4, 8), jnp.float32)
      >>> shard_plan = plan(jnp.dot, x, w, in_slices=({0: 3}, {1: (6, 2)}))
      >>> shard_plan.num_shards
      6
      >>> shard_plan.shards[-1].out_slices
      (slice(4, 6, None), slice(6, 8, None))
    """
    if not callable(fun):
        raise TypeError(f"plan takes a function, got {shown(fun)}")
    check_bool("partial", partial)
    room = None if memory is None else bytes_of("memory", memory)
    place = checked(scratch)
    _check_call(fun, args, kwargs)
    statics = static_keys(fun, args, kwargs, static_argnums, static_argnames)
    arguments = with_statics(args, kwargs, statics)
    cut_program = cut_function(
        fun,
        arguments,
        in_slices,
        out_slices=out_slices,
        partial=partial,
        memory=room,
        scratch=place,
        out=out,
        statics=statics,
    )
    told = []
    if narrowed := report.narrowed(cut_program):
        told.append(
            f"{'; '.join(narrowed)}. Set jax.config.update('jax_enable_x64', True), or "
            "give 32-bit arrays."
        )
    if not cut_program.num_shards:
        told.append(
            "no shard has anything to do, as the results depend on no argument: pass "
            "the arrays that the function closes over as arguments."
        )
    elif in_slices is None and out_slices is None and room is None:
        told.append("nothing is cut: give in_slices, out_slices or memory.")
    if report.runs_whole(cut_program):
        told.append(
            "the function runs as a whole: none of the cuts reaches its end. explain() "
            "of the plan says why."
        )
    for text in told:
        # Of the caller of `api_boundary`.
        warnings.warn(f"plan: {text}", stacklevel=3)
    return ShardPlan(cut_program, room, _weakly(arguments), out)


def _check_call(
    fun: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> None:
    """Refuses arguments that a function, or `ShardPlan.run`, does not take."""
    name = getattr(fun, "__name__", type(fun).__name__)
    if taken := sorted(OPTIONS & kwargs.keys()):
        raise TypeError(
            f"{taken[0]!r} is an option of a plan's run: write "
            f"plan(...).run(..., {taken[0]}=...). If {name} has such an argument, bind "
            f"it before, with functools.partial({name}, {taken[0]}=...)"
        )
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except ValueError:  # Some builtins have no signature.
        pass
    except TypeError as error:
        raise TypeError(
            f"plan takes the arguments of {name} and its own options, as plan({name}, "
            f"*args, in_slices=..., memory=...): {error}"
        ) from None


def _weakly(arguments: Arguments) -> Callable[[], Arguments]:
    """Returns a function that returns the arguments, as long as others hold them."""

    def ref(leaf: Any) -> Callable[[], Any]:
        try:
            return weakref.ref(leaf)
        except TypeError:  # Such as of a number.
            return lambda: leaf

    leaves, tree = jax.tree.flatten(arguments)
    refs = list(map(ref, leaves))

    def again() -> Arguments:
        alive = [ref() for ref in refs]
        if any(x is None or isinstance(x, jax.ShapeDtypeStruct) for x in alive):
            raise ValueError(
                "the arguments that the plan was made with are shapes only, or are "
                "gone: pass them again"
            )
        given: Arguments = jax.tree.unflatten(tree, alive)
        return given

    return again


class ShardPlan:
    """A function that is cut into shards; the result of `plan`.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
      >>> shard_plan = sm.plan(lambda x: (x * 2).sum(1), x, in_slices={0: 3})
      >>> type(shard_plan) is sm.ShardPlan, shard_plan.num_shards
      (True, 3)
      >>> shard_plan.run(x)
      array([ 2., 10., 18., 26., 34., 42.], dtype=float32)
    """

    def __init__(
        self,
        cut_program: CutProgram,
        memory: int | None,
        given: Callable[[], Arguments],
        out: PyTree,
    ) -> None:
        self._cut_program, self._memory = cut_program, memory
        self._given, self._out = given, out

    @property
    def stages(self) -> list[Stage]:
        """The stages, which run one after the other. The shards of a stage run in any
        order.
        """
        return self._cut_program.stages

    @property
    def shards(self) -> Shards:
        """The shards of all stages, a lazy sequence."""
        return Shards(self._cut_program, self._cut_program.stages)

    def stage_shards(self, number: int) -> Shards:
        """The shards of one stage."""
        stages = self._cut_program.stages
        place = index_of("stages", number, len(stages))
        return Shards(self._cut_program, [stages[place]])

    @property
    def num_shards(self) -> int:
        """The number of shards in all stages."""
        return self._cut_program.num_shards

    @property
    def out_slices(self) -> PyTree:
        """How the results are cut: for each, {axis: list of (start, stop)}."""
        return report.out_slices(self._cut_program)

    @property
    def peak_bytes(self) -> int:
        """The bytes that one shard uses at most.

        It counts what the shard reads and returns, what XLA says that it takes besides,
        and the values that are kept for later stages at that time; of zarr, also a
        chunk that is decoded. It does not count arguments, results, values in
        ``scratch``, and free memory that the allocator keeps. The largest shard of each
        stage is compiled for this.
        """
        return peak_bytes(self._cut_program)

    def explain(self) -> Any:
        """Explains what became of each cut: what it reaches, or why an axis is whole.

        Returns:
          An `Explanation`, as `shardmap.explain` returns. Print it; ``pieces`` has its
          lines, and ``stages`` the numbers.
        """
        return report.explanation(self._cut_program)

    @property
    def stage_costs(self) -> tuple[report.StageCost, ...]:
        """What each stage computes, reads and keeps."""
        return report.stage_costs(self._cut_program)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> NoReturn:
        raise TypeError("a plan is no function: plan(...).run(*args) runs it")

    def __getattr__(self, name: str) -> NoReturn:
        instead = {
            "save": ": sm.explain(plan).save(path) writes a page on it",
            "compute": ": plan.run() runs it",
        }
        raise AttributeError(f"a plan has no {name!r}{instead.get(name, '')}")

    def __repr__(self) -> str:
        stages = len(self.stages)
        plural = "" if stages == 1 else "s"
        return f"<ShardPlan: {self.num_shards:,} shards in {stages} stage{plural}>"

    def _repr_html_(self) -> str:
        html: str = self.explain()._repr_html_()
        return html

    def __str__(self) -> str:
        return str(self.explain())

    def _leaves(
        self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
    ) -> list[Any]:
        """The arguments, flat; those of `plan` if none are given."""
        program = self._cut_program
        given = with_statics(args, kwargs, program.statics)
        return program.leaves(given if args or kwargs else self._given())

    def to_dask(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Returns the result as Dask arrays, which are not computed yet.

        Values for later stages are Dask arrays too, which the workers keep and spill to
        their disks; ``scratch`` is not used.

        Args:
          *args: as for `run`. Default: those of `plan`, if they still exist. Arrays of
            Dask stay where they are.
          **kwargs: as for `run`.

        Example:
          >>> import dask.array as da, numpy as np, shardmap as sm
          >>> x = da.arange(12, chunks=4, dtype=np.float32)
          >>> shard_plan = sm.plan(lambda x: x * 2, x, in_slices={0: 3})
          >>> shard_plan.to_dask(x)[3:5].compute()
          array([6., 8.], dtype=float32)
        """
        from shardmap.planning.run.dask import to_dask  # Only few programs need it.

        return to_dask(self._cut_program, self._leaves(args, kwargs))

    def run(
        self,
        *args: PyTree,
        out: PyTree = None,
        executor: Any = None,
        max_in_flight: int | None = None,
        progress: bool = False,
        retries: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        scratch: Any = None,
        task: tuple[int, int] | None = None,
        stage: int | None = None,
        **kwargs: PyTree,
    ) -> PyTree:
        """Runs all shards and returns the result of the function.

        Args:
          *args: the arguments of the function: arrays, or values with ``shape``,
            ``dtype`` and ``__getitem__``. Each shard reads only its own slices.
            Default: those of `plan`, if they still exist.
          out: where to write the result: array-likes with ``__getitem__`` and
            ``__setitem__`` in the structure of the result. Default: those of `plan`, or
            new NumPy arrays.
          executor: where shards run. None: this process, which reads, computes and
            writes at the same time. An int: that many processes, which start with the
            run and end with it. A `concurrent.futures.Executor`: its threads, or its
            processes if "spawn", loky or mpi4py starts them. A `distributed.Client`:
            its workers, which also combine partial results. Other processes open
            files and stores themselves.
          max_in_flight: the number of shards that are read or computed at once. In this
            process, as many threads read what is not in memory, which hides the latency
            of remote stores. Default: one thread reads two shards ahead, or one if it
            is larger than 32 MiB or ``memory`` has no room for two.
          progress: whether to show a bar of tqdm, or that of Dask on a cluster.
          retries: how often to retry a shard that fails.
          checkpoint: a folder for the results of shards, or an address as
            ``"s3://bucket/job"``, by fsspec. A run that was stopped continues with
            those that are missing. The arguments must have the same values; this is
            checked for arrays in memory up to 1 MiB.
          scratch: where to store values for later stages, as for `plan`. Default: that
            of `plan`. A run creates a folder with a random name there, and removes it
            at the end. Other processes open it themselves.
          task: (index, count) of this process in an array job. All its processes run
            the same program with the same ``checkpoint``. Each runs its part of the
            shards of every stage, and waits for the others. Restart a task that was
            killed. Large values for later stages are read from the folder.
          stage: the one stage that this array job runs, when the jobs of the stages
            before have ended. Its processes wait for no other, but for the last
            process of the last stage. Default: all stages.
          **kwargs: the keyword arguments of `plan`.

        Returns:
          NumPy arrays, or ``out``, in the structure of the function's result. In an
          array job, the last task returns this at the end, and the others return None.

        Warns:
          UserWarning: ``out`` has chunks that two shards share, which are read and
            written again: give ``out`` to `plan` too.

        Raises:
          OSError: ``scratch`` or ``checkpoint`` cannot store a value.
          ShardError: a shard failed, or the executor broke down.
          ValueError: ``out`` or the arguments do not fit, or the checkpoint is that of
            another plan or of other arguments.
        """
        read = 0
        if self._memory is not None:
            read = read_bytes(self._cut_program)
            if executor is None and max_in_flight is None:
                max_in_flight = 1 if 2 * self.peak_bytes > self._memory else None
        if unknown := sorted(kwargs.keys() - self._cut_program.keywords):
            is_workers = unknown[0].endswith(("workers", "jobs", "processes"))
            raise TypeError(
                f"run got {unknown[0]}=, which is no option of run nor a keyword "
                "argument that the plan was made with. "
                + (
                    "executor=4 runs shards in four processes."
                    if is_workers
                    else f"The options are {', '.join(RUN_OPTIONS)}."
                )
            )
        return run(
            self._cut_program,
            self._leaves(args, kwargs),
            self._out if out is None else out,
            executor=executor,
            max_in_flight=max_in_flight,
            progress=progress,
            retries=retries,
            checkpoint=checkpoint,
            scratch=scratch,
            task=task,
            stage=stage,
            memory=self._memory,
            read=read,
        )


RUN_OPTIONS = inspect.getfullargspec(ShardPlan.run).kwonlyargs

OPTIONS = {*RUN_OPTIONS, *inspect.getfullargspec(Shard.args).kwonlyargs}
"""The keyword options of a plan's methods."""
