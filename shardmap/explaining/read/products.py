"""What a compiled program does at least: its products by type, and what it reads."""

import collections

from shardmap.explaining.read.hlo.flops import product_flops
from shardmap.explaining.read.hlo.instructions import inside
from shardmap.explaining.read.hlo.loops import steps_of
from shardmap.explaining.read.hlo.module import Computation, Instruction

_PRECISIONS = {1: " high", 2: " highest", "HIGH": " high", "HIGHEST": " highest"}


def products_of(computation: Computation) -> collections.Counter[str]:
    """The flops of products and convolutions that a computation does at least.

    Args:
      computation: the computation. Of its branches, the shortest counts.

    Returns:
      The flops by type: "bf16", "int8", "fp8", "f32", "f32 high", "f32 highest" and so
      on.
    """
    total: collections.Counter[str] = collections.Counter()
    for each in computation.instructions:
        if flops := product_flops(each):
            total[_type(each)] += flops
        parts = list(map(products_of, each.called))
        if each.opcode == "conditional":
            parts = [min(parts, key=collections.Counter.total)]
        times = max(1, steps_of(each) or 1) if each.opcode == "while" else 1
        for part in parts:
            total.update({type_: times * flops for type_, flops in part.items()})
    return total


def _type(product: Instruction) -> str:
    """The wider type of the operands, and of float32 the precision."""
    arrays = [next(operand.shape.arrays()) for operand in product.operands[:2]]
    type_ = max((array.dtype for array in arrays), key=lambda name: _bits(name))
    if type_ == "f32":
        of_library = product.config.get("gemm_backend_config", {})
        asked = of_library.get("precision_config", {}).get("operand_precision")
        given = asked or product.record.message(51).numbers(1)
        # With different precisions, XLA takes the higher one.
        return type_ + max((_PRECISIONS.get(each, "") for each in given), default="")
    names = {"f8": "fp8", "s8": "int8", "u8": "int8", "f1": "bf16"}
    return names.get(type_[:2], type_)


def _bits(type_: str) -> int:
    digits = "".join(c if c.isdigit() else " " for c in type_).split()
    return int(digits[0]) if digits else 0


def read_bytes(entry: Computation) -> int:
    """The bytes of arguments that a program reads at least.

    Of one that only indices or slices are taken from, such as an embedding, it reads
    these. A donated cache that is updated in place is read whole.
    """
    return sum(min(_read(each), each.shape.bytes) for each in entry.parameters)


def _read(value: Instruction) -> int:
    return sum(_read_by(user, value) for user in value.users)


def _read_by(user: Instruction, value: Instruction) -> int:
    if user.opcode in ("gather", "dynamic-slice") and user.operands[0] is value:
        return user.shape.bytes
    if user.opcode == "bitcast":
        return _read(user)
    if user.opcode == "fusion":
        return sum(map(_read, inside(user, value)))
    return value.shape.bytes
