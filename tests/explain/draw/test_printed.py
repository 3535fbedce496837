"""An explanation as text: what it says, and how wide it is."""

import dataclasses
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.explaining.report import Held
from tests.explain import explanations, transformer
from tests.explain.explanations import printed

WIDTHS = [40, 60, 80, 132]
THREE_SCREENS = 150


def fun(x, w):
    return lax.psum(x * w.sum(), "i"), lax.all_gather(x, "i")[0]


@pytest.fixture(scope="module")
def report():
    mapped = sm.spmap(fun, "i", in_axes=(0, None))
    x = jax.ShapeDtypeStruct((16, 256), np.float32)
    w = jax.ShapeDtypeStruct((1 << 19,), np.float32)
    return sm.explain(mapped)(x, w)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_too_wide(report, width):
    lines = printed(report, width).split("\n")
    # A spec or a path is one word.
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []


def test_it_has_all_that_is_known(report):
    text = " ".join(printed(report, 100).split())
    for expected in (
        "fun: 8 cpu devices, mesh 'i': 8",
        "axis 'i' of 16 = 8 devices x 2 vectorised x 1 step (spmap)",
        "To change: Give ",
        "Dimension 0 over 'i' in 8 shards, used by 3 arrays x: float32[16,256], "
        "16.0 KiB; a device has (2, 256), 2.0 KiB result[0] and 1 more: 2 x "
        "float32[16,256], 32.0 KiB; a device has 4.0 KiB ShardingSpec(",
        "Replicated on 8 devices w: float32[524288], 2.0 MiB",
        "Collective Times Devices In, each Out, each Sent in all",
        "all-reduce 1 8 1.0 KiB 1.0 KiB 1.8 KiB psum over 'i', f32[256] at tests",
        "all-gather 1 8 2.0 KiB 16.0 KiB 14.0 KiB all_gather over 'i', f32[2,256]"
        " -> f32[16,256] at tests",
        "Floating point operations 525 k",
        "Memory at the peak 2.0 MiB arguments 2.0 MiB, results 4.0 KiB",
        "Change first: w of 2.0 MiB is replicated on 8 devices",
    ):
        assert expected in text


def test_the_verdict_comes_first_and_remarks_before_all_else(report):
    report = dataclasses.replace(report, remarks=report.remarks * 2)
    lines = printed(report, 200).split("\n")
    assert lines[1] == "  In parallel: 'i' over 8 devices."
    assert lines[2] == "  Needs 2.0 MiB a device; sends 15.8 KiB a step."
    assert lines[3].startswith("! Change first: w of 2.0 MiB is replicated on")
    assert lines[4].startswith("!")
    assert lines.index("Axes") > max(
        k for k, line in enumerate(lines) if line.startswith("!")
    )


def test_what_to_change_first_is_said_once(report):
    for text in (printed(report, 200), report._repr_html_()):
        text = " ".join(text.split())
        for remark in report.remarks:
            assert text.count(remark.text[1:]) == 1
            assert text.count(remark.advice) == 1


def test_a_table_without_room_is_a_list(report):
    said = "Collective all-reduce, Times 1, Devices 8, In, each 1.0 KiB, Out, each 1.0"
    assert said in " ".join(printed(report, 50).split())


def test_results_in_the_place_of_arguments_are_said():
    fun = jax.jit(lambda x, y: (x * 2, y.sum()), donate_argnums=0)
    x, y = jax.ShapeDtypeStruct((256,), np.float32), jax.ShapeDtypeStruct((64,), "f4")
    report = sm.explain(fun)(x, y)
    assert report.cost.donated_bytes == 1024
    said = "results 1.0 KiB, of these in the place of donated arguments 1.0 KiB"
    assert said in " ".join(str(report).split())
    assert said in report._repr_html_()
    assert "donated" not in str(sm.explain(jnp.sin)(x))


def test_small_values_are_not_among_the_largest():
    large = Held("f32[1024]", 4096, "dot_general", "train.py:3 (step)")
    small = Held("u32[]", 4, "partition-id", None)
    cost = dataclasses.replace(explanations.explanation().cost, peak_bytes=10_000)
    report = explanations.explanation(cost=cost, largest=(large, small, large))
    text = printed(report)
    assert "  2 x 4.0 KiB: f32[1024] of dot_general at train.py:3 (step)\n" in text
    assert "partition-id" not in text


def test_collectives_of_a_loop_of_unknown_length_have_no_number():
    def until(x):
        return lax.while_loop(
            lambda c: lax.psum(c, "i") < 100, lambda c: c + lax.pmax(c, "i"), x
        )

    x = jax.ShapeDtypeStruct((8,), np.float32)
    text = printed(sm.explain(sm.spmap(until, "i"))(x), 300)
    assert "; sends at least 0 B a step." in text.splitlines()[2]
    assert "axis of unknown size = 1 device x 1 vectorised x unknown steps" in text
    assert re.search(r"  all-reduce +some +8 ", text)
    both = sm.spmap(lambda x: until(lax.all_gather(x, "i").sum()), "i")
    lines = printed(sm.explain(both)(x), 300).splitlines()
    assert "; sends at least 28 B a step." in lines[2]


def test_a_narrow_terminal_has_narrow_pictures():
    report = sm.explain(sm.spmap(jnp.sin))(jax.ShapeDtypeStruct((16,), np.float32))
    wide, narrow = printed(report, 120), printed(report, 50)
    assert [f"{k}:{k + 2}" in wide for k in range(0, 16, 2)] == [True] * 8
    assert "6:8" not in narrow
    assert "..." in narrow


