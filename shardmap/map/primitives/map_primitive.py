"""The map as a JAX primitive.

A map runs ``call_jaxpr`` once for each element of an axis::

    { lambda ; a:f32[8,3]. let
        b:f32[8] = spmap[axis_name=i axis_size=8 in_axes=(0,) out_axes=(0,)
                         call_jaxpr={ lambda ; c:f32[3]. let ... in (d,) }
                         name=f mesh=Mesh('i': 8) mesh_axes=('i',) ...] a
      in (b,) }

Operand ``k`` has the mapped axis at ``in_axes[k]``, which ``call_jaxpr`` does not see;
with ``None``, every element gets the whole operand. Result ``k`` has the axis at
``out_axes[k]``.

The idea and the name come from ``jax.core.MapPrimitive``, which JAX deleted together
with ``xla_pmap_p``.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.extend.core as jex_core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from shardmap._jax.context import (
    NO_MESH,
    bound_axes,
    refuse_check_vma,
    replicated_without_mesh,
)
from shardmap._jax.effects import without_axis, without_references
from shardmap._jax.primitives import SHARD_MAP, manual_axes_of
from shardmap._jax.rules import Vmap, register_typecheck
from shardmap._jax.types import (
    AnyMesh,
    Aval,
    Axes,
    Equation,
    Jaxpr,
    Param,
    Value,
    aval_of,
    with_shape,
)
from shardmap._jax.walk import as_open_jaxpr, jaxprs_in
from shardmap.map.primitives.axis import UNNAMED, AxisLayout
from shardmap.map.primitives.explicit_sharding import drop_sharding

__all__ = ["MapPrimitive", "spmap_p"]


class MapPrimitive(jex_core.Primitive):
    """A primitive that maps a jaxpr over an axis.

    Bind it with flat operands and these parameters:

    * ``axis_name``: the name that collectives in ``call_jaxpr`` use, any hashable.
    * ``axis_size``: the number of elements, an int.
    * ``in_axes``, ``out_axes``: a tuple of one int or None per operand and per result.
    * ``call_jaxpr``: the function of one element, a jaxpr without constants.

    It may have other parameters for its rules.

    ``def_impl`` defines how a primitive of your own runs; `jax.jit` compiles the same
    function. `jax.vmap`, `jax.jvp` and transposition bind the primitive again on the
    transformed ``call_jaxpr``, unless you register other rules in `jax.interpreters`.
    Transposition adds a `jax.lax.psum` over the axis.

    Args:
      name: the name in jaxprs.

    Example:
      >>> import jax, shardmap as sm
      >>> batch_p = sm.extend.MapPrimitive("batch")
      >>> @batch_p.def_impl
      ... def run(*args, axis_name, in_axes, out_axes, call_jaxpr, **params):
      ...     element = lambda *args: jax.core.eval_jaxpr(call_jaxpr, (), *args)
      ...     mapped = jax.vmap(element, in_axes, list(out_axes), axis_name=axis_name)
      ...     return mapped(*args)
      >>> def batched(x):
      ...     element = jax.make_jaxpr(lambda x: x.sum())(x[0])
      ...     return batch_p.bind(x, axis_name="i", axis_size=len(x), in_axes=(0,),
      ...                         out_axes=(0,), call_jaxpr=element.jaxpr)
      >>> jax.jit(batched)(jax.numpy.ones((4, 3)))
      [Array([3., 3., 3., 3.], dtype=float32)]
    """

    multiple_results = True
    map_primitive = True
    _rules: ClassVar[Sequence[Callable[["MapPrimitive"], None]]] = ()

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.def_effectful_abstract_eval(functools.partial(_abstract_eval, name))
        register_typecheck(self, self._typecheck)
        for register in self._rules:
            register(self)

    @classmethod
    def def_rules(cls, rules: Sequence[Callable[["MapPrimitive"], None]]) -> None:
        """Sets what registers the rules of each map primitive, with `spmap_p` now."""
        cls._rules = rules
        for register in rules:
            register(spmap_p)

    def _typecheck(self, *operands: Value, **params: Param) -> tuple[Any, Any]:
        call_jaxpr: Any = params["call_jaxpr"]
        others = params | {"call_jaxpr": None}
        for jaxpr in jaxprs_in(others):
            jex_core.check_jaxpr(jaxpr)
        with bound_axes({params["axis_name"]: params["axis_size"]}):
            jex_core.check_jaxpr(as_open_jaxpr(call_jaxpr))
        return self.abstract_eval(*(o.aval for o in operands), **params)

    def is_high(self, *_: object, **__: object) -> bool:
        """No: high-level equations in ``call_jaxpr`` are lowered with the map."""
        return False

    def bind(self, *args: Value, **params: Param) -> list[Any]:
        """Binds the primitive: runs it, or adds its equation to a jaxpr being traced.

        Args:
          *args: the operands, flat, with the mapped axes.
          **params: see the class.

        Returns:
          The results, flat, as a list.

        Raises:
          TypeError: a parameter that every map has does not fit.
        """
        # Where nothing is traced, JAX does not look at the types of operands.
        self.abstract_eval(*map(jax.typeof, args), **params)
        return super().bind(*args, **params)


@dataclasses.dataclass(frozen=True)
class MapParams:
    """The parameters of an equation of `spmap_p`.

    Attributes:
      axis_name: the name that collectives in ``call_jaxpr`` use.
      axis_size: the number of elements.
      in_axes, out_axes: the mapped axis of each operand and result; None: not mapped.
      call_jaxpr: the function of one element, without constants.
      name: of the mapped function, for messages and profiles.
      mesh: the devices; None: those of the map around this one, or else one device,
        which vectorises all elements.
      mesh_axes: the mesh axes that the elements are laid over, major to minor; None:
        each device runs all of them.
      inner_axes: the mesh axes for maps inside, one for each level.
      batch_size: how many elements a device vectorises; None: all that it has.
      lowering: "manual" or "spmd".
      mesh_jaxpr: tells `jax.jit` of the mesh. `spmap_p` adds it.
    """

    axis_name: Hashable
    axis_size: int
    in_axes: Axes
    out_axes: Axes
    call_jaxpr: Jaxpr
    name: str = "call_jaxpr"
    mesh: AnyMesh | None = None
    mesh_axes: tuple[str, ...] | None = None
    inner_axes: tuple[str, ...] = ()
    batch_size: int | None = None
    lowering: Literal["manual", "spmd"] = "manual"
    mesh_jaxpr: Jaxpr | None = None

    @classmethod
    def of(cls, equation: Equation) -> "MapParams":
        """Those of a map's equation."""
        return cls(**equation.params)

    def __str__(self) -> str:
        """The map in the words of a message, such as "spmap of step"."""
        return f"spmap of {self.name}"

    @property
    def scope(self) -> str:
        """Its name in profiles, such as "spmap(step, data)"."""
        axis = "" if self.axis_name == UNNAMED else f", {self.axis_name}"
        return f"spmap({self.name}{axis})"

    def as_dict(self) -> dict[str, Any]:
        """The parameters for `spmap_p.bind`, and for an equation."""
        return dict(vars(self))

    def on(
        self,
        mesh: AnyMesh | None,
        mesh_axes: tuple[str, ...] | None = None,
        inner_axes: tuple[str, ...] = (),
    ) -> "MapParams":
        """The map on a mesh; see its attributes."""
        return dataclasses.replace(
            self, mesh=mesh, mesh_axes=mesh_axes, inner_axes=inner_axes
        )

    @property
    def axis(self) -> AxisLayout:
        """How the elements are laid over the mesh axes; in one block without any."""
        mesh_axes, devices = self.mesh_axes or (), 1
        if self.mesh is not None:
            devices = math.prod(self.mesh.shape[name] for name in mesh_axes)
        return AxisLayout(
            self.axis_name, self.axis_size, mesh_axes, devices, self.batch_size
        )


