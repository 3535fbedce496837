"""The stages of a plan, or of a function in pieces: a picture of each, to scale."""

from collections.abc import Sequence
from html import escape
from typing import Any

from shardmap.explain.draw import svg, tables
from shardmap.units import size

_CELL, _GAP, _HEIGHT, _WIDTH = 12, 3, 18, 260


def drawn(stages: Sequence[Any]) -> str:
    """What each makes, reads and keeps."""
    most = max(
        (max(stage.shard_bytes, stage.kept_bytes) for stage in stages), default=1
    )
    return "".join(_stage(stage, most) for stage in stages)


def _stage(stage: Any, most: int) -> str:
    count = f"{stage.shards:,} shard{'s' * (stage.shards != 1)}"
    reads = f"<p>Reads {escape(stage.reads)}.</p>" if stage.reads else ""
    makes = escape("; ".join(stage.makes))
    picture = _picture(stage, most)
    return (
        f'<div class="axis"><h3>Stage {stage.number} '
        f'<span class="quiet">{count}</span></h3>'
        f"{tables.box(picture, f'stage {stage.number}')}{reads}"
        f"<p>Makes {makes}.</p></div>"
    )


def _picture(stage: Any, most: int) -> str:
    """The shards as boxes, and below them what one holds and all keep, all to scale."""
    cells, wide = "", 0.0
    largest = max(1, *stage.moved)
    for k, moved in enumerate(stage.moved):
        is_last = k == len(stage.moved) - 1
        if is_last and stage.shards > len(stage.moved):
            more = f"... {stage.shards - len(stage.moved):,} more"
            cells += _text(wide + 4, 1 + _CELL / 2, more)
            wide += 12 + svg.LETTER * len(more)
        number = stage.shards - 1 if is_last else k
        width = max(2, _CELL * moved / largest)
        cells += (
            f'<rect class="colour{number % svg.COLOURS}" x="{wide:.1f}" y="1" '
            f'width="{width:.1f}" height="{_CELL}" rx="2"/>'
        )
        wide += width + _GAP
    bars = ""
    for line, (label, value) in enumerate(
        (
            (f"{size(stage.shard_bytes)} in a shard", stage.shard_bytes),
            (f"{size(stage.kept_bytes)} kept", stage.kept_bytes),
        )
    ):
        y = _CELL + 8 + line * (_HEIGHT + 4)
        length = max(1, _WIDTH * value / max(most, 1))
        bars += (
            f'<rect class="colour{line}" x="0" y="{y}" width="{length:.1f}" '
            f'height="{_HEIGHT}" rx="2"/>'
        )
        bars += _text(4, y + _HEIGHT / 2, label)
    height = _CELL + 8 + 2 * (_HEIGHT + 4)
    width = int(max(wide, _WIDTH)) + 2
    said = f"{stage.shards:,} shards, {size(stage.shard_bytes)} in a shard, "
    said += f"{size(stage.kept_bytes)} kept"
    return (
        f'<svg class="picture" role="img" aria-label="{said}" width="{width}" '
        f'height="{height}" viewBox="-1 0 {width} {height}"><title>{said}</title>'
        f"{cells}{bars}</svg>"
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text class="start" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
