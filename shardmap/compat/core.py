"""Small names of ``jax.core`` and ``jax.interpreters``, of the years of `jax.pmap`."""

import types
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import jax
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE
from jax.extend.core.primitives import call_p
from jax.sharding import PartitionSpec

from shardmap._jax.context import nothing_is_traced as trace_state_clean
from shardmap._jax.types import Aval
from shardmap.compat.names import is_dropped
from shardmap.sharding.conversions import cut_spec

__all__ = [
    "FLAGS",
    "ArrayMapping",
    "CallPrimitive",
    "ConcreteArray",
    "Index",
    "MeshAxisName",
    "UnshapedArray",
    "array_mapping_to_axis_resources",
    "axis_frame",
    "backend_specific_translations",
    "call_translations",
    "cur_sublevel",
    "enable_omnistaging",
    "full_lower",
    "multi_host_supported_collectives",
    "omnistaging_enabled",
    "raise_to_shaped",
    "register_translation",
    "setup_tpu",
    "spmd_primitive_batchers",
    "trace_state_clean",
    "translations",
]

# Tables that JAX read, and does not any more: libraries fill them when imported.
multi_host_supported_collectives: set[Any] = set()
spmd_primitive_batchers: dict[Any, Any] = {}
translations: dict[Any, Any] = {}
backend_specific_translations: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
call_translations: dict[Any, Any] = {}


def register_translation(prim: Any, rule: Any, **_: object) -> None:
    """Enters a rule in `translations`."""
    translations[prim] = rule


omnistaging_enabled = True


def enable_omnistaging() -> None:
    """Does nothing: since JAX 0.2.11 there is nothing else."""


def setup_tpu() -> None:
    """Does nothing: JAX finds the TPUs of Colab by itself."""


class _Flags:
    """The options of JAX as attributes; one that JAX does not have is kept unused."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax.config, name)

    def __setattr__(self, name: str, value: object) -> None:
        if is_dropped(name, value) or name not in jax.config.values:
            vars(self)[name] = value
        else:
            jax.config.update(name, value)


FLAGS = _Flags()


def cur_sublevel() -> types.SimpleNamespace:
    """Its ``level`` is 1 in a function that `jax.jit` traces, else 0.

    >>> cur_sublevel().level, int(jax.jit(lambda: cur_sublevel().level)())
    (0, 1)
    """
    return types.SimpleNamespace(level=int(unsafe_am_i_under_a_jit_DO_NOT_USE()))


CallPrimitive = type(call_p)
"""The class of primitives that call a jaxpr."""


class ConcreteArray:
    """The type of no object: no aval has a value any more."""


class UnshapedArray:
    """The type of no object: every aval has a shape."""


Index: TypeAlias = int | slice | tuple[int | slice, ...]
MeshAxisName: TypeAlias = Any
ArrayMapping: TypeAlias = OrderedDict


def array_mapping_to_axis_resources(mapping: Mapping[str, int]) -> PartitionSpec:
    """The partition spec of an array whose dimensions mesh axes are assigned to.

    >>> array_mapping_to_axis_resources({"x": 0, "y": 2, "z": 2})
    P('x', None, ('y', 'z'))
    """
    names: dict[int, list[str]] = {}
    for name, dimension in mapping.items():
        names.setdefault(dimension, []).append(name)
    return cut_spec(names)


def axis_frame(axis_name: Hashable) -> types.SimpleNamespace:
    """The ``name`` and the ``size`` of a mapped axis.

    Raises:
      NameError: the name is not bound here, as outside of the map.

    >>> sizes = []
    >>> f = jax.vmap(lambda x: sizes.append(axis_frame("i").size), axis_name="i")
    >>> f(jax.numpy.ones(3)), sizes
    (None, [3])
    """
    size = jax.lax.axis_size(axis_name)
    return types.SimpleNamespace(name=axis_name, size=size, main_trace=None)


def raise_to_shaped(aval: Aval, weak_type: bool | None = None) -> Aval:
    """Returns ``aval``, perhaps with another weak type: it has no value."""
    return aval if weak_type is None else aval.update(weak_type=weak_type)


def full_lower(value: Any) -> Any:
    """Returns ``value``."""
    return value
