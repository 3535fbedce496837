"""The compilers' records of a program, as they come: protocol buffers.

JAX gives that of the instructions as an object of jaxlib, without promises, and that of
the memory in no other way than a folder that XLA writes to. `jaxlib.xla_client` names
the types.
"""

import pathlib
import tempfile
from typing import Any

import jax
from jaxlib.xla_client import PrimitiveType

from shardmap._jax.errors import is_too_large

DTYPES = {each.value: each.name.lower() for each in PrimitiveType}
"""The names of XLA's types, such as "f32", by number."""

# The enumeration has no names in older releases.
_QUICK: Any = 19 if jax.__version_info__ < (0, 11) else "O1"


def module_proto(compiled: jax.stages.Compiled) -> bytes:
    """The ``HloModuleProto`` of a compiled program.

    Raises:
      ImportError: this JAX has no such record.
    """
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    return bytes(module.as_serialized_hlo_module_proto())


def compiled_with_protos(
    lowered: Any, is_quick: bool = False
) -> tuple[jax.stages.Compiled | None, bytes, bytes]:
    """Compiles a program, and reads its record and that of its memory.

    Args:
      lowered: a `jax.stages.Lowered`.
      is_quick: whether to compile with few optimizations, where the compiler has such.

    Returns:
      The program and its record, or None and nothing if the compiler refuses it as too
      large; and an ``HloProto`` with the ``BufferAssignmentProto``, which is empty for
      a program that comes out of JAX's cache.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses the program, and has no record of
        the memory that it takes.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_proto": True,
        }
        if is_quick:
            options["optimization_level"] = _QUICK
        compiled, record = None, b""
        try:
            compiled = lowered.compile(compiler_options=options)
            record = module_proto(compiled)
        except jax.errors.JaxRuntimeError as error:
            if not (is_too_large(error) and _records(folder)):
                raise
        return compiled, record, b"".join(_records(folder)[:1])


def _records(folder: str) -> list[bytes]:
    files = pathlib.Path(folder).glob("*after_optimizations.hlo.pb")
    return [file.read_bytes() for file in files]
