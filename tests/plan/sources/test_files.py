"""Mapped files travel as where they lie, whatever view of them is given."""

import pickle

import numpy as np
import pytest

# It registers the types that these tests open.
from shardmap.planning.sources import stores  # noqa: F401
from shardmap.planning.sources.registry import remote_ref


@pytest.fixture
def mapped(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", offset=5000, shape=(100, 30))
    x[:] = np.arange(3000).reshape(100, 30)
    return x


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[10:],
        lambda x: x[::-2, 3:],
        lambda x: x.T[::-1],
        lambda x: x[5],
        lambda x: x[4:, None, ::3],
        lambda x: x.view(np.uint32),
    ],
)
def test_any_view_is_opened_again(mapped, view):
    sent = remote_ref(view(mapped))
    again = pickle.loads(pickle.dumps(sent)).open()
    np.testing.assert_array_equal(again, view(mapped))
    assert again.dtype == view(mapped).dtype
    assert not again.flags.writeable
    assert remote_ref(again).description["offset"] == sent.description["offset"]


def test_what_is_written_there_is_here(mapped):
    sent = remote_ref(mapped[20:])
    sent.open(writable=True)[0] = 7
    assert (mapped[20] == 7).all()
    assert sent.grain == (1, 1)


def test_what_is_in_memory_only_stays(mapped, tmp_path):
    copied = np.memmap(tmp_path / "x", np.float32, "c", shape=(10,))
    assert remote_ref(copied) is None
    assert remote_ref(np.ones(3)) is None
    assert remote_ref(mapped + 1) is None
    assert remote_ref(mapped[7:7]) is None
    assert remote_ref(3.0) is None
    (tmp_path / "x").unlink()
    assert remote_ref(mapped) is None


def test_a_file_that_is_too_short_is_told(mapped, tmp_path):
    sent = remote_ref(mapped)
    with open(tmp_path / "x", "r+b") as file:
        file.truncate(8000)
    with pytest.raises(ValueError, match=r"x has 8,000 bytes, .*up to 17,000: it was"):
        sent.open()


def test_files_of_numpy(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(10.0).astype(">f8"))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(remote_ref(x).open(), x)
    assert remote_ref(x).grain is None
