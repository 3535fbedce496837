"""What a notebook shows of specs, array layouts and plans; and the page of a plan."""

from collections.abc import Sequence
from html import escape
from typing import Any

from shardmap.explain.draw import html, svg, tables
from shardmap.explain.draw.stages import drawn
from shardmap.explain.read.arrays import describe
from shardmap.explain.report import ArrayLayout
from shardmap.sharding.spec import ShardingSpec


def html_of(value: Any) -> str:
    """A spec, the layout of an array, or a plan, as one element."""
    if isinstance(value, ShardingSpec):
        return html.element(_spec(value))
    if isinstance(value, ArrayLayout):
        return html.element(html.layout(value))
    return html.element(
        plan(str(value).splitlines()[0], value.explain(), value.stage_costs)
    )


def _spec(spec: ShardingSpec) -> str:
    """A spec has no shape: each shard is drawn with the length 1."""
    drawn = svg.array("shards", spec, spec.tile_counts)
    caption = f'<p class="quiet">{escape(drawn.caption)}</p>' if drawn.caption else ""
    return (
        f"<p>{tables.code(spec)}</p><p>{escape(describe(spec).capitalize())}.</p>"
        f"{tables.box(drawn.picture, 'shards')}{caption}"
    )


def plan(title: str, text: str, stages: Sequence[Any]) -> str:
    """The page of a plan: its stages, drawn, then what became of each cut.

    Args:
      title: shards and bytes, in a line.
      text: each axis of each argument, then each stage.
      stages: what each makes, reads and keeps.
    """
    pre = f'<pre class="code">{escape(text)}</pre>'
    return (
        f"<h2>{escape(title)}</h2>\n<section>{drawn(stages)}</section>\n"
        f"<section><h2>Cuts</h2>{tables.box(pre, 'cuts')}</section>"
    )
