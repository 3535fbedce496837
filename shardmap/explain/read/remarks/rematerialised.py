"""Arrays that the partitioner makes whole, as it knows no way between two layouts."""

from collections.abc import Sequence

from shardmap.explain.read.hlo.collectives import CompiledCollective
from shardmap.explain.report import Remark
from shardmap.units import size


def rematerialised(sent: Sequence[CompiledCollective]) -> list[Remark]:
    """A remark for each line that has such arrays."""
    found: dict[str | None, Remark] = {}
    for each in sent:
        if each.cause is not None and each.cause.is_rematerialised:
            text = f"{each.cause.text}, {size(each.bytes_out)} on each"
            found.setdefault(each.source, Remark(text, each.cause.advice, each.source))
    return list(found.values())
