"""The diagrams of these pages, drawn from what the programs on them really do.

    JAX_NUM_CPU_DEVICES=8 python docs/diagrams.py

writes them; a test draws them again and compares. What is drawn is read from results,
reports and plans. Nothing here knows where an element goes.
"""

import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterable
from html import escape
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import shardmap as sm
from shardmap.explaining.draw import html, sections
from shardmap.explaining.draw.style import COLOURS, PALETTE

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from examples import heat as heat_example
from examples import population as population_example

LINE = 20
LETTER = 7.4
HIGH = 26
GAP = 6
# The plate of `heat`: cells along a side, and the length of a cell.
SIZE = 32
CELL = 7


class Box(NamedTuple):
    """A box with a text; one colour for one device or shard, in all diagrams."""

    x: float
    y: float
    width: float
    text: str
    colour: int | None
    height: float = HIGH


class Cell(NamedTuple):
    """A cell of a plate; how warm it is, in tenths."""

    x: float
    y: float
    warm: int


class Label(NamedTuple):
    """A text beside the boxes; ``at`` is where it is anchored."""

    x: float
    y: float
    text: str
    at: str = "start"


def axis() -> str:
    """One axis of 32: on eight devices, each with two vectorised elements at a time."""
    return one_map(32, batch_size=2)


def chains() -> str:
    """The chains of examples/chains.py: on eight devices, one after the other."""
    return one_map(24, batch_size=1)


