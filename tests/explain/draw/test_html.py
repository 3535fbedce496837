"""The HTML page: complete in itself, valid, escaped; and looked at in a browser."""

import html
import html.parser
import pathlib
import re
import tempfile

import hypothesis
import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap import picture
from tests.explain import explanations
from tests.explain.draw.browser import looked_at, needs_browser
from tests.explain.layouts import layouts

WIDTHS = (360, 1280)
VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}


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
    return sm.explain(layer)(weights, np.ones((32, 64), "f4"))


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


def saved(report):
    """The page that ``save`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "report.html"
        report.save(path)
        return path.read_text(encoding="utf-8")


def shown(report):
    return report._repr_html_()


@by_name
@pytest.mark.parametrize("form", [saved, shown])
def test_tags_match_and_nothing_is_fetched_or_run(name, form):
    text = form(EXPLANATIONS[name]())
    nesting = Nesting(text)
    assert not {"script", "img", "link", "iframe", "object", "a"} & set(nesting.tags)
    names = {attribute for _, attribute, _ in nesting.attributes}
    assert not {"src", "href", "srcset", "xlink:href", "action"} & names
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:", text)


def test_the_page_says_that_it_needs_nothing():
    assert (
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    ) in saved(explanations.explanation())


@pytest.mark.parametrize("form", [saved, shown])
def test_markup_in_names_is_text(form):
    nesting = Nesting(form(explanations.hostile()))
    ordinary = Nesting(form(explanations.with_everything()))
    assert set(nesting.tags) - {"details", "summary"} <= set(ordinary.tags)
    assert "".join(nesting.texts).count(explanations.MARKUP) >= 40


def test_everything_that_is_known_is_on_the_page():
    """Texts in any field, and numbers that no other field has."""
    text = html.unescape(saved(explanations.with_everything()))
    text = re.sub(r"</?(span|code)>", "", text)
    for wanted in (
        "8 cpu devices, mesh 'data': 4, 'model': 2",
        "axis 'batch' of 256 = 8 devices x 32 vectorised x 1 step (spmap)",
        "axis 'i' of unknown size",
        "x unknown steps",
        "Give devices=, or mesh= and mesh_axes=, for other devices",
        "train.py:12 (step)",
        "Dimension 0 in 4 shards, each on 2 devices",
        "x['w'][0]: float32[8,64], 120.6 KiB",
        "a device has (2, 64), 1.2 KiB",
        "ShardingSpec((Chunked((4,)), None), (ShardedAxis(0), Replicated(2)))",
        "Nobody knows",
        "psum over 'data', 'model' at train.py:12 (step)",
        '<td data-label="Collective">all-reduce</td><td data-label="Times">100</td>',
        '<td data-label="Sent in all">700.0 KiB',
        "Added by the compiler: reduce_sum reduces a sharded dimension.",
        'Floating point operations</td><td data-label="">1.5 T',
        "1.9 GiB",
        "3.0 GiB",
        "arguments 1.0 GiB, results 1.0 MiB, temporary 12 B",
        "Change first: x is replicated on every device. [x] cut it",
        "XLA counts the body of a loop once.",
    ):
        assert wanted in text, wanted


def test_each_of_many_arrays_has_a_line_and_all_have_one_picture():
    text = html.unescape(saved(explanations.large()))
    paths = [f"params['layers'][{number}]['kernel']</code>" for number in range(60)]
    assert [path for path in paths if path not in text] == []
    assert text.count("dimension 0 down, 1 across") == 1


def test_a_page_of_thousands_of_devices_is_small():
    assert len(saved(explanations.large())) < 100_000
    assert saved(explanations.large()) == saved(explanations.large())


# Pictures.


def shards(text):
    """The devices of each shard that is drawn, and its tint."""
    shard = r'<td class="shard" style="background:var\(--tint(\d)\)">(.*?)</td>'
    cells = re.findall(shard, text)
    return [(said.replace("<wbr>", ""), int(tint)) for tint, said in cells]


def holders(value):
    return [said for said, _ in shards(value._repr_html_())]


def labels(value):
    heads = re.findall(r'<th scope="(?:col|row)">(.*?)</th>', value._repr_html_())
    return [each.replace("<wbr>", "") for each in heads]


def test_a_page_shows_as_many_shards_as_text():
    spec = explanations.ShardingSpec(
        (None, explanations.Chunked(8)), (explanations.ShardedAxis(0),)
    )
    drawn = picture(spec, (16, 4096))
    assert labels(drawn)[:4] == ["0:512", "512:1024", "1024:1536", "1536:2048"]
    assert holders(drawn) == list("01234567")


def test_shards_next_to_each_other_differ_in_tint():
    for spec, shape in ((explanations.ROWS, (8, 64)), (explanations.BOTH, (16, 64))):
        tints = [tint for _, tint in shards(picture(spec, shape)._repr_html_())]
        assert tints == list(range(len(tints)))


@pytest.mark.parametrize("shape", [(), (8, 64)])
def test_an_array_that_is_copied_cannot_be_taken_for_one_that_is_cut(shape):
    spec = explanations.ShardingSpec(
        (None,) * len(shape), (explanations.Replicated(8),)
    )
    arrays = (explanations.array(spec, shape),)
    report = explanations.explanation(arrays=arrays, mesh=())
    for value in (report, picture(spec, shape)):
        text = value._repr_html_()
        assert '<span class="copies">x 8</span> whole on devices 0-7' in text
        assert shards(text) == []
        assert 'class="grid"' not in text


def test_devices_have_their_own_numbers():
    devices = jax.devices()[::-1]
    drawn = picture(explanations.BOTH.named_sharding(devices), (16, 64))
    assert holders(drawn) == ["7", "5", "3", "1", "6", "4", "2", "0"]
    drawn = picture(explanations.ROWS.named_sharding(devices), (8, 64))
    assert holders(drawn) == ["6-7", "4-5", "2-3", "0-1"]


def test_a_large_picture_is_shortened():
    spec = sm.ShardingSpec(map(sm.Chunked, (8, 64, 16)), map(sm.ShardedAxis, range(3)))
    drawn = picture(spec, (8, 64, 16))
    said = "... and 4 more; dimension 1 down, 2 across"
    assert said in drawn._repr_html_()
    assert holders(drawn)[:2] == ["0", "1"]
    assert len(holders(drawn)) == 4 * 7 * 7


def test_a_page_begins_with_its_mesh_and_has_each_layout_once():
    """Of a step with eight weights and their results, cut in two ways."""
    mesh = jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("d", "m"))

    def array(*names):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))
        return jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)

    weights = {"in": [array(None, "m")] * 4, "out": [array("m")] * 4}
    step = jax.jit(lambda w: jax.tree.map(lambda x: x * 2, w))
    report = sm.explain(step)(weights)
    page = report._repr_html_()
    mesh_, _, rest = page.partition("<summary>Devices of the mesh ")[2].partition(
        "</details>"
    )
    assert mesh_.startswith("&#x27;d&#x27; x &#x27;m&#x27;</summary>")
    assert [said for said, _ in shards(mesh_)] == list("76543210")
    assert "<h2>Arrays" in rest
    assert report.mesh_devices == (*range(7, -1, -1),)
    titles = re.findall("<h3>(Dimension .*?)</h3>", page)
    of = "over &#x27;m&#x27; in 2 shards, each on 4 devices, used by 8 arrays"
    assert titles == [f"Dimension 1 {of}", f"Dimension 0 {of}"]
    assert [said for said, _ in shards(rest)] == ["1,3,5,7", "0,2,4,6"] * 2


@hypothesis.given(layouts())
def test_a_page_draws_what_text_draws(layout):
    text = picture(*layout)
    page = text._repr_html_()
    boxes = re.findall(r"(?<=\|) *(?:whole on devices )?([\d,.-]+) *(?=\|)", text)
    whole = re.findall(r"whole on devices? ([\d,.-]+)", page)
    assert [said for said, _ in shards(page)] + whole == [
        b for b in boxes if b != "..."
    ]


# In a browser.

# What makes a good page bad, and what the probe is to say of it.
FAULTS = {
    "p { width: 2000px; max-width: none }": "the page is",
    "h2 { margin-bottom: -1.2em }": "overlap",
    ".quiet { color: var(--line) }": "a contrast of",
    ".shard { max-width: 30px; font-size: 40px; display: block }": "sticks out of it",
    ".card { margin-right: -40px }": "sticks out of section",
}
SCOPE = ".shardmap-report" * 4


@pytest.mark.few(1)
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(scheme, tmp_path):
    good = {name: saved(make()) for name, make in EXPLANATIONS.items()}
    good["notebook"] = shown(explanations.with_everything())
    everything = good["everything"]
    bad = [everything.replace("</style>", f"{SCOPE} {css}</style>") for css in FAULTS]
    by_width = looked_at([*good.values(), *bad], WIDTHS, scheme, tmp_path)

    back = "rgb(20, 23, 26)" if scheme == "dark" else "rgb(255, 255, 255)"
    for width, answers in by_width.items():
        reports = dict(zip(good, answers, strict=False))
        faults = {name: r["findings"] for name, r in reports.items() if r["findings"]}
        assert faults == {}, width
        assert {report["width"] for report in answers} == {width}
        assert reports["everything"]["texts"] > 100
        if width == max(by_width):
            heights = {name: report["height"] for name, report in reports.items()}
            assert max(heights.values()) < 5000, heights
        assert reports["everything"]["back"] == back

        # The probe sees what is wrong with a page.
        planted = zip(FAULTS.items(), answers[len(good) :], strict=True)
        for (css, said), report in planted:
            assert any(said in finding for finding in report["findings"]), css


def test_arrays_that_lie_differently_have_pictures_of_their_own():
    """Also where the words for how they are cut are the same."""
    ids = tuple(range(7, -1, -1))
    arrays = (
        explanations.array(explanations.ROWS, (8, 64), path="x"),
        explanations.array(explanations.ROWS, (8, 64), path="y", devices=ids),
        explanations.array(explanations.STRIDED, (4,), path="z"),
    )
    for report in (
        explanations.explanation(arrays=arrays, mesh=()),
        explanations.explanation(arrays=arrays * 3, mesh=()),
    ):
        told = [said for said, _ in shards(report._repr_html_())]
        assert told[:4] == ["0-1", "2-3", "4-5", "6-7"]
        assert told[4:8] == ["6-7", "4-5", "2-3", "0-1"]
        assert len(told) == 4 + 4 + 2


def test_a_picture_for_arrays_of_several_shapes_names_its_own():
    mesh = sm.make_mesh({"i": 8})
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    arrays = [jax.device_put(np.ones(8 * n, np.float32), cut) for n in range(1, 10)]
    page = sm.explain(lambda xs: [x + 1 for x in xs])(arrays)._repr_html_()
    assert "For <code>xs[0]</code>: <code>ShardingSpec(" in page