class _SpmapPrimitive(MapPrimitive):
    """The primitive of `spmap`'s equations, with the rules of all transformations.

    Its parameters are those of `MapParams`; only those of every `MapPrimitive` have no
    default.

    Example:
      >>> import jax, shardmap as sm
      >>> jaxpr = jax.make_jaxpr(sm.spmap(lambda x: x + 1.0))(jax.numpy.ones(8))
      >>> [equation.primitive is sm.extend.spmap_p for equation in jaxpr.eqns]
      [True]
    """

    def bind(self, *args: Value, **params: Param) -> list[Any]:
        args = tuple(map(drop_sharding, args))
        given = MapParams(**params)
        if not given.axis_size:
            return _without_elements(args, given)
        refuse_check_vma()
        around = jax.sharding.get_abstract_mesh().axis_types
        explicit = AxisType.Explicit in around
        given = dataclasses.replace(
            given,
            mesh_jaxpr=mesh_jaxpr(given.mesh, not explicit),
        )
        return super(MapPrimitive, self).bind(*args, **given.as_dict())


def _without_elements(operands: Sequence[Any], given: MapParams) -> list[Any]:
    """The results of a map over an axis of size 0."""
    if None not in given.out_axes:
        variables = zip(given.call_jaxpr.outvars, given.out_axes, strict=True)
        avals = [insert_axis(aval_of(var), 0, axis) for var, axis in variables]
        return [jax.lax.full(aval.shape, 0, aval.dtype) for aval in avals]
    # Unmapped results do not depend on elements, or are those of collectives.
    element = functools.partial(jax.core.eval_jaxpr, given.call_jaxpr, ())
    vmap, out_axes = Vmap(given.axis_name, 0), list(given.out_axes)
    results: list[Any] = vmap.vectorize(element, given.in_axes, out_axes)(*operands)
    return results


