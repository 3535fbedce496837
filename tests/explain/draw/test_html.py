"""The HTML page: complete in itself, valid, escaped; and looked at in a browser."""

import html
import html.parser
import re

import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.explain.api import explain
from shardmap.explain.draw import svg
from shardmap.explain.draw.html import MOST_PICTURES, fragment, page
from shardmap.explain.draw.style import strong
from tests.explain import explanations
from tests.explain.draw.browser import looked_at, needs_browser

WIDTHS = (360, 768, 1280)
VOID = {"meta", "link", "br", "hr", "img", "input"}


def real():
    """What `explain` itself finds in a program with most that it knows."""
    mesh = sm.make_mesh({"data": 4, "model": 2})

    def block(params, x):
        hidden = lax.psum(x @ params["w"], "model")
        gathered = lax.all_gather(hidden, "data")
        return lax.map(jax.vmap(lambda row: row * 2), gathered)[0], hidden

    layer = sm.mesh_map(
        block,
        mesh,
        in_axes=({"w": {"model": 0}}, {"data": 0, "model": 1}),
        out_axes=({}, {"data": 0}),
    )
    weights = {"w": np.ones((64, 16), np.float32)}
    return explain(layer, interconnect="nvlink4")(weights, np.ones((32, 64), "f4"))


EXPLANATIONS = {**explanations.BY_NAME, "real": real}
by_name = pytest.mark.parametrize("name", EXPLANATIONS)


