"""How `sharded_jit` reads a call: parts checked, the function traced, and bound."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from shardmap._jax.context import EMPTY_MESH
from shardmap._jax.types import (
    Aval,
    ClosedJaxpr,
    PyTree,
    Value,
    without_sharding,
)
from shardmap._jax.walk import equations
from shardmap.api.calls import kept
from shardmap.api.calls.call import Arguments
from shardmap.api.calls.programs import Args, Kwargs, Programs
from shardmap.api.calls.refusals import check_hashable
from shardmap.api.calls.statics import apply_statics
from shardmap.api.partitions.calls import WHAT, Options, PartitionCall
from shardmap.api.partitions.parts import (
    Counts,
    agreed_total,
    broadcast_parts,
    check_local_parts,
    check_own_count,
    check_shapes,
    counted,
    is_leaf,
    whole_aval,
)
from shardmap.arrays import array_likes, processes, trees
from shardmap.arrays.process_local import ProcessShardings, convert_p, look
from shardmap.arrays.trees import leaf_paths
from shardmap.map import agreement, contexts, tracing
from shardmap.map.constraint import constrain, constraints_in, partition_mesh
from shardmap.map.primitives.axis import map_text
from shardmap.map.primitives.map_primitive import spmap_p


class _Side(NamedTuple):
    """The leaves of a call's arguments, or of its results.

    Attributes:
      parts: how each is cut.
      avals: their kinds, as global arrays.
      is_local: which are process-local data.
    """

    parts: Sequence[Counts]
    avals: Sequence[Aval]
    is_local: Sequence[bool]


class _WithStatics:
    """A function that takes static arguments as `Static`s, to be traced."""

    def __init__(self, fun: kept.WeakFunction) -> None:
        self._fun = fun

    @property
    def __wrapped__(self) -> Callable[..., PyTree]:
        """What JAX's errors speak of."""
        return self._fun()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return apply_statics(self._fun(), args, kwargs)


