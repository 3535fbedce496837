"""Settings for every test: eight virtual CPU devices, JAX's own settings for tests, and
repeatable hypothesis runs; and which tests `make test` leaves to `make test-deep`.

Nothing here may import JAX before the environment is set.
"""

import gc
import importlib.metadata
import os
import signal

import hypothesis
import numpy as np
import pytest

DEVICE_COUNT = 8
DEVICE_FLAG = "--xla_force_host_platform_device_count"

PROFILE = os.environ.setdefault("HYPOTHESIS_PROFILE", "quick")

if DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
    flags = [os.environ.get("XLA_FLAGS", ""), f"{DEVICE_FLAG}={DEVICE_COUNT}"]
    # Most of a run is XLA compiling small programs, for which it takes half the time
    # without its optimisations; `make test-deep` has them.
    if PROFILE == "quick":
        flags += [
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
        ]
        # XLA ends the process for a flag that it does not know, or not any more.
        release = ".".join(importlib.metadata.version("jaxlib").split(".")[:2])
        flags += {
            "0.10": [
                "--xla_cpu_parallel_codegen_split_count=1",
                "--xla_cpu_use_fusion_emitters=false",
            ],
            "0.12": [
                "--xla_cpu_parallel_codegen_split_count=1",
                "--xla_cpu_emitter_verification_level=0",
            ],
        }.get(release, [])
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What JAX's own test class sets.
os.environ.setdefault("JAX_ENABLE_CHECKS", "1")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_LEGACY_PRNG_KEY", "error")
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

# `quick` and `deep` draw the same examples every time, `nightly` new ones.
for name, repeats, options in (
    ("quick", 4, {"derandomize": True, "database": None}),
    ("deep", 30, {"derandomize": True, "database": None}),
    ("nightly", 300, {}),
):
    hypothesis.settings.register_profile(
        name, deadline=None, max_examples=repeats, **options
    )
hypothesis.settings.load_profile(PROFILE)

# A shell ignores interrupts in what it runs in the background, which processes inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Until all tests are collected there is no garbage to speak of.
gc.disable()
LEFT_OUT = pytest.StashKey[int]()


@pytest.fixture
def young_heap():
    """``gc.collect()`` looks at what a test makes; at all that lives it takes long."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores: for a part of its time a test waits."""
    return (yield) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Chooses the cases of tests with many, and those that `make test` leaves out.

    Of all combinations of a test's parameters ``one_in(n)`` makes cases of those whose
    places in their lists add up to a multiple of n, so that each value is in some case.
    ``few(n)`` marks all cases but n as deep, which are spread evenly, from a place on
    that differs from test to test, as the first of many lists is the same. In a run
    with ``-k``, or of files and node ids, it marks none: what is named runs. A node id
    may also name a deep test, or a combination that is no case.
    """
    cases, ids = {}, {arg for arg in config.args if "::" in arg}
    if ids and config.option.markexpr == "not deep":
        config.option.markexpr = ""
    for item in items:
        if item.nodeid in ids:
            continue
        if mark := item.get_closest_marker("one_in"):
            chosen, rest = cases.setdefault(item.nodeid.partition("[")[0], ([], []))
            places = places_of(item)
            (rest if sum(places) % mark.args[0] else chosen).append((item, places))
    for name, (chosen, rest) in cases.items():
        if values(rest) - values(chosen):
            raise pytest.UsageError(f"{name}: one_in leaves out a value altogether")
    if repeated := {item for _, rest in cases.values() for item, _ in rest}:
        config.hook.pytest_deselected(items=list(repeated))
        items[:] = [item for item in items if item not in repeated]
    here = config.invocation_params.dir
    named = {(here / arg.partition("::")[0]).resolve() for arg in config.args}
    counted = {}
    for item in items:
        if config.option.keyword or item.path in named:
            continue
        if item.get_closest_marker("few") and not item.get_closest_marker("deep"):
            counted.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, many in counted.items():
        n, first = many[0].get_closest_marker("few").args[0], len(name)
        stay = {(first + len(many) * k // n) % len(many) for k in range(n)}
        for place, item in enumerate(many):
            if place not in stay:
                item.add_marker("deep")
    # All that is there by now stays; looking at it again and again takes its time, and
    # tracing makes many objects, of which few are garbage.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


def places_of(item):
    """For each list of a test's parameters, the place of this case in it.

    pytest numbers all cases of a test: the last list's places fastest, and those of
    fixtures that have parameters slowest.
    """
    lists = [mark.args[1] for mark in item.iter_markers("parametrize")]
    own = {name for m in item.iter_markers("parametrize") for name in names_of(m)}
    number = next(item.callspec.indices[name] for name in own)
    fixtures = item.session._fixturemanager
    for name in item.callspec.params.keys() - own:
        (*_, fixture) = fixtures.getfixturedefs(name, item)
        lists.insert(0, fixture.params)
    return np.unravel_index(number, [len(each) for each in lists])


def names_of(mark):
    """The parameters that a ``parametrize`` gives."""
    names = mark.args[0]
    return names.replace(" ", "").split(",") if isinstance(names, str) else names


def values(cases):
    return {place for _, places in cases for place in enumerate(places)}


def pytest_deselected(items):
    config = items[0].config
    count = sum(item.get_closest_marker("deep") is not None for item in items)
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + count
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Each worker collects all tests, so the last one's count is that of all."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter, config):
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{count} deep tests left to `make test-deep`")
