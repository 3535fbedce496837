"""`spmap`: what users call."""

import functools
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, Sharding

from shardmap._jax.context import TOP_LEVEL, find_top_trace
from shardmap.api import pickling
from shardmap.api.calls import arguments, kept, options
from shardmap.api.calls.options import Options
from shardmap.api.calls.programs import FunctionMap
from shardmap.api.calls.replicas import check_copies_agree
from shardmap.api.calls.stages import Lowered, lower, trace
from shardmap.map import contexts, tracing
from shardmap.map.primitives.axis import UNNAMED
from shardmap.sharding.mesh import auto_mesh


def _all_lie(args: Any, must_lie: Iterable[tuple[int, Sharding]]) -> bool:
    """Whether the leaves with these numbers lie as they must."""
    leaves = jax.tree.leaves(args)
    return all(
        getattr(leaves[k], "sharding", None) == sharding and leaves[k].committed
        for k, sharding in must_lie
    )


def explanation(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The `Explanation` of a call of ``fun``."""
    # What only explains is loaded when it is first asked.
    from shardmap.explain.api import explain

    return explain(fun)(*args, **kwargs)


class MappedFunction:
    """A function mapped over an axis; what `spmap` returns.

    Call it like the function, with arrays that have the mapped axis.
    """

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fun)
        self._map: FunctionMap = kept.kept_for(
            fun, options.key(), lambda: FunctionMap(fun, options)
        )
        # The map finds the function by a weak reference, to an equal one perhaps.
        self._fun = self._map.fun()
        self._static = options.static_argnums
        # The last program for each number of arguments is tried first. It refuses what
        # it is not for; where that happens often, every call is looked up.
        self._recent: dict[int, tuple[Any, Any, Any]] = {}
        self._refusals = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._static:
            args = arguments.wrap_statics(args, self._static)
        if find_top_trace(()) is not TOP_LEVEL:
            return self._map.bind(args, kwargs)
        if contexts.has_mesh():
            return self._map.under_mesh(self._run, args, kwargs)
        if not kwargs:
            program, probe, must_lie = self._recent.get(len(args), (None, None, ()))
            if (
                program is not None
                and (probe is None or probe.fits(args))
                and (not must_lie or _all_lie(args, must_lie))
            ):
                try:
                    return program(*args)
                except (TypeError, ValueError):
                    self._recent.pop(len(args), None)
                    self._refusals += 1
        return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        if tracing.config_value("jax_disable_jit"):
            return self._map.bind(args, kwargs)
        call = self._map.prepare(args, kwargs)
        results = call.program(*call.args, **call.kwargs)
        # Numbers of leaves among static arguments would not be those of the map.
        varies = self._refusals >= 8 or (call.must_lie and self._map.has_statics)
        if self._map.options.check_replicas:
            check_copies_agree(self._map.name, results)
            varies = True
        if not (call.moved or kwargs or varies):
            self._recent[len(args)] = call.program, call.probe, call.must_lie
        return results

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers the map for these arguments, running nothing.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`, as for a call.
          **kwargs: the same, by keyword.

        Returns:
          A `jax.stages.Lowered` with ``in_specs`` and ``out_specs``.
        """
        args = arguments.wrap_statics(args, self._static)
        return lower(self._map, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the map for these arguments, as `jax.jit(fun).trace` does."""
        if isinstance(self.mesh, AbstractMesh):
            # Of a program for no devices there is none but that of a caller.
            jitted = jax.jit(self, static_argnums=self.static_argnums)
            return jitted.trace(*args, **kwargs)
        args = arguments.wrap_statics(args, self._static)
        return trace(self._map, args, kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """What runs in parallel for these arguments, and at what cost.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`, as for a call.
          **kwargs: the same, by keyword.

        Returns:
          An `Explanation`; see `shardmap.explain`.
        """
        return explanation(self, args, kwargs)

    @property
    def static_argnums(self) -> tuple[int, ...]:
        """The positions of arguments that are compile-time constants."""
        return self._map.options.static_argnums

    @property
    def mesh(self) -> Mesh | None:
        """The mesh to lay the axis on, if one was given; perhaps an abstract one."""
        return self._map.options.mesh

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A mapped function in a class is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        return pickling.reduced(self, self._fun, self._map.options)

    def __repr__(self) -> str:
        return f"<spmap of {self._map.name}>"


def spmap(
    fun: Callable[..., Any] | None = None,
    axis_name: Hashable = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    mesh: Mesh | None = None,
    mesh_axes: str | Sequence[str] | None = None,
    batch_size: int | None = None,
    lowering: str = "manual",
    check_replicas: bool = False,
) -> Any:
    """Maps a function over an array axis, one element on each device.

    ``spmap(f)(x)`` computes ``stack([f(x[0]), f(x[1]), ...])``, each element on its
    own device, all at once: one program per device, compiled together. Elements talk
    to each other with the collectives of `jax.lax` over ``axis_name``.

    The model and the first parameters are those of `jax.pmap`, the composition
    with other transformations that of `jax.vmap`: ``spmap`` works under `jax.jit`,
    `jax.grad` and `jax.vmap`, inside control flow, and inside itself.

    Args:
      fun: the function of one element. Arguments and results are pytrees of arrays.
        Left out, ``spmap(...)`` is a decorator.
      axis_name: what collectives call the axis, any hashable. Default: no name.
      in_axes: which axis of each positional argument is mapped: an int, negative from
        the end, None for what every element gets whole, or a pytree prefix of the
        arguments with these as leaves. Arguments passed by keyword are mapped along
        axis 0. Default 0.
      out_axes: where results have the mapped axis, in the same way, as a pytree prefix
        of the result. None: the elements agree, and one of them is given. Default 0.
      static_broadcasted_argnums: positions of arguments that are compile-time
        constants; they have ``__hash__`` and ``__eq__``. Default: none.
      devices: the devices to use, in this order. Default: the first ones. If some are
        another process's, each process that has some calls the function with its own
        rows and gets its own rows back; or with global arrays, and gets such.
      backend: whose devices to use, such as ``"cpu"``. Default: JAX's own default.
      axis_size: the number of elements, of all processes together, needed if no
        argument is mapped.
      donate_argnums: positions of arguments whose memory the results may use, also
        when passed by keyword. An array is gone after the call if its memory was used;
        as with `jax.jit`, it is kept where the function does not need the argument, or
        no result has its size. Default: none.
      mesh: a mesh to lay the axis on, instead of ``devices`` or ``backend``. Maps
        inside each other that name different axes of one mesh are one program.
      mesh_axes: the mesh axes for the elements, a name or several, major to minor. With
        ``()`` every device has all elements, as one vectorised operation.
      batch_size: how many elements a device works on at once, where it has more than
        one; it loops over the rest, as `jax.lax.map` does. Default: all at once.
      lowering: ``"manual"``: one program per device, with explicit collectives between
        them. ``"spmd"``: one vectorised program whose inputs and outputs carry the
        layout; XLA's partitioner splits it and puts the collectives in. The results
        are the same. Default: ``"manual"``.
      check_replicas: whether to compare, after each call outside of `jax.jit`, the
        copies that devices hold of results with ``out_axes=None``; a RuntimeError
        tells which differ. It waits for the results. Default: no.

    Returns:
      The mapped function, with ``lower`` and ``trace`` as `jax.jit` gives them, and
      ``explain``. It has the name and docs of ``fun``, and ``fun`` itself as
      ``__wrapped__``.

    Raises:
      TypeError: ``fun`` is not callable, or axes are neither ints nor None. When
        called: an argument that JAX cannot compute with.
      ValueError: no devices. When called: mapped sizes that differ, an axis that
        an argument does not have, ``out_axes=None`` for a result that differs between
        elements.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> @sm.spmap(axis_name="i")
      ... def normalize(x):
      ...     return x / jax.lax.psum(x, "i")
      >>> normalize(np.array([1.0, 3.0, 4.0]))
      Array([0.125, 0.375, 0.5  ], dtype=float32)
    """
    if fun is None:
        return functools.partial(
            spmap,
            axis_name=axis_name,
            in_axes=in_axes,
            out_axes=out_axes,
            static_broadcasted_argnums=static_broadcasted_argnums,
            devices=devices,
            backend=backend,
            axis_size=axis_size,
            donate_argnums=donate_argnums,
            mesh=mesh,
            mesh_axes=mesh_axes,
            batch_size=batch_size,
            lowering=lowering,
            check_replicas=check_replicas,
        )
    if not callable(fun):
        raise TypeError(f"spmap expects a callable, but got {fun!r}.")
    options.check_axes("in_axes", in_axes)
    options.check_axes("out_axes", out_axes)
    if devices is not None:
        devices = tuple(devices)
        if not devices:
            raise ValueError("'devices' argument to spmap must be non-empty, or None.")
    static = options.index_tuple(
        "static_broadcasted_argnums", static_broadcasted_argnums
    )
    donated = options.index_tuple("donate_argnums", donate_argnums)
    if both := sorted(set(static) & set(donated)):
        raise ValueError(
            f"spmap static_broadcasted_argnums {static} and donate_argnums {donated} "
            f"both have {both}: a static argument has no buffer to donate."
        )
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    chosen = Options(
        axis_name=UNNAMED if axis_name is None else axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static_argnums=tuple(sorted(static)),
        devices=devices,
        backend=backend,
        axis_size=axis_size,
        donate_argnums=donated,
        mesh=None if mesh is None else auto_mesh(mesh),
        mesh_axes=options.mesh_axes(mesh, mesh_axes, devices, backend),
        batch_size=options.batch_size(batch_size),
        lowering=options.lowering(lowering, batch_size),
        check_replicas=check_replicas,
    )
    return MappedFunction(fun, chosen)


def mapped_as(
    kind: str, fun: Callable[..., Any], *args: Any, **options: Any
) -> MappedFunction:
    """What `spmap` gives, to be told as another kind of map by `explain`."""
    return MappedFunction(
        fun, spmap(fun, *args, **options)._map.options._replace(kind=kind)
    )