class Nesting(html.parser.HTMLParser):
    """Notes the tags, the attributes and the texts; fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"{self.open} never close"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        opened = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("<p><b></p></b>", "</p> closes <b>"),
        ("<p>", r"\['p'\] never close"),
        ("</p>", "</p> closes nothing"),
    ],
)
def test_wrong_nesting_is_noticed(wrong, why):
    with pytest.raises(AssertionError, match=why):
        Nesting(wrong)


@by_name
@pytest.mark.parametrize("form", [page, fragment])
def test_tags_match_and_nothing_is_fetched_or_run(name, form):
    text = form(EXPLANATIONS[name]())
    found = Nesting(text)
    assert not {"script", "img", "link", "iframe", "object", "a"} & set(found.tags)
    names = {attribute for _, attribute, _ in found.attributes}
    assert not {"src", "href", "srcset", "xlink:href", "action"} & names
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:", text)


def test_the_page_says_that_it_needs_nothing():
    assert (
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    ) in page(explanations.explanation())


@pytest.mark.parametrize("form", [page, fragment])
def test_markup_in_names_is_text(form):
    found = Nesting(form(explanations.hostile()))
    ordinary = Nesting(form(explanations.with_everything()))
    assert set(found.tags) - {"details", "summary"} == set(ordinary.tags)
    seen = "".join(found.texts).count(explanations.MARKUP)
    spoken = sum(
        explanations.MARKUP in value for _, _, value in found.attributes if value
    )
    assert seen >= 25
    assert spoken >= MOST_PICTURES


def test_everything_that_is_known_is_on_the_page():
    """Texts in any field, and numbers that no other field has."""
    text = html.unescape(page(explanations.with_everything()))
    for wanted in (
        "8 devices (cpu), mesh data 4 x model 2",
        "Axis <code>batch</code> of 256",
        "An axis of 256",
        "of unknown size",
        "8 devices x 32 vectorised x 1 step",
        "x unknown steps",
        "On 8 devices at once, 32 elements are one batched operation.",
        "devices= for other devices",
        "train.py:12 (step)",
        "<code>float32[8,64]</code>",
        "120.6 KiB",
        "On a device <code>(2, 64)</code>, 1.2 KiB",
        "<code>ShardingSpec((Chunked((4,)), None), (ShardedAxis(0), Replicated(2)))",
        "Dimension 0 in 4 shards, each on 2 devices.",
        "Nobody knows.",
        "all-reduce (<code>psum</code>)",
        "<code>data, model</code>",
        "<span>100</span>",
        "7.0 KiB",
        "12 us",
        "put in by the compiler, merged or removed by the compiler",
        "<dd>1.5 T</dd>",
        "<dd>1.9 GiB</dd>",
        "<dd>750</dd>",
        "<dd>3.0 GiB</dd>",
        "arguments 1.0 GiB, results 1.0 MiB, temporary 12 B",
        "estimated for nvlink4: 450 GB/s from a device, 2 us a message (a product",
        "Change first: x is replicated on every device. [x] cut it",
        "XLA counts the body of a loop once.",
    ):
        assert wanted in text, wanted


def test_devices_that_are_not_there_are_named_so():
    assert "4,096 devices (abstract), mesh pod 4 x " in page(explanations.large())


def test_nothing_moves_is_said():
    assert "Nothing moves between devices." in page(explanations.bare())


def test_many_arrays_have_a_line_each_but_few_have_pictures():
    text = page(explanations.large())
    assert text.count("<svg") == MOST_PICTURES + 1
    paths = [f"params['layers'][{number}]['kernel']" for number in range(60)]
    assert [p for p in paths if p not in html.unescape(text)] == []


def test_a_page_of_thousands_of_devices_is_small():
    assert len(page(explanations.large())) < 200_000


def test_a_page_is_the_same_each_time():
    assert page(explanations.large()) == page(explanations.large())


# Pictures.


def boxes(picture):
    """The texts in the boxes of a picture, in order."""
    return re.findall(r'<text class="holders"[^>]*>([^<]*)', picture)


def test_a_picture_has_the_devices_of_each_shard():
    drawn = svg.array("x", explanations.BOTH, (16, 64))
    assert boxes(drawn.picture) == ["0", "2", "4", "6", "1", "3", "5", "7"]
    assert drawn.caption == "dimension 0 down, 1 across"
    assert "[" not in drawn.picture
    assert "0:8, 16:32: device 2." in drawn.picture


def test_a_picture_tells_what_it_shows_to_who_cannot_see_it():
    picture = svg.array("x", explanations.ROWS, (8, 64)).picture
    said = "x: (8, 64) on 8 devices, (2, 64) on each: dimension 0 down. 0:2: devices "
    said += "0-1. 2:4: devices 2-3. 4:6: devices 4-5. 6:8: devices 6-7."
    assert f'role="img" aria-label="{said}"' in picture
    assert f"<title>{said}</title>" in picture


def test_a_mesh_has_its_axes_and_devices():
    drawn = svg.mesh([("data", 2), ("model", 3)])
    assert boxes(drawn.picture) == list("012345")
    assert drawn.caption == "data 2 down, model 3 across"


def test_devices_have_their_own_numbers():
    drawn = svg.mesh([("data", 2), ("model", 2)], [7, 3, 5, 1])
    assert boxes(drawn.picture) == list("7351")
    drawn = svg.array("x", explanations.BOTH, (16, 64), [7, 6, 5, 4, 3, 2, 1, 0])
    assert boxes(drawn.picture) == ["7", "5", "3", "1", "6", "4", "2", "0"]
    drawn = svg.array("x", explanations.ROWS, (8, 64), [7, 6, 5, 4, 3, 2, 1, 0])
    assert boxes(drawn.picture) == ["6-7", "4-5", "2-3", "0-1"]


def test_a_large_picture_is_shortened():
    drawn = svg.mesh([("pod", 8), ("data", 64), ("model", 16)])
    assert "... and 4 more" in drawn.picture
    assert boxes(drawn.picture)[0] == "0"
    assert "127" not in boxes(drawn.picture)
    assert len(boxes(drawn.picture)) <= svg.MAX_GRIDS * svg.MOST_SHARDS[0] ** 2


def test_eight_devices_are_all_drawn():
    assert boxes(svg.mesh([("batch", 8)]).picture) == list("01234567")


def test_a_device_has_one_colour_and_copies_have_several():
    for spec, shape in ((explanations.ROWS, (8, 64)), (explanations.BOTH, (16, 64))):
        picture = svg.array("x", spec, shape).picture
        for shard in re.findall(r'<g class="shard">.*?</g>', picture):
            first, _, last = boxes(shard)[0].partition("-")
            colours = [int(n) for n in re.findall(r"colour(\d)", shard)]
            assert colours == list(range(int(first), int(last or first) + 1))


def test_shards_next_to_each_other_differ_in_colour():
    picture = svg.array("x", explanations.BOTH, (16, 64)).picture
    colours = re.findall(r'<rect class="(colour\d)"', picture)
    assert len(set(colours)) == len(colours) == svg.COLOURS


# In a browser.

SCOPE = ".shardmap-report"
# What makes a good page bad, and what the probe is to say of it.
FAULTS = {
    ".shardmap-report p { width: 2000px; max-width: none }": "the page is",
    ".shardmap-report h2 { margin-bottom: -1.2em }": "overlap",
    ".shardmap-report .layout { color: var(--line) }": "a contrast of",
    ".shardmap-report svg text { font-size: 40px }": "sticks out of its box",
    ".shardmap-report .array { margin-right: -40px }": "sticks out of div.arrays",
}


@pytest.mark.few(1)
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(scheme, tmp_path):
    good = {name: page(make()) for name, make in EXPLANATIONS.items()}
    good["notebook"] = fragment(explanations.with_everything())
    everything = good["everything"]
    bad = [
        everything.replace("</style>", f"{css.replace(SCOPE, strong(SCOPE))}</style>")
        for css in FAULTS
    ]
    by_width = looked_at([*good.values(), *bad], WIDTHS, scheme, tmp_path)

    back = "rgb(20, 23, 26)" if scheme == "dark" else "rgb(255, 255, 255)"
    for width, found in by_width.items():
        reports = dict(zip(good, found, strict=False))
        faults = {name: r["findings"] for name, r in reports.items() if r["findings"]}
        assert faults == {}, width
        assert {report["width"] for report in found} == {width}
        assert reports["everything"]["texts"] > 100
        if width == max(by_width):
            heights = {name: report["height"] for name, report in reports.items()}
            assert max(heights.values()) < 5000, heights
        assert reports["everything"]["back"] == back

        # The probe sees what is wrong with a page.
        planted = zip(FAULTS.items(), found[len(good) :], strict=True)
        for (css, said), report in planted:
            assert any(said in finding for finding in report["findings"]), css
