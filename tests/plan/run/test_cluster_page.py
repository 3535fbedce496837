"""The scripts and commands of docs/cluster.md, with stand-ins for Slurm."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.command_line import ROOT, SETTINGS
from tests.plan.plan_programs import reals

PAGE = (ROOT / "docs/cluster.md").read_text()
SCRIPTS = dict(re.findall(r"(?s)```py\n# (\S+)\n(.*?)```", PAGE))
COMMANDS = re.findall(r"(?m)^    (\S.*)$", re.sub(r"(?s)```.*?```", "", PAGE))

JOBQUEUE = """
from distributed import LocalCluster

class SLURMCluster(LocalCluster):
    def __init__(self, cores, processes, memory, walltime):
        super().__init__(n_workers=0, threads_per_worker=1, dashboard_address=":0")

    def scale(self, jobs):
        super().scale(2)
"""
SBATCH = """#!/bin/sh
# Runs the tasks of an array in this shell, one after the other or side by side.
for option; do
  case $option in
    --array=0-*) last=${option#--array=0-} ;;
    --dependency=afterok:7 | --wrap | --parsable) ;;
    *) wrap=$option ;;
  esac
done
index=0; tasks=
while [ $index -le $last ]; do
  SLURM_ARRAY_TASK_ID=$index sh -c "$wrap" &
  if [ $SIDE_BY_SIDE ]; then tasks="$tasks $!"; else wait $! || exit 1; fi
  index=$((index + 1))
done
for task in $tasks; do wait $task || exit 1; done
echo 7
"""


def run(command, folder, **environment):
    """The output of a command, in which `python` is this one."""
    return subprocess.run(
        ["sh", "-ec", command],
        cwd=folder,
        env={
            **{name: os.environ[name] for name in os.environ if name not in SETTINGS},
            "PATH": f"{folder}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}:{ROOT}",
            **environment,
        },
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        timeout=600,
    ).stdout


@pytest.mark.deep
def test_dask_on_slurm(s3, tmp_path):
    zarr = pytest.importorskip("zarr", reason="the arrays of the script")
    (tmp_path / "dask_jobqueue.py").write_text(JOBQUEUE)
    (tmp_path / "cluster.py").write_text(SCRIPTS["cluster.py"])
    data = reals(64, 8)
    x = zarr.create_array(
        "s3://bucket/x", shape=data.shape, chunks=(16, 8), dtype=data.dtype
    )
    x[...] = data
    run(COMMANDS[0], tmp_path)
    got = zarr.open_array("s3://bucket/y", mode="r")[...]
    want = np.tanh(data - data.mean(0))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert s3.exists("bucket/job/1-3.bin")


@pytest.mark.deep
@pytest.mark.parametrize("form", ["printed", "at once", "by stage", "in a shell"])
def test_array_jobs(form, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPTS["script.py"])
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    data = reals(128, 8)
    np.save(tmp_path / "x.npy", data)
    np.save(tmp_path / "y.npy", np.zeros_like(data))
    _, printing, at_once, *by_stage, loop = COMMANDS
    if form == "printed":
        printed = run(printing, tmp_path).splitlines()
        assert printed[1] == at_once
        run("\n".join(printed[2:]), tmp_path)
    elif form == "at once":
        run(at_once, tmp_path, SIDE_BY_SIDE="yes")
    else:
        run(loop if form == "in a shell" else "\n".join(by_stage), tmp_path)
    want = np.tanh(data - data.mean(0))
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), want, rtol=1e-4, atol=1e-5)
