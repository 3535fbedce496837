"""A host function that the tests of taps give to maps."""

import pytest

from tests.api.tap_recorder import Recorder


@pytest.fixture
def recorder():
    recorder = Recorder()
    yield recorder
    assert recorder.wait() == {}, "recorded, but not looked at"
