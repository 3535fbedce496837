"""A folder that is damaged, of other versions, or no job says so before it runs."""

import json
import os

import pytest

from shardmap.arrays.sources import registry
from shardmap.plan.away.folder.job import Job, JobError, sealed
from shardmap.plan.away.folder.work import Worker
from tests.plan.away.folder.checks import damage, shorten

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")


def link(path):
    """The same content, which another user may change after it was checked."""
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("harm", [damage, shorten, os.remove, link])
@pytest.mark.parametrize(
    "name", ["functions/0.bin", "tables/0-1.jsonl", "inputs/1.npy", "job.json"]
)
def test_what_was_tampered_with_is_not_run(name, harm, path):
    harm(path / name)
    match = r"is missing or damaged|is damaged|is no job|is no plain file"
    with pytest.raises(ValueError, match=match):
        Worker(Job(path)).run()


def test_other_versions_are_told(path):
    job = json.loads((path / "job.json").read_text())
    for change, match in (
        ({"format": 99}, r"written by shardmap .*, jax .* in format 99, .* reads 3"),
        ({"calling_convention": 99}, r"calling convention 99; JAX .* runs \d+ to"),
        ({"platforms": ["tpu"]}, r"written for \['tpu'\], but this process has cpu"),
    ):
        (path / "job.json").write_bytes(sealed(job["body"] | change))
        with pytest.raises(JobError, match=match):
            Worker(Job(path)).run()


def test_kinds_that_are_not_registered_are_told(path, monkeypatch):
    monkeypatch.setattr(registry, "_kinds", {})
    with pytest.raises(JobError, match="nothing is registered for memmap: import"):
        Worker(Job(path)).run()
