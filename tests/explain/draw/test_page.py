"""An explanation as text: what it says, how wide it is, and when it has colours."""

import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.explain.draw.page import page
from shardmap.units import duration

WIDTHS = [40, 60, 80, 132]


def fun(x, w):
    return lax.psum(x * w.sum(), "i"), lax.all_gather(x, "i")[0]


@pytest.fixture(scope="module")
def report():
    mapped = sm.spmap(fun, "i", in_axes=(0, None))
    x = jax.ShapeDtypeStruct((16, 256), np.float32)
    w = jax.ShapeDtypeStruct((1 << 19,), np.float32)
    return sm.explain(mapped, interconnect="nvlink4")(x, w)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_too_wide(report, width):
    lines = page(report, width).split("\n")
    # A spec or a path is one word.
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []


def test_it_has_all_that_is_known(report):
    text = " ".join(page(report, 100).split())
    for expected in (
        "fun: 8 cpu devices, mesh 'i': 8",
        "axis 'i' of 16 = 8 devices x 2 vectorised x 1 step (spmap)",
        "To change: Give devices=",
        "x: float32[16,256], 16.0 KiB",
        "a device has (2, 256), 2.0 KiB",
        "w: float32[524288], 2.0 MiB replicated on 8 devices",
        "result[1]: float32[16,256]",
        "1 x all-reduce (psum over 'i', 8 devices): 1.0 KiB in, 1.0 KiB out",
        "1 x all-gather (all_gather over 'i', 8 devices): 2.0 KiB in, 16.0 KiB out",
        "on nvlink4 (450 GB/s a device, 2 us a message",
        "flops",
        "of memory at the peak",
        "Change first: w of 2.0 MiB is replicated on 8 devices",
        "! all_gather gives every device 16.0 KiB",
    ):
        assert expected in text


def test_the_verdict_comes_first_and_remarks_before_all_else(report):
    lines = page(report, 200).split("\n")
    assert lines[1] == "  In parallel: 'i' over 8 devices."
    assert lines[2].startswith("  Between devices: 2 collectives a call, in which")
    assert lines[2].endswith("(fun).")
    assert lines[3].startswith("  Memory on a device: 2.0 MiB, most of it arguments.")
    assert lines[4].startswith("  Change first: w of 2.0 MiB is replicated on")
    assert lines[5].startswith("!")
    assert lines.index("Axes") > max(
        k for k, line in enumerate(lines) if line.startswith("!")
    )


def test_what_to_change_first_is_said_once(report):
    for text in (page(report, 200), report._repr_html_()):
        text = " ".join(text.split())
        for remark in report.remarks:
            assert text.count(remark.text[1:]) == 1
            assert text.count(remark.advice) == 1


def test_results_in_the_place_of_arguments_are_said():
    fun = jax.jit(lambda x, y: (x * 2, y.sum()), donate_argnums=0)
    x, y = jax.ShapeDtypeStruct((256,), np.float32), jax.ShapeDtypeStruct((64,), "f4")
    report = sm.explain(fun)(x, y)
    assert report.cost.donated_bytes == 1024
    said = "results 1.0 KiB, of these in the place of donated arguments 1.0 KiB"
    text = " ".join(str(report).split())
    assert said in text
    assert "most of it arguments" in text
    assert "(1.0 KiB of them in the place of donated" in report._repr_html_()
    assert "donated" not in str(sm.explain(jnp.sin)(x))


def test_collectives_of_a_loop_of_unknown_length_have_no_number():
    def until(x):
        return lax.while_loop(
            lambda c: lax.psum(c, "i") < 100, lambda c: c + lax.pmax(c, "i"), x
        )

    x = jax.ShapeDtypeStruct((8,), np.float32)
    lines = page(sm.explain(sm.spmap(until, "i"))(x), 300).splitlines()
    assert lines[2].startswith(
        "  Between devices: some collectives in each step of a loop; most by all-reduce"
    )
    both = sm.spmap(lambda x: until(lax.all_gather(x, "i").sum()), "i")
    lines = page(sm.explain(both)(x), 300).splitlines()
    assert lines[2].startswith(
        "  Between devices: 1 collective a call, and some in each step of a loop, in "
        "which a device sends at least 28 B; most by all-reduce"
    )


def test_a_narrow_terminal_has_narrow_pictures():
    mapped = sm.spmap(jnp.sin)
    report = sm.explain(mapped)(jax.ShapeDtypeStruct((16,), np.float32))
    wide, narrow = page(report, 120), page(report, 50)
    assert [f"{k}:{k + 2}" in wide for k in range(0, 16, 2)] == [True] * 8
    assert "6:8" not in narrow
    assert "..." in narrow


def test_the_terminal_says_how_wide_it_is(report, monkeypatch):
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert str(report) == page(report, width, colour=False)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "no_colour", "coloured"),
    [
        (io.StringIO, None, False),
        (Terminal, None, True),
        (Terminal, "", True),
        (Terminal, "1", False),
    ],
)
def test_colours(report, monkeypatch, stream, no_colour, coloured):
    monkeypatch.setattr(sys, "stdout", stream())
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour is not None:
        monkeypatch.setenv("NO_COLOR", no_colour)
    assert ("\033[" in str(report)) == coloured


def test_colours_change_nothing_else(report):
    text = page(report, 80, colour=True)
    for code in ("\033[0m", "\033[1m", "\033[2m", "\033[33m"):
        text = text.replace(code, "")
    assert text == page(report, 80, colour=False)


def test_a_program_on_one_device():
    text = page(sm.explain(jax.vmap(jnp.negative))(np.ones((4, 3))), 80)
    assert "(vmap)" in text
    assert "none: nothing moves between devices" in text
    assert "+--" not in text


def test_what_is_not_known():
    def loop(x):
        return lax.while_loop(lambda x: lax.pmax(x.sum(), "i") > 1, lambda x: x / 2, x)

    text = page(sm.explain(sm.spmap(loop, "i"))(np.ones((8, 3))), 100)
    assert "axis of unknown size = 1 device x 1 vectorised x unknown steps" in text
    assert "some x all-reduce (pmax over 'i', 8 devices)" in text


def test_what_the_compiler_changed():
    @sm.spmap(axis_name="i")
    def wasteful(x):
        lax.psum(x + 1, "i")
        return x

    text = page(sm.explain(wasteful)(np.ones((11, 3))), 100)
    assert "XLA removed, merged or replaced 1 collective of the program" in text
    assert "put in by the compiler: " in text


def test_the_time_of_all_together_is_of_those_that_are_compiled():
    @sm.spmap(axis_name="i")
    def wasteful(x):
        lax.all_gather(x, "i")
        return lax.psum(x, "i")

    report = sm.explain(wasteful, interconnect="pcie5")(np.ones((8, 3), np.float32))
    (kept,) = report.collectives
    assert kept.operation == "psum"
    assert report.seconds == report.to_dict()["seconds"] == kept.seconds
    assert f"Together about {duration(kept.seconds)} on pcie5" in page(report, 200)
    assert sm.explain(wasteful)(np.ones((8, 3))).seconds is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.0, "3 s"), (0.0125, "12.5 ms"), (4e-6, "4 us"), (5e-9, "5 ns"), (0.0, "0 ns")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_html(report, tmp_path):
    """The page of `save` and the part of a notebook are about the same."""
    path = tmp_path / "report.html"
    report.save(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    for part in (text, report._repr_html_()):
        assert "all-gather" in part
        assert report.axes[0].layout in part
