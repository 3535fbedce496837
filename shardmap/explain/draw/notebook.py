"""What a notebook shows of specs, pictures, layouts of arrays, and plans."""

from typing import Any

from shardmap.explain.draw import html, sections
from shardmap.explain.draw.document import Document, Drawing, paragraph
from shardmap.explain.report import ArrayLayout
from shardmap.sharding.spec import ShardingSpec


def html_of(value: Any) -> str:
    """A spec, a picture, the layout of an array, or a plan, as one element."""
    if isinstance(value, ShardingSpec):
        return html.element(sections.of_spec(value))
    if isinstance(value, ArrayLayout):
        return html.element(sections.of_array(value))
    if isinstance(value, Drawing):
        header = paragraph(value.grids().header)
        return html.element(Document("", "", (header, value)))
    text: str = value.explain()._repr_html_()
    return text