class PartitionPrograms(Programs[PartitionCall, Options]):
    """All that is made for one function that `sharded_jit` cuts."""

    what = WHAT

    def __init__(self, fun: Callable[..., object], options: Options) -> None:
        super().__init__(fun, options)
        # One object, by which JAX finds a trace again.
        self._with_statics = kept.described_like(_WithStatics(self.fun), fun, self.name)
        self._devices_alone: kept.Kept[list[jax.Device]] = kept.Kept()

    def read(
        self,
        args: Args,
        kwargs: Kwargs,
        are_global: Sequence[bool] | None = None,
        alone: bool = True,
    ) -> PartitionCall:
        options = self.options
        arguments = Arguments.of(args, kwargs)
        dynamic = tuple(args[k] for k in arguments.argnums)
        names = trees.leaf_names(self.fun(), arguments.argnums, dynamic, kwargs)
        what = f"{WHAT} of {self.name}"
        given_avals = self.leaf_avals(arguments.leaves, lambda: names)
        given = self._read_arguments(
            what, arguments, args, names, given_avals, are_global
        )
        traced = self._traced(arguments, list(map(without_sharding, given.avals)))
        out = traced.out_info
        out_names = leaf_paths("result", out)
        made = self._read_results(what, out, out_names, are_global is not None)
        total = agreed_total(
            what,
            [
                ("num_partitions", options.num_partitions),
                *counted("in_parts", names, given.parts),
                *counted("out_parts", out_names, made.parts),
                *(
                    ("with_sharding_constraint", equation.params["total"])
                    for equation in constraints_in(traced.jaxpr)
                ),
            ],
        )
        if options.local_num_partitions is not None and are_global is not None:
            check_own_count(what, total or 1, options.local_num_partitions)
        call = PartitionCall(
            arguments,
            given_avals,
            jax.tree.structure(out),
            given.parts,
            made.parts,
            total,
            given.avals,
            made.avals,
            given.is_local,
            made.is_local,
            traced.jaxpr,
            self._description(total, given.avals, given.parts, made.parts, traced.jaxpr)
            if jax.process_count() > 1
            else "",
        )
        if not alone:
            return call
        self._check_maps(call)
        return call.alone()

    def _check_maps(self, call: PartitionCall) -> None:
        """Refuses maps on other devices than those of the partitions."""
        for equation in equations(call.jaxpr):
            mesh = equation.params["mesh"] if equation.primitive is spmap_p else None
            if mesh is None or {*mesh.devices.flat} == {*call.devices}:
                continue
            ours, theirs = (
                [device.id for device in devices]
                for devices in (call.devices, mesh.devices.flat)
            )
            raise ValueError(
                f"{WHAT} of {self.name} has {call.total or 1} partitions and runs on "
                f"the devices {ours}, but {map_text(equation.params)} in it runs on "
                f"{theirs}. Give that map the devices of the partitions, or call "
                f"{self.name} under jax.jit, where both are on all devices."
            )

    def _read_arguments(
        self,
        what: str,
        arguments: Arguments,
        args: Args,
        names: Sequence[str],
        avals: Sequence[Aval],
        are_global: Sequence[bool] | None,
    ) -> _Side:
        """How the arguments are cut; without ``are_global`` all are global arrays."""
        options, argnums = self.options, arguments.argnums
        dynamic = tuple(args[k] for k in argnums)
        count = len(arguments.leaves)

        def of_leaves(name: str, prefix: PyTree) -> list[Counts]:
            if isinstance(prefix, tuple) and not is_leaf(prefix):
                if len(prefix) == len(args):
                    prefix = tuple(prefix[k] for k in argnums)
            parts = broadcast_parts(
                what, name, prefix, dynamic, "the positional arguments"
            )
            return parts + [None] * (count - len(parts))

        parts = of_leaves("in_parts", options.in_parts)
        local: list[Counts] = [None] * count
        if are_global is not None:
            said = of_leaves("local_in_parts", options.local_in_parts)
            local = [
                None if is_global else own
                for is_global, own in zip(are_global, said, strict=True)
            ]
        check_local_parts(what, "local_in_parts", names, avals, parts, local)
        given_parts = [
            of_all if own is None else own
            for of_all, own in zip(parts, local, strict=True)
        ]
        check_shapes(what, names, avals, given_parts)
        global_avals = list(map(whole_aval, avals, parts, local))
        return _Side(parts, global_avals, [own is not None for own in local])

    def _read_results(
        self, what: str, out: PyTree, names: Sequence[str], across_processes: bool
    ) -> _Side:
        options = self.options
        avals = list(map(array_likes.leaf_aval, jax.tree.leaves(out)))
        parts, local = (
            broadcast_parts(what, name, prefix, out, "the result")
            for name, prefix in (
                ("out_parts", options.out_parts),
                ("local_out_parts", options.local_out_parts),
            )
        )
        check_shapes(what, names, avals, parts)
        if not across_processes:
            local = [None] * len(parts)
        check_local_parts(what, "local_out_parts", names, avals, parts, local)
        return _Side(parts, avals, [own is not None for own in local])

    def _traced(
        self, arguments: Arguments, leaves: Sequence[Value]
    ) -> jax.stages.Traced:
        args, kwargs = arguments.with_leaves(leaves)
        traced: jax.stages.Traced = self._jitted(arguments).trace(*args, **kwargs)
        return traced

    def _description(
        self,
        total: int | None,
        avals: Sequence[Aval],
        in_parts: Sequence[Counts],
        out_parts: Sequence[Counts],
        jaxpr: ClosedJaxpr,
    ) -> str:
        """What a call runs, equal in all processes that run the same program."""
        listed = ", ".join(
            aval.str_short() if parts is None else f"{aval.str_short()} in {parts}"
            for aval, parts in zip(avals, in_parts, strict=True)
        )
        return (
            f"{self.name}, {total or 1} partitions, arguments ({listed}), out_parts "
            f"{tuple(out_parts)}, operations {agreement.operations(jaxpr.jaxpr)}"
        )

    def _jitted(self, arguments: Arguments) -> jax.stages.Wrapped:
        static = arguments.static_argnums
        return jax.jit(self._with_statics, static_argnums=static, static_argnames=())

    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        leaves = Arguments.of(args, kwargs).leaves
        are_global = None
        if jax.process_count() > 1 and not tracing.inside_map():
            are_global = look(leaves)
        call = self.read(args, kwargs, are_global, alone=False)
        if are_global is None or not processes.several(call.devices):
            return self.bind_call(call, leaves)
        # JAX runs step by step what it differentiates.
        mesh = partition_mesh((), call.total or 1, WHAT)
        agreement.agree_to_lower(mesh, WHAT, lambda: call.agreed_on)
        call = call.alone()
        local = call.process_local
        assert local is not None
        given = _converted(leaves, local.operands, "global")
        results = jax.tree.leaves(self.bind_call(call, given))
        own = _converted(results, local.results, "local")
        return jax.tree.unflatten(call.out_tree, own)

    def bind_part(self, args: Args, kwargs: Kwargs) -> PyTree:
        # Values of an eager gradient have types, which those inside have not.
        return self.program_under_mesh.as_part(args, kwargs)

    def bind_call(self, call: PartitionCall, leaves: Sequence[Value]) -> PyTree:
        def cut(values: Sequence[Value], parts: Sequence[Counts]) -> list[Value]:
            return [
                constrain(
                    value,
                    value_parts,
                    call.total,
                    WHAT,
                    call.is_alone,
                    call.agreed_on,
                )
                for value, value_parts in zip(values, parts, strict=True)
            ]

        operands = cut(leaves, call.in_parts)
        if call.is_alone:
            closed = call.jaxpr
            results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *operands)
        else:
            args, kwargs = call.arguments.with_leaves(operands)
            results = jax.tree.leaves(self._jitted(call.arguments)(*args, **kwargs))
        return jax.tree.unflatten(call.out_tree, cut(results, call.out_parts))

    def across_processes(self) -> bool:
        options = self.options
        says_local = (
            options.local_in_parts,
            options.local_out_parts,
            options.local_num_partitions,
        ) != (None, None, None)
        return says_local or jax.process_count() > 1

    def has_other_devices(self, args: Args, kwargs: Kwargs) -> bool:
        there = contexts.mesh_devices()
        devices = self._devices_by_itself(args, kwargs)
        return devices != there or processes.several(there)

    def _devices_by_itself(self, args: Args, kwargs: Kwargs) -> list[jax.Device]:
        """Where a call runs as a program of its own, outside of all meshes.

        What the function holds may decide that: each kind of call is read once.
        """
        arguments = Arguments.of(args, kwargs)
        check_hashable(self._named(), self.static_parameter, arguments.statics)
        key = arguments.kind()
        devices = self._devices_alone.get(key)
        if devices is None:
            with jax.set_mesh(EMPTY_MESH):
                devices = self.read_alone(args, kwargs).devices
            devices = self._devices_alone.keep(key, devices)
        return devices


def _converted(
    values: Sequence[Value], all_shardings: Sequence[ProcessShardings | None], to: str
) -> list[Value]:
    """Values that JAX traces, as global arrays or as process-local data."""
    return [
        value if each is None else convert_p.bind(value, shardings=each, to=to)
        for value, each in zip(values, all_shardings, strict=True)
    ]