@functools.lru_cache(maxsize=1024)
def mesh_jaxpr(mesh: Mesh | None, named: bool = True) -> Any:
    """A jaxpr with one equation, a sharding constraint on ``mesh``.

    `jax.jit` collects the devices of a program from such equations, also in the jaxprs
    of other equations. Without one it would compile a map for one device. Under a mesh
    with Explicit axes it must not be ``named``: JAX refuses two meshes in a program
    that calls the host.
    """
    if mesh is None:
        return None
    everywhere: Sharding = NamedSharding(mesh, PartitionSpec())
    if not named:
        everywhere = replicated_without_mesh(list(mesh.devices.flat))
    # Under an Explicit mesh it would be a check of types, which leaves no equation.
    with jax.sharding.use_abstract_mesh(NO_MESH):
        closed = jax.make_jaxpr(
            lambda x: jax.lax.with_sharding_constraint(x, everywhere)
        )(0.0)
    return closed.jaxpr


def remove_axis(aval: Aval, axis: int | None) -> jax.core.ShapedArray:
    """The aval of an operand in the function of one element."""
    shape = aval.shape
    if axis is not None:
        shape = shape[:axis] + shape[axis + 1 :]
    return with_shape(aval, shape)


def insert_axis(aval: Aval, size: int, axis: int | None) -> jax.core.ShapedArray:
    """The aval of a result of all elements."""
    shape = aval.shape
    if axis is not None:
        shape = (*shape[:axis], size, *shape[axis:])
    return with_shape(aval, shape)


def _abstract_eval(
    primitive: str,
    /,
    *avals: Aval,
    axis_name: Hashable,
    axis_size: int,
    in_axes: tuple[int | None, ...],
    out_axes: tuple[int | None, ...],
    call_jaxpr: Jaxpr,
    **_: object,
) -> tuple[list[jax.core.ShapedArray], set[Any]]:
    call_jaxpr = as_open_jaxpr(call_jaxpr)
    for what, axes, variables in (
        ("operands", in_axes, call_jaxpr.invars),
        ("results", out_axes, call_jaxpr.outvars),
    ):
        if not isinstance(axes, Sequence) or len(axes) != len(variables):
            raise TypeError(
                f"{primitive}: call_jaxpr has {len(variables)} {what}, but there are "
                f"{len(axes)} axes for them: {axes}"
            )
    if len(avals) != len(in_axes):
        raise TypeError(
            f"{primitive}: {len(avals)} operands, but {len(in_axes)} in_axes: {in_axes}"
        )
    for aval, axis, var in zip(avals, in_axes, call_jaxpr.invars, strict=True):
        if axis is not None and aval.shape[axis : axis + 1] != (axis_size,):
            raise TypeError(
                f"{primitive}: an operand of {aval.str_short()} mapped at {axis} does "
                f"not have {axis_size} elements"
            )
        element, taken = remove_axis(aval, axis), aval_of(var)
        if (element.shape, element.dtype) != (taken.shape, taken.dtype):
            raise TypeError(
                f"{primitive}: an operand of {aval.str_short()} mapped at {axis} gives "
                f"{element.str_short()}, but call_jaxpr takes {taken.str_short()}"
            )
    out_avals = [
        insert_axis(aval_of(var), axis_size, axis)
        for var, axis in zip(call_jaxpr.outvars, out_axes, strict=True)
    ]
    # Uses of this map's axis name, and of references that an element makes, stay in it.
    effects = without_axis(call_jaxpr.effects, axis_name)
    return out_avals, without_references(effects)


spmap_p = _SpmapPrimitive("spmap")


def binds(equation: Equation, name: Hashable) -> bool:
    """Whether an equation is a map, or a `jax.shard_map`, that binds an axis name."""
    if equation.primitive is SHARD_MAP:
        return name in manual_axes_of(equation)
    is_map = isinstance(equation.primitive, MapPrimitive)
    return is_map and bool(equation.params["axis_name"] == name)


def is_no_map(equation: Equation) -> bool:
    """Whether an equation is neither a map nor a `jax.shard_map`."""
    return equation.primitive not in (spmap_p, SHARD_MAP)