def test_text_of_a_terminal_has_no_colours(report, monkeypatch):
    """It may be written to a file."""
    monkeypatch.setattr(sys, "stdout", mock.Mock(isatty=lambda: True))
    assert "\033" not in str(report)


def test_arrays_that_are_alike_are_drawn_once():
    row, w = np.ones((16, 8), np.float32), np.ones(8, np.float32)
    mapped = sm.spmap(lambda q, k, v, w: (q * w, (k + v)[:4]), in_axes=(0, 0, 0, None))
    report = sm.explain(mapped)(row, row, row, w)
    text = printed(report, 120)
    assert "  Dimension 0 over 'axis0' in 8 shards, used by 5 arrays\n" in text
    assert "\n      v: float32[16,8], 512 B; a device has (2, 8), 64 B\n" in text
    assert "\n      result[0] and 1 more: 2 arrays, 768 B; a device has 96 B\n" in text
    assert "\n      For q: ShardingSpec((Chunked((8,)), None), (" in text
    assert text.count("0:2 |") == 1
    page = report._repr_html_()
    assert page.count('class="grid"') == 1
    assert "For <code>q</code>: <code>ShardingSpec(" in page


def test_arrays_are_summed_up_by_layout_and_argument():
    rows = explanations.array(explanations.ROWS, (8, 64), path="params['w']")
    narrow = explanations.array(explanations.ROWS, (8, 2), path="params['v']")
    whole = explanations.array(
        explanations.SCALAR, (), path="params['b']", layout="replicated on 8 devices"
    )
    report = explanations.explanation(arrays=(rows, whole) * 2 + (narrow,) * 5)
    text = printed(report, 200)
    assert "\n  Dimension 0 in 4 shards, each on 2 devices, used by 7 arrays\n" in text
    first = "params['w'] and 6 more"
    assert f"\n      {first}: 7 arrays, 843.9 KiB; a device has 8.4 KiB\n" in text
    assert "\n  Replicated on 8 devices, used by 2 arrays\n" in text
    assert "params['b'] and 1 more: 2 x float32[], 241.1 KiB; a device" in text
    assert len(printed(explanations.large()).splitlines()) < 60


def test_the_parts_of_a_state_are_folds_that_name_their_first_array():
    layers = [f"['params']['layer{k}']['w']" for k in range(4)]
    paths = [f"result[0]{path}" for path in layers] + ["result[0]['step']", "result[1]"]
    paths += [f"state{path}" for path in [*layers, "['opt']['w']", "['opt']['b']"]]
    report = explanations.explanation(
        arrays=tuple(
            explanations.array(explanations.ROWS, (8, 64), path=path) for path in paths
        )
    )
    lines = printed(report, 200).split("\n")
    folds = [k for k, line in enumerate(lines) if "float32[8,64]" in line]
    assert [lines[k].partition(":")[0].strip() for k in folds] == [
        "result[0]['params']['layer0']['w'] and 5 more",
        "state['params']['layer0']['w'] and 5 more",
    ]


def test_collectives_are_summed_up_by_line():
    each = explanations.collective()
    other = explanations.collective(bytes_in=8, bytes_out=8)
    elsewhere = explanations.collective(source="train.py:99 (step)")
    report = explanations.explanation(collectives=(each, other, elsewhere, each))
    lines = printed(report, 120).splitlines()
    rows = [line.split() for line in lines if line.startswith("  all-reduce")]
    assert rows == [
        "all-reduce 300 8 <= 4.0 KiB <= 4.0 KiB 1.4 MiB".split(),
        "all-reduce 100 8 4.0 KiB 4.0 KiB 700.0 KiB".split(),
    ]
    unknown = explanations.collective(count=None)
    report = explanations.explanation(collectives=(elsewhere, each, unknown))
    unknown_row = r"  all-reduce +some +8 +4.0 KiB +4.0 KiB +unknown"
    assert re.search(unknown_row, printed(report, 120))


def test_less_that_is_sent_is_a_line():
    rows = tuple(
        explanations.collective(source=f"train.py:{k} (step)", bytes_in=k)
        for k in range(9)
    )
    text = printed(explanations.explanation(collectives=rows))
    assert "  4 more lines of the program, which send less\n" in text
    assert "train.py:3 (step)" not in text
    assert "train.py:4 (step)" in text


def test_control_characters_in_names_are_escapes():
    name = "x\033[31m\u202e"
    report = explanations.explanation(
        name=name,
        axes=(explanations.axis(name=name),),
        arrays=(explanations.array(explanations.ROWS, (8, 64), path=name),),
        collectives=(explanations.collective(kind=name, source=name, axes=(name,)),),
        notes=(name,),
        pieces=(name,),
    )
    text = printed(report)
    assert "\033" not in text
    assert "\u202e" not in text
    assert text.count(r"x\x1b[31m\u202e") >= 6


# A model with an optimiser is two screens of text.


LAYOUTS = ["data", pytest.param("data, model", marks=pytest.mark.deep)]


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request):
    return transformer.explained(request.param)


def test_a_model_is_three_screens(model):
    assert len(printed(model).splitlines()) <= THREE_SCREENS


def test_every_collective_has_the_line_and_the_cause_that_are_its_own(model):
    """XLA sends the gradients as one, and says of that only one line."""
    assert len(model.collectives) > 8
    places = {each.source.partition(" ")[0] for each in model.collectives}
    assert len(places) > 4
    for each in model.collectives:
        assert each.source.startswith("tests/explain/transformer.py:"), each
        assert each.cause


def test_an_advice_is_given_once(model):
    text, page = printed(model, 200), model._repr_html_()
    assert text.count("The arrays' shardings say how many devices") == 1
    for advice in {each.advice for each in model.collectives} - {None}:
        assert text.count(advice) == 1
        assert page.count(advice) == 1