def one_map(length: int, batch_size: int) -> str:
    """The elements of a map, by device and step."""

    def double(x: Any) -> Any:
        return 2 * x

    mapped = sm.spmap(double, batch_size=batch_size)
    elements = np.arange(length, dtype=np.float32)
    found = sm.explain(mapped)(elements).axes[0]
    assert found.vectorised is not None
    assert found.steps is not None
    wide = 30
    step = max(found.vectorised * wide, 2 * wide) + 3 * GAP
    parts: list[Box | Label] = [
        Label(90 + k * step, LINE, f"step {k}") for k in range(found.steps)
    ]
    for row, shard in enumerate(mapped(elements).addressable_shards):
        y = 1.5 * LINE + row * (HIGH + GAP)
        parts.append(Label(0, y + HIGH / 2, f"device {shard.device.id}"))
        for k, element in enumerate(np.asarray(shard.data) / 2):
            x = 90 + (k // found.vectorised) * step + (k % found.vectorised) * wide
            parts.append(Box(x, y, wide, f"{element:.0f}", shard.device.id))
    below = 1.5 * LINE + found.devices * (HIGH + GAP) + LINE / 2
    parts.append(Label(0, below, str(found)))
    return picture(f"spmap(f, batch_size={batch_size}) of {length} elements", parts)


def heat() -> str:
    """The plate of examples/heat.py at first and after some steps, in its blocks."""
    mesh = sm.make_mesh({"rows": heat_example.ROWS, "columns": heat_example.COLUMNS})
    cut = {"rows": 0, "columns": 1}
    spread = sm.mesh_map(heat_example.spread, mesh, (cut, {}), cut)
    start = heat_example.hot_spots(SIZE)
    parts: list[Box | Label | Cell] = []
    for k, steps in enumerate([0, 20]):
        left = k * (SIZE * CELL + 10 * GAP)
        parts.append(Label(left, 0, f"after {steps} steps"))
        for shard in spread(start, np.int32(steps)).addressable_shards:
            block = np.asarray(shard.data)
            row, column = (each.indices(SIZE)[0] for each in shard.index)
            x = left + column * CELL + column // block.shape[1] * GAP
            y = LINE + row * CELL + row // block.shape[0] * GAP
            height, width = CELL * block.shape[0], CELL * block.shape[1]
            parts.append(Box(x, y, width, "", None, height))
            for (i, j), degrees in np.ndenumerate(block):
                if warm := round(float(degrees) / 10):
                    parts.append(Cell(x + j * CELL, y + i * CELL, warm))
    return picture("a plate, in the blocks of eight devices", parts)


def nested() -> str:
    """Two maps of 4 elements each: one mesh, two axes, blocks of the inner map."""
    both = sm.spmap(sm.spmap(lambda x: x, "columns"), "rows")
    result = both(np.arange(16.0).reshape(4, 4))
    return on_mesh("a map of 4 columns in a map of 4 rows, on one mesh", result)


def population() -> str:
    """The members of examples/population.py: each has both shares of a batch."""
    mesh = sm.make_mesh(population_example.MESH)
    over_data = sm.spmap(
        lambda member, share: member + 0 * share,
        mesh=mesh,
        mesh_axes="data",
        in_axes=(None, 0),
    )
    train = sm.spmap(over_data, mesh=mesh, mesh_axes="member", in_axes=(0, None))
    members = np.arange(population_example.MEMBERS, dtype=np.float32)
    result = train(members, np.zeros(mesh.shape["data"], np.float32))
    return on_mesh("8 members on a mesh of member x data", result)


def on_mesh(title: str, result: jax.Array) -> str:
    """The elements of two maps, on the mesh of both."""
    mesh = result.sharding.mesh
    rows, columns = mesh.axis_names
    shards = {shard.device: shard for shard in result.addressable_shards}
    wide = 150
    parts: list[Box | Label] = []
    for (row, column), device in np.ndenumerate(mesh.devices):
        x, y = 120 + column * (wide + GAP), 2.5 * LINE + row * (HIGH + LINE + GAP)
        if row == 0:
            name = f"{columns!r} {column}"
            parts.append(Label(x + wide / 2, 2 * LINE, name, "middle"))
        if column == 0:
            parts.append(Label(0, y + HIGH / 2, f"{rows!r} {row}"))
        values = np.asarray(shards[device].data).ravel()
        for k, value in enumerate(values):
            part = wide / len(values)
            parts.append(Box(x + k * part, y, part, f"{value:.0f}", device.id))
        parts.append(Label(x, y + HIGH + LINE / 2, f"device {device.id}"))
    sizes = ", ".join(f"{name!r}: {size}" for name, size in mesh.shape.items())
    parts.append(Label(0, LINE / 2, f"the mesh {{{sizes}}}"))
    return picture(title, parts)


def stages() -> str:
    """A plan whose second stage waits for the sums of the first."""

    def score(x: Any, w: Any) -> Any:
        mean = x.mean(0)
        deviation = jnp.sqrt((x * x).mean(0) - mean**2 + 1e-3)
        return jnp.tanh((x - mean) / deviation @ w).sum(0)

    x = jax.ShapeDtypeStruct((1000, 16), np.float32)
    w = jax.ShapeDtypeStruct((16, 4), np.float32)
    plan = sm.plan(score, x, w, in_slices=({0: 8}, None))
    wide, parts = 86, []
    y = float(LINE)
    for number, cost in enumerate(sm.explain(plan).stages):
        shards = [shard for shard in plan.shards if shard.stage == number]
        reads = f"stage {number} reads {cost.reads}; these rows of args[0] each:"
        parts.append(Label(0, y, reads))
        for k, shard in enumerate(shards):
            rows = shard.in_slices[0][0]
            place = k * (wide + GAP)
            parts.append(Box(place, y + LINE, wide, f"{rows.start}:{rows.stop}", k))
        # Which line of the program it is from is not of interest here.
        makes = [re.sub(r" \(\S*:\d.*", "", name) for name in cost.makes]
        keeps = f"; {cost.kept_bytes} bytes are kept for the next stage"
        y += LINE + HIGH + LINE
        parts.append(Label(0, y, f"makes {', '.join(makes)}{keeps * (number == 0)}"))
        y += 2 * LINE
    return picture("the stages of a plan", parts)


def explained() -> str:
    """The top of the page that `explain` makes of a training step over data x model."""
    mesh = sm.make_mesh({"data": 4, "model": 2})

    def array(shape: tuple[int, ...], *names: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def loss(weights: Any, batch: Any) -> Any:
        hidden = jax.nn.relu(batch @ weights["in"])
        return ((hidden @ weights["out"] - batch) ** 2).mean()

    @jax.jit
    def train_step(weights: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    weights = {
        "in": array((512, 2048), None, "model"),
        "out": array((2048, 512), "model"),
    }
    report = sm.explain(train_step)(weights, array((256, 512), "data"))
    document = sections.of_report(report)
    parallel, _, mesh_, _, arrays, *_ = document.blocks
    weight, _, rows = arrays.blocks
    # Without the specs: a phone has no room for them.
    cards = [
        dataclasses.replace(card, blocks=(*card.blocks[:-2], card.blocks[-1]))
        for card in (weight, rows)
    ]
    blocks = (parallel, sections.paragraph(*mesh_.title), *mesh_.blocks, *cards)
    page = html.element(dataclasses.replace(document, blocks=blocks)).replace(
        "<wbr>", "<wbr/>"
    )
    page = page.replace("<style>", "<style><![CDATA[").replace(
        "</style>", "]]></style>"
    )
    page = page.replace("<div", '<div xmlns="http://www.w3.org/1999/xhtml"', 1)
    width, height = 440, 920
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">\n'
        "<title>train_step explained</title>\n"
        f'<foreignObject width="{width}" height="{height}">\n{page}\n'
        "</foreignObject>\n</svg>\n"
    )


def picture(title: str, parts: Iterable[Box | Label | Cell]) -> str:
    """An image in light or dark colours, as the page around it has."""
    drawn, right, bottom = [], 0.0, 0.0
    for part in parts:
        if isinstance(part, Box):
            tint = "panel" if part.colour is None else f"tint{part.colour % COLOURS}"
            middle = part.x + part.width / 2, part.y + part.height / 2
            drawn.append(
                f'<rect class="{tint}" x="{part.x:.1f}" y="{part.y:.1f}" '
                f'width="{part.width:.1f}" height="{part.height}"/>'
            )
            if part.text:
                drawn.append(text(*middle, part.text, "middle"))
            right = max(right, part.x + part.width)
            bottom = max(bottom, part.y + part.height)
        elif isinstance(part, Cell):
            drawn.append(
                f'<path class="warm" opacity="{part.warm / 10}" '
                f'd="M{part.x:.0f} {part.y:.0f}h{CELL}v{CELL}h-{CELL}"/>'
            )
        else:
            drawn.append(text(part.x, part.y, part.text, part.at))
            if part.at == "start":
                right = max(right, part.x + LETTER * len(part.text))
            bottom = max(bottom, part.y + LINE / 2)
    width, height = right + 24, bottom + 24
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="-12 -12 {width:.0f} {height:.0f}" '
        'font-family="monospace" font-size="12">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{rules(0)}\n"
        f"@media (prefers-color-scheme: dark) {{\n{rules(1)}\n}}\n</style>\n"
        '<rect class="back" x="-12" y="-12" width="100%" height="100%"/>\n'
        f"{body}\n</svg>\n"
    )


def rules(scheme: int) -> str:
    """The style sheet, light or dark: `back`, `panel` and the tints fill boxes."""
    colours = {name: pair[scheme] for name, pair in PALETTE.items()}
    text, line = colours["text"], colours["line"]
    grounds = [name for name in colours if name in ("back", "panel") or "tint" in name]
    return "\n".join(
        [
            f"text {{ fill: {text}; }}",
            f"rect {{ stroke: {line}; }}",
            ".back { stroke: none; }",
            f".warm {{ fill: {colours['warning']}; }}",
            *(f".{name} {{ fill: {colours[name]}; }}" for name in grounds),
        ]
    )


def text(x: float, y: float, words: str, at: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{at}" '
        f'dominant-baseline="central">{escape(words)}</text>'
    )


DIAGRAMS = {
    "axis.svg": axis,
    "chains.svg": chains,
    "explained.svg": explained,
    "heat.svg": heat,
    "nested.svg": nested,
    "population.svg": population,
    "stages.svg": stages,
}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (pathlib.Path(__file__).parent / name).write_text(draw())
